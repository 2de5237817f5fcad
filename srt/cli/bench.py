"""`srt bench`: offline speed, next to what the memory allows and to peers in the same run."""

import argparse
import json
from itertools import product
from pathlib import Path

from srt.bench.plot_file import check_plot_file
from srt.cli.options import add_engine_options, make_config, make_engine
from srt.errors import RequestError, SrtError
from srt.utils.kernels import load_kernels


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure how fast a checkpoint generates",
        description="Generates from random prompts and prints tokens per second, for every "
        "combination of the lengths and batch sizes given. Decoding is compared with the time that "
        "reading the weights takes at the bandwidth measured in the same run. Peers run in turn "
        "with this runtime.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("workload")
    for name, default, text in (
        ("--input-len", [512], "tokens of a prompt"),
        ("--output-len", [64], "tokens to generate, 2 or more"),
        ("--batch-size", [1], "prompts that run together"),
    ):
        group.add_argument(
            name,
            type=int,
            nargs="+",
            default=default,
            metavar="N",
            help=f"{text} (default: {default[0]})",
        )
    group.add_argument(
        "--repetitions", type=int, default=5, metavar="N", help="runs (default: %(default)s)"
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--gguf",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="the same model for llama.cpp; needs llama-bench on PATH; may be repeated",
    )
    peers.add_argument(
        "--transformers",
        type=Path,
        metavar="DIR",
        help="the unquantized checkpoint of the same model, for transformers",
    )
    peers.add_argument(
        "--transformers-dtype",
        nargs="+",
        choices=("bfloat16", "float32"),
        default=["bfloat16"],
        help="what transformers computes in (default: bfloat16)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    lengths = [*args.input_len, *args.batch_size, args.repetitions]
    if min(lengths) < 1 or min(args.output_len) < 2:
        raise RequestError(
            "expected lengths, batch sizes and repetitions >= 1 and --output-len >= 2"
        )
    if args.plot is not None:
        check_plot_file(args.plot)
    peer = args.transformers
    if peer is not None and not (peer / "config.json").is_file():
        raise SrtError(f"transformers cannot load {peer}: it has no config.json")
    with args.signals.importing():
        load_kernels()
        from srt.bench.benchmark import run_benchmark
        from srt.bench.peers import LlamaBench, Transformers
        from srt.bench.report import plot, print_table
        from srt.bench.workload import Case, Contender
        from srt.utils.console import make_console
    peers: list[Contender] = [LlamaBench.find(gguf) for gguf in args.gguf]
    cases = [
        Case(batch, input_len, output_len)
        for batch, input_len, output_len in product(
            args.batch_size, args.input_len, args.output_len
        )
    ]
    config = make_config(
        args,
        max_running_requests=max(args.batch_size),
        # Prompts are the same in every run, and are to be computed in every run.
        enable_radix_cache=False,
        # A penalty in generation_config.json would be measured with the model.
        sampling_defaults="greedy",
    )
    with make_engine(args, config) as engine:
        if args.transformers is not None:
            peers += [Transformers(args.transformers, dtype) for dtype in args.transformers_dtype]
        facts, rows = run_benchmark(engine, str(args.model_path), peers, cases, args.repetitions)
    if args.json:
        print(json.dumps({**facts, "results": rows}, indent=2))
    else:
        print_table(make_console(), facts, rows)
    if args.plot is not None:
        plot(facts, rows, args.plot)
    return 0
