"""`srt perplexity`: how well a model predicts a text."""

import argparse
import json
from pathlib import Path

from srt.cli.options import add_model_options, make_config, make_engine, read_text
from srt.errors import RequestError
from srt.utils.kernels import load_kernels


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "perplexity",
        help="measure how well a model predicts a text",
        description="Perplexity of a text: e to the mean of -ln p over its tokens, each given the "
        "tokens before it in a window that slides over the text. Compare models by it that share "
        "a tokenizer, with the same window and stride: what a quantization costs, for example.",
    )
    add_model_options(parser)
    group = parser.add_argument_group("text")
    group.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="the text, UTF-8; - is stdin"
    )
    group.add_argument(
        "--tokens", type=int, metavar="N", help="only the first N tokens (default: all)"
    )
    group.add_argument(
        "--window",
        type=int,
        default=1024,
        metavar="N",
        help="tokens that the model sees at once (default: %(default)s)",
    )
    group.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens by which windows are apart (default: half a window)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if args.tokens is not None and args.tokens < 2:
        raise RequestError(f"--tokens {args.tokens}: expected 2 at least")
    if args.window < 2:
        raise RequestError(f"--window {args.window}: expected 2 at least")
    stride = args.window // 2 if args.stride is None else args.stride
    if not 1 <= stride < args.window:
        raise RequestError(
            f"--stride {stride}: expected 1 to {args.window - 1}, less than the window"
        )
    text = read_text(args.text, "the text")
    with args.signals.importing():
        load_kernels()
        from srt.perplexity.report import measure_perplexity

    with make_engine(args, make_config(args, max_total_tokens=args.window)) as engine:
        report = measure_perplexity(
            engine,
            text,
            tokens=args.tokens,
            window=args.window,
            stride=stride,
            show_progress=args.progress and not args.json,
        )
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0
