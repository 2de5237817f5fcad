"""`srt quantize`: writes an FP8 copy of a checkpoint and tells what each weight lost."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from srt.quantize.quantizer import WeightReport

# Named here so that `srt --help` need not import torch; a test compares them with the registry.
SCHEME_NAMES = ("per-tensor", "per-channel", "block")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "quantize",
        help="write an FP8 copy of a bf16, fp16 or f32 checkpoint",
        description="Writes an FP8 copy of the checkpoint in SRC to DST: the linear layers of the "
        "decoder become float8_e4m3fn with f32 scales; embeddings, norms and lm_head stay in 16 "
        "bits; configuration, tokenizer and chat template are copied. DST appears when it is "
        "complete.",
    )
    parser.add_argument(
        "source", metavar="SRC", help="checkpoint directory, or org/name[@revision] on the Hub"
    )
    parser.add_argument("destination", metavar="DST", type=Path, help="directory to create")
    parser.add_argument(
        "--scheme",
        choices=SCHEME_NAMES,
        default=SCHEME_NAMES[0],
        help="which elements share a scale: all of a weight, those of an output channel, or those "
        "of a block of 128 x 128 (default: %(default)s)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace what an earlier run wrote to DST; refused if DST holds anything else",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, without a progress bar"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    from srt.checkpoint.checkpoint import Checkpoint
    from srt.checkpoint.formats.schemes import SCHEMES
    from srt.checkpoint.hub import resolve_model
    from srt.quantize.quantizer import quantize_checkpoint
    from srt.utils.directory_replacement import check_destination

    # Before anything is downloaded or read.
    local = [Path(args.source)] if os.path.exists(args.source) else []
    check_destination(args.destination, overwrite=args.overwrite, sources=local)
    source = resolve_model(args.source, progress=not args.json)
    before = Checkpoint.open(source).nbytes
    reports = quantize_checkpoint(
        source,
        args.destination,
        SCHEMES[args.scheme],
        overwrite=args.overwrite,
        show_progress=not args.json,
    )
    after = Checkpoint.open(args.destination).nbytes
    if args.json:
        summary: dict[str, Any] = {
            "source": args.source,
            "destination": str(args.destination),
            "scheme": args.scheme,
            "source_bytes": before,
            "destination_bytes": after,
            "weights": [{"name": r.name, "shape": r.shape, **asdict(r.error)} for r in reports],
        }
        print(json.dumps(summary, indent=2))
        return 0
    from srt.utils.console import make_console

    console = make_console()
    console.print(_table(reports))
    console.print(
        "rel. RMS and max abs: of the difference from the source; saturated: elements beyond the "
        "largest FP8 value; flushed: share of the non-zero elements that became zero"
    )
    console.print(
        f"{args.destination}: {len(reports)} weights {args.scheme}, "
        f"{before / 1e6:,.1f} MB to {after / 1e6:,.1f} MB",
        highlight=False,
    )
    return 0


def _table(reports: list[WeightReport]) -> Table:
    from rich import box
    from rich.table import Table

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
