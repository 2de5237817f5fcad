"""The results as a table, as JSON and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from srt.errors import SrtError
from srt.utils.files import replacing_file


def print_table(console: Console, facts: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Medians with their ranges, and how near decoding comes to what the memory allows.

    Args:
        console: Where to.
        facts: Of the machine and the model, as :func:`.benchmark.run_benchmark` collects them.
        rows: :meth:`Series.to_dict` of each series; ours with `decode_bound`.
    """
    console.print(
        f"{facts['model']}: {facts['weight_bytes'] / 1e6:.1f} MB of weights a token, "
        f"{facts['kv_bytes_per_token']} bytes of cache a token; tier {facts['isa_tier']}, "
        f"{facts['threads']} threads, {facts['read_bandwidth'] / 1e9:.1f} GB/s read; "
        f"medians of {facts['repetitions']} interleaved runs (lowest to highest), tokens/s",
        style="dim",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("contender", no_wrap=True)
    for name in ("batch", "prompt", "new", "prefill", "", "decode", "", "of bound"):
        table.add_column(name, justify="right", style="dim" if not name else "", no_wrap=True)
    for row in rows:
        bound = row.get("decode_bound")
        table.add_row(
            row["contender"],
            str(row["batch"]),
            str(row["input_len"]),
            str(row["output_len"]),
            f"{row['prefill_tokens_per_second']:.1f}",
            "{:.0f}-{:.0f}".format(*row["prefill_range"]),
            f"{row['decode_tokens_per_second']:.1f}",
            "{:.1f}-{:.1f}".format(*row["decode_range"]),
            f"{row['decode_tokens_per_second'] / bound:.2f}" if bound else "",
        )
    console.print(table)


def plot(facts: Mapping[str, Any], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a picture, in the format of its name (else PNG): bars of prefill and decode speed for
    each case and contender.

    Args:
        facts: As for :func:`print_table`.
        rows: Likewise.
        path: The file.

    Raises:
        SrtError: matplotlib is not installed.
    """
    figure = make_figure(facts, rows)
    with replacing_file(path) as scratch:
        figure.savefig(scratch, dpi=120, format=path.suffix[1:] or "png")


def make_figure(facts: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
    """The figure that :func:`plot` writes."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise SrtError("--plot needs matplotlib: pip install matplotlib") from error
    names = list(dict.fromkeys(row["contender"] for row in rows))
    colors = {name: f"C{place % 10}" for place, name in enumerate(names)}
    figure = Figure(figsize=(11, 1.8 + 0.45 * len(rows)), layout="constrained")
    labels = [f"{r['batch']} x ({r['input_len']} + {r['output_len']})" for r in rows]
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("prefill", "decode"), strict=True):
        medians = [row[f"{kind}_tokens_per_second"] for row in rows]
        low = [m - row[f"{kind}_range"][0] for m, row in zip(medians, rows, strict=True)]
        high = [row[f"{kind}_range"][1] - m for m, row in zip(medians, rows, strict=True)]
        axes.barh(
            range(len(rows)),
            medians,
            xerr=[low, high],
            color=[colors[row["contender"]] for row in rows],
            ecolor="dimgrey",
            capsize=3,
        )
        if kind == "decode":
            for place, row in enumerate(rows):
                if "decode_bound" in row:
                    axes.plot([row["decode_bound"]] * 2, [place - 0.4, place + 0.4], color="black")
        axes.set_xlabel(f"{kind}, tokens/s")
    axes.set_yticks(range(len(rows)), labels, fontsize="small")
    axes.invert_yaxis()
    figure.axes[0].set_ylabel("batch x (prompt + new tokens)")
    handles: list[Any] = [Patch(color=color, label=name) for name, color in colors.items()]
    if any("decode_bound" in row for row in rows):
        bound = Line2D([], [], color="black", label="bound: weights and cache read once a token")
        handles.append(bound)
    spread = Line2D([], [], color="dimgrey", marker="|", label="lowest to highest run")
    handles.append(spread)
    figure.legend(handles=handles, fontsize="small", loc="outside lower center", ncols=3)
    figure.suptitle(
        f"{facts['model']} on {facts['cpu_model']}, tier {facts['isa_tier']}, "
        f"{facts['threads']} threads",
        fontsize=10,
    )
    return figure
