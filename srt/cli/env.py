"""`srt env`: what a bug report needs to know about machine and installation."""

from __future__ import annotations

import argparse
import json


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
        from srt.environment.tables import show
        from srt.utils.console import make_console

        show(make_console(), environment, problems)
    return 0
