"""`srt quantize`: writes an FP8 copy of a checkpoint and tells what each weight lost."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from srt.checkpoint.formats.schemes import SCHEMES


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
        choices=tuple(SCHEMES),
        default="per-tensor",
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
    from srt.checkpoint.hub import resolve_model
    from srt.quantize.quantizer import quantize_checkpoint
    from srt.quantize.report import QuantizationReport
    from srt.utils.console import make_console
    from srt.utils.directory_replacement import check_destination

    # Before anything is downloaded or read.
    local = [Path(args.source)] if os.path.exists(args.source) else []
    check_destination(args.destination, overwrite=args.overwrite, sources=local)
    source = resolve_model(args.source, progress=not args.json)
    before = Checkpoint.open(source).nbytes
    weights = quantize_checkpoint(
        source,
        args.destination,
        SCHEMES[args.scheme],
        overwrite=args.overwrite,
        show_progress=not args.json,
    )
    report = QuantizationReport(
        args.source,
        args.destination,
        args.scheme,
        before,
        Checkpoint.open(args.destination).nbytes,
        weights,
    )
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        report.show(make_console())
    return 0
