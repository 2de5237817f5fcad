"""`srt generate`: one prompt or several, answered."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.cli.options import add_engine_options, make_config, make_engine, read_text
from srt.cli.sampling_options import (
    add_sampling_options,
    add_structure_options,
    add_template_option,
    make_sampling_params,
    read_structure,
    read_template_kwargs,
)
from srt.errors import RequestError, SrtError
from srt.utils.text_streams import read_argument, write_answer

if TYPE_CHECKING:
    from srt.entrypoints.engine import Engine
    from srt.entrypoints.outputs import GenerateChunk, GenerateOutput


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "generate",
        help="answer a prompt",
        description="Answers a prompt. A single answer is written to stdout as it comes; "
        "statistics go to stderr.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="the prompt; repeat it to answer several together",
    )
    source.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="read the prompt from a file; - is stdin"
    )
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt into the chat template (default where there is one)",
    )
    form.add_argument("--raw", action="store_true", help="continue the prompt as it is")
    group.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    add_template_option(group)
    add_sampling_options(parser)
    add_structure_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object with texts, token ids and statistics",
    )
    output.add_argument(
        "--logprobs",
        action="store_true",
        help="with --json: log-probabilities of the generated tokens, by the model's own "
        "distribution",
    )
    output.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="N",
        help="with --logprobs: those of the N most likely tokens too",
    )
    output.add_argument(
        "--prompt-logprobs",
        action="store_true",
        help="with --json: log-probabilities of the prompt's tokens",
    )
    output.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write a single answer as it comes, or at once when it is complete",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if (args.logprobs or args.prompt_logprobs) and not args.json:
        raise RequestError("--logprobs and --prompt-logprobs need --json")
    if args.top_logprobs and not (args.logprobs or args.prompt_logprobs):
        raise RequestError("--top-logprobs needs --logprobs or --prompt-logprobs")
    params = make_sampling_params(
        args,
        return_logprob=args.logprobs,
        top_logprobs_num=args.top_logprobs,
        return_prompt_logprob=args.prompt_logprobs,
        **read_structure(args),
    )
    template_kwargs = read_template_kwargs(args)
    template_options = {
        "--system": args.system,
        "--chat-template-kwargs": template_kwargs,
        "--chat": args.chat or None,
    }
    needing_template = [name for name, value in template_options.items() if value is not None]
    if args.raw and needing_template:
        raise RequestError(f"{needing_template[0]} needs a chat template, which --raw goes without")
    if args.prompt:
        prompts = [read_argument("--prompt", prompt) for prompt in args.prompt]
    else:
        prompts = [read_text(args.prompt_file, "the prompt").removesuffix("\n")]
    if args.system is not None:
        args.system = read_argument("--system", args.system)
    config = make_config(
        args,
        max_running_requests=min(len(prompts), 32),
        template_needed_by=needing_template[0] if needing_template else None,
    )
    with make_engine(args, config) as engine:
        request = _request(engine, prompts, args, template_kwargs)
        if len(prompts) == 1 and args.stream and not args.json:
            outputs = [_stream(engine.generate(sampling_params=params, stream=True, **request))]
        else:
            outputs = engine.generate(sampling_params=params, **request)
    facts = _run_facts()
    errors = [output.error for output in outputs if output.error is not None]
    if args.json:
        print(json.dumps({"outputs": [output.to_dict() for output in outputs], **facts}, indent=2))
    elif len(prompts) > 1 or not args.stream:
        for prompt, output in zip(prompts, outputs, strict=True):
            text = f"{prompt}\n  -> {output.text}\n" if len(prompts) > 1 else output.text
            write_answer(f"{text}\n")
    if errors:
        raise SrtError(errors[0])
    if args.progress and not args.json:
        _print_statistics(outputs, facts)
    return 0


def _request(
    engine: "Engine",
    prompts: list[str],
    args: argparse.Namespace,
    template_kwargs: dict[str, Any] | None,
) -> dict[str, Any]:
    """The arguments of Engine.generate for the prompts, as conversations or as they are."""
    if args.raw or not (args.chat or engine.has_chat_template):
        return {"prompt": prompts}
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return {
        "messages": [[*system, {"role": "user", "content": prompt}] for prompt in prompts],
        "chat_template_kwargs": template_kwargs,
    }


def _stream(chunks: Iterable["GenerateChunk"]) -> "GenerateOutput":
    """Writes an answer to stdout as it comes; returns the result."""
    output = None
    for chunk in chunks:
        write_answer(chunk.text)
        output = chunk.output
    write_answer("\n")
    assert output is not None, "a generation ends with its result"
    return output


def _run_facts() -> dict[str, Any]:
    """What the speed depends on, and the memory that the process took."""
    import torch

    import sgl_kernel
    from srt.utils.process_memory import peak_rss

    return {
        "isa_tier": sgl_kernel.cpu_info()["tier"],
        "threads": torch.get_num_threads(),
        "peak_rss_bytes": peak_rss(),
    }


def _print_statistics(outputs: list["GenerateOutput"], facts: dict[str, Any]) -> None:
    from rich.table import Table

    from srt.utils.console import make_console

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    prompt_tokens = sum(output.prompt_tokens for output in outputs)
    new_tokens = sum(output.completion_tokens for output in outputs)
    prefill = max(output.prefill_seconds for output in outputs)
    decode = max(output.decode_seconds for output in outputs)
    decoded = new_tokens - len(outputs)
    table.add_row("prefill", f"{prompt_tokens / prefill:.1f} tokens/s", f"{prompt_tokens} tokens")
    table.add_row(
        "decode",
        f"{decoded / decode:.1f} tokens/s" if decoded else "-",
        f"{new_tokens} tokens, ended by {outputs[0].finish_reason}"
        if len(outputs) == 1
        else f"{new_tokens} tokens",
    )
    table.add_row("ISA tier", facts["isa_tier"])
    table.add_row("threads", str(facts["threads"]))
    table.add_row("peak memory", f"{facts['peak_rss_bytes'] / 1e6:.0f} MB")
    console = make_console(stderr=True)
    console.print()
    console.print(table)
