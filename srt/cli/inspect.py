"""`srt inspect`: what is in a checkpoint, what it takes to run it, and whether it runs here."""

from __future__ import annotations

import argparse
import json

STATUS_DOES_NOT_RUN = 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what is in a checkpoint and whether it runs here",
        description="Reads configuration, tokenizer and file headers of MODEL, with or without "
        "weights, and tells its architecture, quantization scheme, dtypes, modules, what is not "
        "used, the memory it takes, and whether it runs on this machine. Of a model on the Hub it "
        "downloads the small files and reads the headers of the weights. Status 0: it runs; 1: it "
        "does not, for the reasons printed; 2: it cannot be read.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="checkpoint directory, or org/name[@revision] on the Hub"
    )
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from srt.inspection.report import inspect_model

    inspection = inspect_model(args.model, args.revision)
    if args.json:
        print(json.dumps(inspection.to_dict(), indent=2))
    else:
        from srt.inspection.tables import show
        from srt.utils.console import make_console

        show(make_console(), inspection)
    return 0 if inspection.runs_here else STATUS_DOES_NOT_RUN
