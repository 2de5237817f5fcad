"""Tables of a run."""

from collections.abc import Sequence
from itertools import groupby

from limits import Limits
from results import Result
from rich.console import Console
from sections import Overhead, Packing, Scaling
from tables import table_of

# Pairs whose ratio says what a feature costs; both were timed in the same rounds.
PAIRS = (
    ("per-channel", "fp8 per-channel"),
    ("block 128x128", "fp8 block 128x128"),
    ("bias", "fp8 per-tensor, bias"),
    ("fp16", "fp8 per-tensor, fp16"),
)


def print_limits(console: Console, limits: Sequence[Limits]) -> None:
    """Limits of one thread and of all."""
    rows = [
        (
            str(limit.threads),
            *(f"{rate / 1e9:.1f}" for rate in (limit.read, limit.copy)),
            *(f"{rate / 1e9:.0f}" for rate in (limit.flops_f32, limit.flops_bf16)),
        )
        for limit in limits
    ]
    columns = ("threads", "read GB/s", "copy GB/s", "f32 GFLOP/s", "bf16 GFLOP/s")
    console.print(table_of("Limits of this machine, best of the samples", columns, rows))


def print_results(console: Console, results: Sequence[Result]) -> None:
    """One table for each shape."""
    first = results[0]
    size = f"{f'B={first.batch} ' if first.batch else ''}N={first.n} K={first.k}"
    table = table_of(
        f"{first.shape}, {size}, {first.threads} threads",
        ("method", "M", "median ms", "spread", "GB/s", "GFLOP/s", "efficiency", "time vs ours"),
        (),
    )
    for _, of_rows in groupby(results, key=lambda r: r.m):
        table.add_section()
        for r in of_rows:
            table.add_row(
                r.method,
                str(r.m),
                f"{r.median * 1e3:.3f}",
                f"{r.spread:.0%}",
                f"{r.gbytes_per_s:.1f}",
                f"{r.gflops:.0f}",
                f"{r.efficiency:.2f}",
                f"{r.time_vs_ours:.2f}x",
                style="" if r.ours else "dim",
            )
    console.print(table)


def print_pairs(console: Console, results: Sequence[Result]) -> None:
    """What a bias, float16 and finer scales cost: times over those of the per-tensor op."""
    rows = []
    for (shape, m), of_rows in groupby(results, key=lambda r: (r.shape, r.m)):
        found = {r.method: r.time_vs_ours for r in of_rows}
        if all(name in found for _, name in PAIRS):
            rows.append((f"{shape}, M={m}", *(f"{found[name]:.3f}x" for _, name in PAIRS)))
    if rows:
        title = (
            "Time over that of fp8 per-tensor with bf16 activations, medians of ratios in a round"
        )
        console.print(table_of(title, ("", *(label for label, _ in PAIRS)), rows))


def print_overhead(console: Console, rows: Sequence[Overhead]) -> None:
    """Small calls: what is not compute."""
    cells = [
        (
            row.shape,
            str(row.threads),
            *(
                f"{us * 1e6:.1f}"
                for us in (
                    row.call,
                    row.kernel / row.parts,
                    row.empty,
                    row.empty_after,
                    row.empty_parallel,
                    row.excess,
                )
            ),
        )
        for row in rows
    ]
    columns = (
        "M=1",
        "threads",
        "call",
        "kernel / threads",
        "empty op",
        "after a call",
        "empty op + threads",
        "rest",
    )
    title = "Microseconds of a call; rest = call - kernel / threads - empty op after a call"
    console.print(table_of(title, columns, cells))


def print_packing(console: Console, rows: Sequence[Packing]) -> None:
    """``convert_weight_packed`` next to a copy of the same bytes."""
    cells = [
        (row.weight, f"{row.median * 1e3:.2f}", f"{row.gbytes_per_s:.1f}", f"{row.of_copy:.2f}")
        for row in rows
    ]
    columns = ("convert_weight_packed", "median ms", "GB/s read + written", "share of copy")
    console.print(table_of("Packing, all threads", columns, cells))


def print_scaling(console: Console, rows: Sequence[Scaling]) -> None:
    """All threads against one."""
    cells = [
        (
            row.shape,
            str(row.m),
            f"{row.one * 1e3:.3f}",
            f"{row.all * 1e3:.3f}",
            f"{row.speedup:.2f}x",
        )
        for row in rows
    ]
    columns = ("fp8 per-tensor", "M", "1 thread, ms", "all threads, ms", "speedup")
    console.print(table_of("Threads", columns, cells))
