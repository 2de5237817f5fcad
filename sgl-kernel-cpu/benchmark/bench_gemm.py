"""Time the GEMM ops against the machine's own limits and against peers, in one process and one run.

    python benchmark/bench_gemm.py                      # about a minute
    python benchmark/bench_gemm.py --full --json out.json --plot out.png
    python benchmark/bench_gemm.py --isa avx2           # our tier and the peers lowered
    python benchmark/bench_gemm.py compare before.json after.json
    python benchmark/bench_gemm.py markdown out.json    # tables for a document

For every shape and M all methods are timed in turn, round after round, with samples of the
machine's limits between, so that a change of its speed meets all of them. Weights rotate through
more memory than the caches hold (--cached keeps one copy). Results are checked against float64.

Efficiency is max(bytes / bandwidth, flops / peak) / time: 1.0 is the roofline of this machine.
Bytes are weights, scales, mat1 and out, each once. "time vs ours" is over our per-tensor op, so
above 1 is slower than it.
"""

import argparse
import random
import sys
from dataclasses import replace

from environment import default_threads, restart_prepared
from output_files import output_file, picture_file
from shapes import PRESETS, SHAPES, Preset
from tables import make_console


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line of a run."""
    parser = argparse.ArgumentParser(
        prog="bench_gemm.py",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        dest="preset",
        action="store_const",
        const="quick",
        default="quick",
        help="one shape, four M, about a minute (the default)",
    )
    parser.add_argument(
        "--full",
        dest="preset",
        action="store_const",
        const="full",
        help="all shapes, all M: an hour or so",
    )
    parser.add_argument("--shapes", help=f"any of {', '.join(SHAPES)}, with commas")
    parser.add_argument("--m", help="rows, with commas")
    parser.add_argument("--rounds", type=int, help="turns of each method")
    parser.add_argument(
        "--seconds", type=float, help="what a method may take at one shape and M; then it sits out"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=default_threads(),
        help="default: OMP_NUM_THREADS, else one for each allowed processor",
    )
    parser.add_argument("--isa", help="lower our tier, and what the peers may use, to this one")
    parser.add_argument(
        "--uncapped-peers", action="store_true", help="with --isa: leave the peers as they are"
    )
    parser.add_argument(
        "--cached", action="store_true", help="one copy of each weight, which may stay in cache"
    )
    parser.add_argument(
        "--rotate-mib", type=int, default=512, help="memory that the copies of a weight take"
    )
    parser.add_argument("--no-peers", action="store_true", help="our ops only")
    parser.add_argument(
        "--only-grid", action="store_true", help="skip call overhead, packing and threads"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the results to FILE"
    )
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE", help="draw efficiency over M into FILE"
    )
    args = parser.parse_args(argv)
    preset: Preset = PRESETS[args.preset]
    try:
        rows = tuple(int(m) for m in args.m.split(",")) if args.m else preset.rows
    except ValueError:
        parser.error(f"--m: expected row counts with commas, got {args.m!r}")
    args.plan = replace(
        preset,
        shapes=args.shapes or preset.shapes,
        rows=rows,
        rounds=preset.rounds if args.rounds is None else args.rounds,
        seconds=preset.seconds if args.seconds is None else args.seconds,
    )
    if unknown := [name for name in args.plan.shapes.split(",") if name not in SHAPES]:
        parser.error(f"--shapes: unknown {', '.join(unknown)}; expected any of {', '.join(SHAPES)}")
    for name, value in (
        ("--m", min(rows)),
        ("--rounds", args.plan.rounds),
        ("--threads", args.threads),
        ("--rotate-mib", args.rotate_mib),
    ):
        if value < 1:
            parser.error(f"{name}: expected 1 or more, got {value}")
    return args


def compare_command(argv: list[str]) -> int:
    """``compare A.json B.json``: 0 if nothing got slower, 1 if something did, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="bench_gemm.py compare")
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        help="fall of efficiency that is let pass, on top of the spread (default 0.05)",
    )
    args = parser.parse_args(argv)
    from compare import ComparisonError, compare

    try:
        return int(compare(make_console(), args.before, args.after, args.threshold))
    except ComparisonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def markdown_command(argv: list[str]) -> int:
    """``markdown A.json``: the tables of docs/performance.md."""
    parser = argparse.ArgumentParser(prog="bench_gemm.py markdown")
    parser.add_argument("file")
    args = parser.parse_args(argv)
    from compare import ComparisonError, load
    from markdown import markdown

    try:
        print(markdown(load(args.file)))
    except ComparisonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv: list[str]) -> int:
    """Command line; returns the exit status."""
    if argv[:1] == ["compare"]:
        return compare_command(argv[1:])
    if argv[:1] == ["markdown"]:
        return markdown_command(argv[1:])
    args = parse_arguments(argv)
    restart_prepared(args.threads, args.isa, cap_peers=not args.uncapped_peers)
    # Only now: what the libraries read from the environment when they load has been set. NumPy
    # before Torch, which binds the main thread: NumPy's threads inherit where it may run.
    import numpy  # noqa: F401
    import torch
    from run import run_all

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    console = make_console()
    run_all(console, args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
