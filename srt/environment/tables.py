"""A machine and installation as a table, as `srt env` shows them."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show(console: Console, environment: Mapping[str, Any], problems: Iterable[str]) -> None:
    """Writes the facts of `collect_environment` by section, then the problems."""
    # One grid for all sections, so that the values stand below each other.
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for section, facts in environment.items():
        grid.add_row(f"[bold]{section}[/]", "" if facts else "none set")
        for name, value in facts.items():
            grid.add_row(f"  {escape(name)}", escape(_text(name, value)))
    console.print(grid)
    for problem in problems:
        console.print(f"[bold red]problem[/] {escape(problem)}")


def _text(name: str, value: object) -> str:
    """One fact in a line or, for a mapping, a line an entry."""
    if value is None:
        return "none"
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(entry, bool) for entry in value.values())
    ):
        absent = [key for key, entry in value.items() if not entry]
        present = ", ".join(key for key, entry in value.items() if entry) or "none"
        return f"{present}; absent: {', '.join(absent)}" if absent else present
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_text(key, entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and name in ("total", "available", "cgroup_limit"):
        return f"{value / 1e9:.2f} GB"
    return str(value)
