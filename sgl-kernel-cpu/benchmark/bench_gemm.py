"""Time the GEMM ops against the machine's own limits and against peers, in one process and one run.

    python benchmark/bench_gemm.py --shapes smollm2,llama-1b --m 1,4,16,128 --json out.json

For every (N, K) and M the ops and their peers are timed in turn, round after round, so that a
change of the machine's speed meets all of them. Weights rotate through more memory than the caches
hold (``--cached`` keeps one set instead). Our ops' results are checked against float64 first.

Efficiency is max(bytes / bandwidth, flops / peak) / time: 1.0 is the roofline of this machine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from limits import Limits, measure_limits
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

import sgl_kernel
from sgl_kernel.testing import check_close, random_weight, reference_mm

# (N, K) of the linear layers: qkv, o, gate_up, down.
SHAPES: dict[str, list[tuple[int, int]]] = {
    "smollm2": [(960, 576), (576, 576), (3072, 576), (576, 1536)],
    "llama-1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)],
    "llama-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "ministral-14b": [(6144, 5120), (5120, 4096), (32768, 5120), (5120, 16384)],
    "square": [(4096, 4096)],
}
ROTATED_BYTES = 512 * 2**20


@dataclass
class Result:
    """One op at one shape; times in seconds."""

    op: str
    m: int
    n: int
    k: int
    median: float
    fastest: float
    slowest: float
    gbytes_per_s: float
    gflops: float
    efficiency: float


@dataclass
class Contender:
    """A way to multiply: ``run(x, i)`` uses the i-th copy of the weight; ``nbytes`` of one copy."""

    name: str
    nbytes: int
    run: Callable[[Tensor, int], Tensor]


def contenders(n: int, k: int, cached: bool, peers: bool) -> list[Contender]:
    """Every op of ours, and the peers, over their own copies of one weight."""
    source = random_weight(torch.float8_e4m3fn, n, k)
    scale, scales = torch.tensor(0.01), torch.full((n,), 0.01)

    def copies(weight: Tensor) -> list[Tensor]:
        count = 1 if cached else max(2, min(64, ROTATED_BYTES // weight.nbytes))
        return [weight.clone() for _ in range(count)]

    packed = copies(sgl_kernel.convert_weight_packed(source))
    dense = source.to(torch.bfloat16)
    packed_bf16 = copies(sgl_kernel.convert_weight_packed(dense))
    found = [
        Contender(
            "fp8 per-tensor",
            packed[0].nbytes,
            lambda x, i: sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
                x, packed[i % len(packed)], scale, None, x.dtype, True
            ),
        ),
        Contender(
            "fp8 per-channel",
            packed[0].nbytes,
            lambda x, i: sgl_kernel.fp8_per_channel_scaled_mm_cpu(
                x, packed[i % len(packed)], scales, None, x.dtype, True
            ),
        ),
        Contender(
            "bf16 packed",
            packed_bf16[0].nbytes,
            lambda x, i: sgl_kernel.weight_packed_linear(
                x, packed_bf16[i % len(packed_bf16)], None, True
            ),
        ),
    ]
    for contender, factor in zip(found, (scale, scale, None), strict=True):
        x = torch.randn(5, k, dtype=torch.bfloat16)
        check_close(contender.run(x, 0), *reference_mm(x, source, factor, None), contender.name)
    if not peers:
        return found

    bf16, f32, raw = copies(dense), copies(dense.float()), copies(source)
    int8 = copies(torch.randint(-127, 127, (n, k), dtype=torch.int8))
    int8_scales = torch.full((n,), 0.01, dtype=torch.bfloat16)
    return [
        *found,
        Contender("torch bf16", bf16[0].nbytes, lambda x, i: linear(x, bf16[i % len(bf16)])),
        Contender("torch f32", f32[0].nbytes, lambda x, i: linear(x.float(), f32[i % len(f32)])),
        Contender(
            "torch int8pack",
            int8[0].nbytes,
            lambda x, i: torch._weight_int8pack_mm(x, int8[i % len(int8)], int8_scales),
        ),
        Contender(
            "dequantise, bf16",
            raw[0].nbytes,
            lambda x, i: linear(x, raw[i % len(raw)].to(torch.bfloat16)),
        ),
    ]


def bench_shape(
    m: int, n: int, k: int, found: list[Contender], limits: Limits, rounds: int
) -> list[Result]:
    """Time every contender, interleaved."""
    x = torch.randn(m, k, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {c.name: [] for c in found}
    for i in range(rounds + 1):
        for j, contender in enumerate(found):
            # Contenders that share copies must not find the one before theirs in cache.
            copy = i * len(found) + j
            start = time.perf_counter()
            contender.run(x, copy)
            seconds = time.perf_counter() - start
            if i > 0:  # the first round warms up
                times[contender.name].append(seconds)
    results = []
    for contender in found:
        all_times = times[contender.name]
        median = statistics.median(all_times)
        moved = contender.nbytes + x.nbytes + m * n * 2
        flops = 2.0 * m * n * k
        best = max(moved / limits.bandwidth, flops / limits.flops)
        results.append(
            Result(
                contender.name,
                m,
                n,
                k,
                median,
                min(all_times),
                max(all_times),
                moved / median / 1e9,
                flops / median / 1e9,
                best / median,
            )
        )
    return results


def print_results(console: Console, results: list[Result]) -> None:
    """A table per (N, K); ratios are to the first op."""
    table = Table(title=f"N={results[0].n} K={results[0].k}")
    columns = ("M", "op", "median ms", "fastest", "slowest", "GB/s", "GFLOP/s", "efficiency")
    for column in (*columns, "time vs ours"):
        table.add_column(column, justify="left" if column == "op" else "right")
    ours = results[0]
    for r in results:
        if r.m != ours.m:
            table.add_section()
        if r.op == results[0].op:
            ours = r
        table.add_row(
            str(r.m),
            r.op,
            *(f"{t * 1e3:.3f}" for t in (r.median, r.fastest, r.slowest)),
            f"{r.gbytes_per_s:.1f}",
            f"{r.gflops:.0f}",
            f"{r.efficiency:.2f}",
            f"{r.median / ours.median:.2f}x",
        )
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--shapes", default="square", help=f"any of {', '.join(SHAPES)}, with commas"
    )
    parser.add_argument("--m", default="1,4,16,64,256", help="rows, with commas")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--cached", action="store_true", help="keep one weight in cache")
    parser.add_argument("--no-peers", action="store_true", help="our ops only")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    args = parser.parse_args()
    unknown = [name for name in args.shapes.split(",") if name not in SHAPES]
    if unknown:
        parser.error(f"--shapes: unknown {', '.join(unknown)}; expected any of {', '.join(SHAPES)}")

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    info = sgl_kernel.cpu_info()
    limits = measure_limits(args.threads)
    console.print(
        f"{info['cpu_model']}, tier {info['tier']}, {args.threads} threads\n"
        f"caches {info['caches']}, torch {torch.__version__}, sgl_kernel {info['version']}\n"
        f"read bandwidth {limits.bandwidth / 1e9:.1f} GB/s, f32 FMA peak "
        f"{limits.flops / 1e9:.0f} GFLOP/s"
    )
    results: list[Result] = []
    for n, k in dict.fromkeys(shape for name in args.shapes.split(",") for shape in SHAPES[name]):
        found = contenders(n, k, args.cached, not args.no_peers)
        of_shape: list[Result] = []
        for m in (int(m) for m in args.m.split(",")):
            of_shape += bench_shape(m, n, k, found, limits, args.rounds)
        print_results(console, of_shape)
        results += of_shape
    if args.json:
        document = {
            "machine": info,
            "limits": asdict(limits),
            "results": [asdict(r) for r in results],
        }
        with open(args.json, "w") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    main()
