"""Time the ops between the products against the machine's own limits and Torch's own ops.

    python benchmark/bench_transformer.py                    # SmolLM2-135M's layer, about a minute
    python benchmark/bench_transformer.py --models smollm2,llama-8b --json out.json
    python benchmark/bench_transformer.py --isa avx2

Methods of a case are timed in turn, round after round, with samples of the machine's limits
between. Caches rotate through as many layers as fill --rotate-mib, so that they come from memory.
Every result is checked against float64 before it is timed.

Efficiency is max(bytes / bandwidth, flops / peak) / time: 1.0 is the roofline of this machine.
Bytes are what the op reads and writes once; of attention the keys and values. Rows stay in cache,
where they may pass it. "+-" is half the distance from the fastest to the slowest turn, of the
median; "time vs ours" above 1 is slower than our op.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass

from attention_layers import MODELS, Case, Model, attention_cases, row_cases
from environment import default_threads, restart_prepared
from output_files import output_file
from tables import make_console, table_of


@dataclass(frozen=True)
class Row:
    """A method in a case; times in seconds."""

    model: str
    case: str
    method: str
    median: float
    fastest: float
    slowest: float
    gbytes_per_s: float
    gflops: float
    efficiency: float
    versus_ours: float


def measure_case(model: str, case: Case, rounds: int) -> list[Row]:
    """Times every method of the case, interleaved with each other and with the limits."""
    from limits import LimitProbe
    from turn import take_turn

    probe = LimitProbe()
    for method in case.methods:
        method.check()
    seconds: dict[str, list[float]] = {method.name: [] for method in case.methods}
    for _ in range(rounds):
        probe.sample()
        for method in case.methods:
            seconds[method.name].append(take_turn(method.run)[0])
    roofline = probe.limits().seconds(case.nbytes, case.flops, case.dtype)
    ours = seconds[case.methods[0].name]
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        ratio = statistics.median(t / o for t, o in zip(times, ours, strict=True))
        rows.append(
            Row(
                model,
                case.name,
                name,
                median,
                min(times),
                max(times),
                case.nbytes / median / 1e9,
                case.flops / median / 1e9,
                roofline / median,
                ratio,
            )
        )
    return rows


def main(argv: list[str]) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="smollm2", help=f"any of {', '.join(MODELS)}")
    parser.add_argument("--contexts", default="256,4096", help="tokens in the cache, with commas")
    parser.add_argument("--prefill", default="512", help="new tokens of a prefill, with commas")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each method")
    parser.add_argument("--rotate-mib", type=int, default=256, help="memory that the caches take")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--isa", help="lower our tier, and what Torch may use, to this one")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the results to FILE"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.models.split(",") if name not in MODELS]:
        parser.error(f"--models: unknown {', '.join(unknown)}; expected any of {', '.join(MODELS)}")
    contexts, prefills = (
        [int(n) for n in text.split(",")] for text in (args.contexts, args.prefill)
    )
    restart_prepared(args.threads, args.isa, cap_peers=True)
    import numpy  # noqa: F401  (before Torch, as in bench_gemm.py)
    import torch
    from run import machine_facts, print_facts

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    console = make_console()
    facts = machine_facts(args.threads)
    print_facts(console, facts, False, args.rotate_mib)
    rows: list[Row] = []
    for name in args.models.split(","):
        model: Model = MODELS[name]
        cases = [
            *(case for tokens in (1, 512) for case in row_cases(model, tokens)),
            *attention_cases(model, contexts, prefills, args.rotate_mib * 2**20),
        ]
        found = [row for make in cases for row in measure_case(name, make(), args.rounds)]
        rows += found
        columns = ("case", "method", "us", "+-", "GB/s", "GFLOP/s")
        console.print(
            table_of(
                name,
                (*columns, "efficiency", "time vs ours"),
                [
                    (
                        row.case,
                        row.method,
                        f"{row.median * 1e6:.1f}",
                        f"{(row.slowest - row.fastest) / row.median / 2:.0%}",
                        f"{row.gbytes_per_s:.1f}",
                        f"{row.gflops:.0f}",
                        f"{row.efficiency:.2f}",
                        f"{row.versus_ours:.2f}x",
                    )
                    for row in found
                ],
            )
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": facts, "results": [asdict(row) for row in rows]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
