"""Regression mode: two JSON files of the same machine."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from tables import table_of

# Machine facts that must agree for a comparison to say anything.
_SAME = ("cpu_model", "tier", "threads")


class ComparisonError(Exception):
    """A file cannot be read or compared; the message says which and why."""


def load(path: str) -> dict[str, Any]:
    """Read a file that ``--json`` wrote."""
    try:
        document: dict[str, Any] = json.loads(Path(path).read_text())
        for section in ("machine", "limits", "results", "overhead"):
            document[section]
    except OSError as error:
        raise ComparisonError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ComparisonError(
            f"{path}: not a file that bench_gemm.py --json wrote: {error!r}"
        ) from error
    return document


def _ours(document: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (r["shape"], r["method"], r["m"], r["threads"]): r for r in document["results"] if r["ours"]
    }


def compare(console: Console, before_path: str, after_path: str, threshold: float) -> bool:
    """Print our ops of both files side by side; return whether any got slower.

    What counts is efficiency, which is relative to limits taken in the same run: it must not fall
    by more than ``threshold`` plus the spread (quartiles) of the two measurements.
    """
    before, after = load(before_path), load(after_path)
    for fact in _SAME:
        a, b = before["machine"][fact], after["machine"][fact]
        if a != b:
            raise ComparisonError(f"{fact} differs: {a!r} in {before_path}, {b!r} in {after_path}")
    old, new = _ours(before), _ours(after)
    common = [key for key in old if key in new]
    if not common:
        raise ComparisonError(f"{before_path} and {after_path} have no measurement in common")
    slower = 0
    rows = []
    for key in common:
        a, b = old[key], new[key]
        change = b["efficiency"] / a["efficiency"] - 1
        allowed = threshold + a["spread"] + b["spread"]
        worse = change < -allowed
        slower += worse
        shape, method, m, _ = key
        rows.append(
            (
                f"{shape}, {method}",
                str(m),
                f"{a['median'] * 1e3:.3f}",
                f"{b['median'] * 1e3:.3f}",
                f"{a['efficiency']:.2f}",
                f"{b['efficiency']:.2f}",
                f"{change:+.0%}",
                "SLOWER" if worse else "faster" if change > allowed else "",
            )
        )
    columns = ("op", "M", "ms before", "ms after", "eff. before", "eff. after", "change", "")
    console.print(table_of(f"{before_path} -> {after_path}", columns, rows))
    console.print(
        f"{slower} of {len(common)} slower by more than {threshold:.0%} plus their spread"
    )
    return slower > 0
