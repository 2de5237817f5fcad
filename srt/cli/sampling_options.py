"""Options of how tokens are chosen, which the generating commands share."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.cli.options import add_sampling_defaults, read_text
from srt.errors import RequestError
from srt.utils.text_streams import read_argument

if TYPE_CHECKING:
    from srt.sampling.sampling_params import SamplingParams

# Options whose default is that of SamplingParams, which this module does not import: it loads
# NumPy, and `srt --help` should not.
_OPEN = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "seed",
)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of how tokens are chosen."""
    group = parser.add_argument_group(
        "sampling",
        "Temperature, top-k, top-p, min-p and repetition penalty that are not given here are those "
        "of --sampling-defaults.",
    )
    add_sampling_defaults(group)
    for name, kind, metavar, text in (
        ("--max-new-tokens", int, "N", "most tokens to generate (default: 512)"),
        ("--temperature", float, "T", "divisor of the logits; 0 takes the most likely token"),
        ("--top-k", int, "K", "sample among the K most likely tokens; 0 or -1 for all"),
        ("--top-p", float, "P", "sample among the most likely tokens of this total probability"),
        ("--min-p", float, "P", "sample among tokens at least P times as likely as the likeliest"),
        (
            "--repetition-penalty",
            float,
            "F",
            "divide (below 0: multiply) the logits of tokens of prompt and output by F; 1 for none",
        ),
        (
            "--presence-penalty",
            float,
            "F",
            "subtract F from the logits of tokens generated before (default: 0)",
        ),
        (
            "--frequency-penalty",
            float,
            "F",
            "subtract F for each time that a token was generated (default: 0)",
        ),
        ("--seed", int, "N", "seed of the random numbers, below 2**64 (default: fresh ones)"),
    ):
        group.add_argument(name, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=F",
        help="add F to the logit of a token id; may be repeated",
    )
    group.add_argument(
        "--min-tokens",
        "--min-new-tokens",
        type=int,
        dest="min_new_tokens",
        metavar="N",
        help="tokens to generate before the answer may end (default: 0)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text, which may contain special tokens; may be repeated",
    )
    group.add_argument(
        "--stop-token-ids", type=int, nargs="+", metavar="ID", help="end at these token ids too"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate on past the end-of-sequence token"
    )
    group.add_argument(
        "--no-skip-special-tokens",
        action="store_false",
        dest="skip_special_tokens",
        help="keep special tokens in the text",
    )


def add_structure_options(parser: argparse.ArgumentParser) -> None:
    """Options of what the output follows."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="JSON that follows the schema in FILE"
    )
    group.add_argument("--regex", metavar="REGEX", help="text that all of REGEX matches")
    group.add_argument(
        "--grammar", type=Path, metavar="FILE", help="text by the grammar in FILE (Lark or GBNF)"
    )


def read_structure(args: argparse.Namespace) -> dict[str, str]:
    """The sampling parameter that these options set, or none.

    Raises:
        RequestError: A file cannot be read.
    """
    if args.json_schema is not None:
        return {"json_schema": read_text(args.json_schema, "the JSON schema")}
    if args.grammar is not None:
        return {"grammar": read_text(args.grammar, "the grammar")}
    return {} if args.regex is None else {"regex": read_argument("--regex", args.regex)}


def add_template_option(group: "argparse._ActionsContainer") -> None:
    """The option of variables for the chat template."""
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables for the chat template, such as '{\"enable_thinking\": false}'",
    )


def make_sampling_params(args: argparse.Namespace, **others: Any) -> "SamplingParams":
    """The sampling parameters that the options describe, and `others`.

    Raises:
        RequestError: A value out of range.
    """
    from srt.sampling.sampling_params import SamplingParams

    given = {name: getattr(args, name) for name in _OPEN if getattr(args, name) is not None}
    given["stop"] = [read_argument("--stop", text) for text in args.stop or ()]
    return SamplingParams(
        **given,
        **others,
        logit_bias=dict(_read_bias(text) for text in args.logit_bias),
        ignore_eos=args.ignore_eos,
        skip_special_tokens=args.skip_special_tokens,
    )


def _read_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise RequestError(
            f"--logit-bias: expected a token id and a number such as 42=-1.5, found {text!r}"
        ) from None


def read_template_kwargs(args: argparse.Namespace) -> dict[str, Any] | None:
    """The variables of --chat-template-kwargs, or None.

    Raises:
        RequestError: It is not an object in JSON.
    """
    if args.chat_template_kwargs is None:
        return None
    try:
        kwargs = json.loads(read_argument("--chat-template-kwargs", args.chat_template_kwargs))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--chat-template-kwargs is not JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise RequestError(
            "--chat-template-kwargs: expected an object such as '{\"enable_thinking\": false}', "
            f"found {args.chat_template_kwargs!r}"
        )
    return kwargs
