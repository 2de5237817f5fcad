"""`srt bench`: offline speed, next to what the memory allows and to peers in the same run."""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from srt.bench.plot_file import check_plot_file
from srt.cli.options import add_engine_options, make_engine
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
        from srt.bench.bound import decode_bound, decode_bytes, read_bandwidth
        from srt.bench.peers import LlamaBench, Transformers
        from srt.bench.report import plot, print_table
        from srt.bench.workload import Case, Contender, OurEngine, measure
        from srt.utils.console import make_console
    llama_benches = [LlamaBench.find(gguf) for gguf in args.gguf]
    cases = [
        Case(batch, input_len, output_len)
        for batch, input_len, output_len in product(
            args.batch_size, args.input_len, args.output_len
        )
    ]
    # Prompts are the same in every run, and are to be computed in every run.
    args.disable_radix_cache = True
    # A penalty in generation_config.json would be measured with the model.
    args.sampling_defaults = "greedy"
    with make_engine(args, max_running_requests=max(args.batch_size)) as engine:
        info = _cpu_info()
        threads = _threads()
        contenders: list[Contender] = [OurEngine(engine, f"srt {Path(args.model).name}")]
        contenders += llama_benches
        if args.transformers is not None:
            contenders += [Transformers(args.transformers, d) for d in args.transformers_dtype]
        runner = engine.model_runner
        facts: dict[str, Any] = {
            "model": str(args.model),
            "weight_bytes": decode_bytes(runner.model),
            "kv_bytes_per_token": runner.kv_pool.bytes_per_token,
            "read_bandwidth": read_bandwidth(threads),
            "threads": threads,
            "isa_tier": info["tier"],
            "cpu_model": info["cpu_model"],
            "repetitions": args.repetitions,
        }
        rows = [series.to_dict() for series in measure(contenders, cases, args.repetitions)]
    by_shape = {(case.batch, case.input_len, case.output_len): case for case in cases}
    for row in rows:
        if row["contender"] == contenders[0].name:
            row["decode_bound"] = decode_bound(
                facts["read_bandwidth"],
                facts["weight_bytes"],
                facts["kv_bytes_per_token"],
                by_shape[row["batch"], row["input_len"], row["output_len"]],
            )
    if args.json:
        print(json.dumps({**facts, "results": rows}, indent=2))
    else:
        print_table(make_console(), facts, rows)
    if args.plot is not None:
        plot(facts, rows, args.plot)
    return 0


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _cpu_info() -> dict[str, Any]:
    import sgl_kernel

    return dict(sgl_kernel.cpu_info())
