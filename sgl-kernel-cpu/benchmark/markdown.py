"""Tables of a JSON file in Markdown, as docs/performance.md has them."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

# What a column shows of a peer: its time over ours.
_PEERS = {
    "torch f32": "torch f32",
    "numpy f32": "numpy f32",
    "torch bf16": "torch bf16",
    "torch int8pack": "int8pack",
    "openvino int8": "OpenVINO int8",
    "openvino f32": "OpenVINO f32",
    "dequantise, torch bf16": "dequantise + linear",
}


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shape_table(shape: str, results: list[dict[str, Any]]) -> Iterator[str]:
    first = results[0]
    methods = [r["method"] for r in results if r["m"] == first["m"]]
    peers = [name for name in _PEERS if name in methods]
    ours = next(name for name in ("fp8 per-tensor", "fp8 bmm") if name in methods)
    batch = f"B={first['batch']}, " if first["batch"] else ""
    yield f"{shape}: {batch}N={first['n']}, K={first['k']}"
    yield ""
    recorded = "fp8 recorded"
    columns = ["M", "ms", "spread", "GB/s", "GFLOP/s", "**efficiency**"]
    if recorded in methods:
        columns.append("**recorded**")
    columns += [_PEERS[name] for name in peers]
    yield _row(columns)
    yield "|" + "---:|" * len(columns)
    for m, group in groupby(results, key=lambda r: r["m"]):
        found = {r["method"]: r for r in group}
        op = found[ours]
        cells = [
            str(m),
            f"{op['median'] * 1e3:.3g}",
            f"{op['spread']:.0%}",
            f"{op['gbytes_per_s']:.1f}",
            f"{op['gflops']:.0f}",
            f"**{op['efficiency']:.2f}**",
        ]
        if recorded in methods:
            cells.append(f"**{found[recorded]['efficiency']:.2f}**" if recorded in found else "")
        yield _row(cells + [f"{found[name]['time_vs_ours']:.2f}x" for name in peers])
    yield ""


def markdown(document: dict[str, Any]) -> str:
    """One table for each shape: our per-tensor op, its efficiency in a recorded pass, and the
    peers' times over its time.
    """
    machine = document["machine"]
    lines = [
        f"{machine['cpu_model']}, tier {machine['tier']}, {machine['threads']} threads, "
        f"load average {machine['load_average'][0]:.1f}; limits: "
        + "; ".join(
            f"{limit['threads']} thread{'s' if limit['threads'] > 1 else ''} "
            f"{limit['read'] / 1e9:.1f} GB/s read, {limit['copy'] / 1e9:.1f} GB/s copy, "
            f"{limit['flops_f32'] / 1e9:.0f} GFLOP/s f32, "
            f"{limit['flops_bf16'] / 1e9:.0f} GFLOP/s bf16"
            for limit in document["limits"]
        ),
        "",
    ]
    for shape, results in groupby(document["results"], key=lambda r: r["shape"]):
        lines += _shape_table(shape, list(results))
    return "\n".join(lines)
