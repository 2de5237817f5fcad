"""The plot of efficiency over rows."""

from collections.abc import Sequence
from typing import Any

from results import Result

# What tells curves apart: colour, marker and line, so that a print in grey does, too.
STYLES = (
    ("tab:blue", "o", "-"),
    ("tab:orange", "s", "-"),
    ("tab:green", "^", "-"),
    ("tab:red", "v", "--"),
    ("tab:purple", "D", "--"),
    ("tab:brown", "x", "--"),
)
# Those of ours that differ from "fp8 per-tensor" by a few per cent lie on its curve; they are in
# the table of pairs.
_OURS = ("fp8 per-tensor", "fp8 block 128x128", "bf16 packed", "fp8 bmm", "bf16 bmm")


def curves(results: Sequence[Result]) -> list[str]:
    """The methods that are drawn, at most one for each style: ours first, then peers as they come.
    Every shape has the same style for a method.
    """
    found = dict.fromkeys(r.method for r in results)
    peers = dict.fromkeys(r.method for r in results if not r.ours)
    return [*(name for name in _OURS if name in found), *peers][: len(STYLES)]


def make_figure(results: Sequence[Result], title: str) -> Any:
    """The figure: a panel for each shape, one legend for all."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shapes = list(dict.fromkeys(r.shape for r in results))
    styles = dict(zip(curves(results), STYLES, strict=False))
    columns = min(2, len(shapes))
    lines = -(-len(shapes) // columns)
    figure = Figure(figsize=(6.0 * columns + 2.5, 3.4 * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axis, shape in zip(axes.flat, shapes, strict=False):
        found = [r for r in results if r.shape == shape]
        for name, (color, marker, line) in styles.items():
            points = [r for r in found if r.method == name]
            rows, shares = [r.m for r in points], [r.efficiency for r in points]
            axis.plot(rows, shares, color=color, marker=marker, linestyle=line, markersize=5)
            axis.fill_between(
                rows,
                [r.efficiency * (1 - r.spread / 2) for r in points],
                [r.efficiency * (1 + r.spread / 2) for r in points],
                color=color,
                alpha=0.15,
                linewidth=0,
            )
        axis.axhline(1.0, color="black", linewidth=1.2, linestyle=":")
        rows = sorted({r.m for r in found})
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(m) for m in rows], minor=False)
        axis.set_ylim(0, max(1.2, *(1.05 * r.efficiency for r in results)))
        axis.set_title(f"{shape}: N={found[0].n} K={found[0].k}", fontsize=9)
        axis.set_xlabel("M (rows)")
        axis.set_ylabel("share of the roofline")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(shapes) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=10)
    handles: list[Any] = [
        Line2D([], [], color=color, marker=marker, linestyle=line, label=name)
        for name, (color, marker, line) in styles.items()
    ]
    handles.append(Line2D([], [], color="black", linestyle=":", label="bound (roofline)"))
    handles.append(Patch(color="grey", alpha=0.3, label="spread of the rounds"))
    figure.legend(handles=handles, fontsize=8, loc="outside right upper")
    return figure


def plot_efficiency(results: Sequence[Result], title: str, path: str) -> None:
    """Writes the figure, in the format that the name's ending says; PNG without one."""
    make_figure(results, title).savefig(path, dpi=80)
