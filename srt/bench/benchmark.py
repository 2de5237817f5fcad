"""One run of the benchmark: an engine and its peers in turn, and what the memory allows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import sgl_kernel
from srt.bench.bound import decode_bound, decode_bytes, read_bandwidth
from srt.bench.workload import Case, Contender, OurEngine, measure
from srt.entrypoints.engine import Engine


def run_benchmark(
    engine: Engine, model: str, peers: Sequence[Contender], cases: Sequence[Case], repetitions: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs all cases.

    Args:
        engine: Without a prefix cache.
        model: What the user calls its model.
        peers: Loaded; those that cannot run a case are left out of it.
        cases: What to run.
        repetitions: How often, a first run that does not count aside.

    Returns:
        Facts about machine and model, and :meth:`Series.to_dict` of every case and contender; ours
        have a `decode_bound`, in tokens a second.
    """
    runner = engine.model_runner
    threads = torch.get_num_threads()
    info = sgl_kernel.cpu_info()
    facts: dict[str, Any] = {
        "model": model,
        "weight_bytes": decode_bytes(runner.model),
        "kv_bytes_per_token": runner.kv_pool.bytes_per_token,
        "read_bandwidth": read_bandwidth(threads),
        "threads": threads,
        "isa_tier": info["tier"],
        "cpu_model": info["cpu_model"],
        "repetitions": repetitions,
    }
    ours = OurEngine(engine, f"srt {Path(model).name}")
    rows = []
    for series in measure([ours, *peers], cases, repetitions):
        row = series.to_dict()
        if series.contender == ours.name:
            row["decode_bound"] = decode_bound(
                facts["read_bandwidth"],
                facts["weight_bytes"],
                facts["kv_bytes_per_token"],
                series.case,
            )
        rows.append(row)
    return facts, rows
