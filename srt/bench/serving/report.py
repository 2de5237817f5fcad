"""The results as a table and as a picture."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from srt.bench.serving.load import Load
from srt.bench.serving.statistics import METRICS
from srt.errors import SrtError
from srt.utils.files import replacing_file


def print_table(console: Console, facts: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Medians of rounds; times in milliseconds, median and 99th percentile of the requests.

    Args:
        console: Where to.
        facts: Of the run, as the command collects them.
        rows: As of :func:`.benchmark.run_benchmark`.
    """
    console.print(
        f"{facts['dataset']}, {facts['num_prompts']} requests a run, medians of "
        f"{facts['rounds']} rounds in turns; times in ms: p50 / p99",
        style="dim",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("load", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    names = ["tokens/s", "ratio", "requests/s", *(metric.upper() for metric in METRICS), "failed"]
    if facts["goodput_limits"]:
        names.append("goodput")
    for name in [*names, "client CPU"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row['output_tokens_per_second']:.1f}",
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            f"{row['requests_per_second']:.2f}",
            *(_times(row, metric) for metric in METRICS),
            str(row["failed"]),
        ]
        if facts["goodput_limits"]:
            cells.append(f"{row['goodput']:.2f}")
        table.add_row(describe(row), row["contender"], *cells, f"{row['client_cpu']:.0%}")
    console.print(table)
    for row in rows:
        kinds = Counter[str]()
        for run in row["runs"]:
            kinds.update(run["failures"])
        if kinds:
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            console.print(f"failed: {describe(row)}, {row['contender']}: {counts}", style="red")


def describe(row: Mapping[str, Any]) -> str:
    """The load of a row, in words."""
    return Load(row["request_rate"] or float("inf"), row["concurrency"]).describe()


def _times(row: Mapping[str, Any], metric: str) -> str:
    middle, high = row[f"{metric}_p50"], row[f"{metric}_p99"]
    return "" if middle is None else f"{middle * 1e3:.1f} / {high * 1e3:.1f}"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a picture: throughput, and times to the first token and between tokens, by load.

    Args:
        rows: As for :func:`print_table`.
        path: The file; its name says the format.

    Raises:
        SrtError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SrtError("--plot needs matplotlib: pip install matplotlib") from error
    names = list(dict.fromkeys(row["contender"] for row in rows))
    loads = list(dict.fromkeys(describe(row) for row in rows))
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    panels = (
        ("output_tokens_per_second", 1.0, "tokens/s"),
        ("ttft_p50", 1e3, "time to first token, ms"),
        ("tpot_p50", 1e3, "time per token after it, ms"),
    )
    for axes, (key, unit, label) in zip(figure.subplots(1, 3), panels, strict=True):
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            values = [(row[key] or 0.0) * unit for row in rows if row["contender"] == name]
            places = [at + place * width for at in range(len(loads))]
            axes.bar(places, values, width, label=name)
        middle = width * (len(names) - 1) / 2
        axes.set_xticks([at + middle for at in range(len(loads))], loads, fontsize="small")
        axes.set_ylabel(label)
    figure.axes[0].legend(fontsize="small")
    with replacing_file(path) as scratch:
        figure.savefig(scratch, dpi=120, format=path.suffix[1:] or "png")
