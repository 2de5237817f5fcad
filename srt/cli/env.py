"""`srt env`: what a bug report needs to know about machine and installation."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "env",
        help="print what a bug report needs",
        description="Prints versions, the kernels' ISA tier and why no higher one is used, "
        "processor, memory, limits, and the environment variables that matter. Values that may be "
        "secrets are masked.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, 0 also when the report is of problems."""
    from srt.environment.report import collect_environment, find_problems

    with args.signals.importing():
        environment = collect_environment()
    problems = find_problems(environment)
    if args.json:
        print(json.dumps(environment, indent=2))
    else:
        _show(environment, problems)
    return 0


def _show(environment: dict[str, Any], problems: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from srt.utils.console import make_console

    console = make_console()
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
