"""What quantizing a checkpoint cost, as JSON and as a table, as `srt quantize` shows it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from srt.quantize.quantizer import WeightReport


@dataclass(frozen=True)
class QuantizationReport:
    """What one run has written.

    Attributes:
        source: The checkpoint, as the user named it.
        destination: The directory of the copy.
        scheme: Which elements share a scale.
        source_bytes: Size of the checkpoint's tensors.
        destination_bytes: Likewise of the copy's.
        weights: What each weight lost.
    """

    source: str
    destination: Path
    scheme: str
    source_bytes: int
    destination_bytes: int
    weights: Sequence[WeightReport]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "destination": str(self.destination),
            "scheme": self.scheme,
            "source_bytes": self.source_bytes,
            "destination_bytes": self.destination_bytes,
            "weights": [
                {"name": w.name, "shape": w.shape, **asdict(w.error)} for w in self.weights
            ],
        }

    def show(self, console: Console) -> None:
        """Writes a table of the weights, and the sizes."""
        console.print(_table(self.weights))
        console.print(
            "rel. RMS and max abs: of the difference from the source; saturated: elements beyond "
            "the largest FP8 value; flushed: share of the non-zero elements that became zero"
        )
        console.print(
            f"{self.destination}: {len(self.weights)} weights {self.scheme}, "
            f"{self.source_bytes / 1e6:,.1f} MB to {self.destination_bytes / 1e6:,.1f} MB",
            highlight=False,
        )


def _table(reports: Iterable[WeightReport]) -> Table:
    # Tight, so that a row fits into 80 columns.
    table = Table(
        title="What each weight lost",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("weight", no_wrap=True)
    for heading in ("shape", "rel. RMS", "max abs", "saturated", "flushed"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for report in reports:
        error = report.error
        table.add_row(
            report.name.removesuffix(".weight"),
            "x".join(map(str, report.shape)),
            f"{error.relative_rms:.3%}",
            f"{error.max_abs:.2g}",
            f"{error.saturated}",
            f"{error.flushed:.2%}",
        )
    return table
