"""One run: the machine's facts and limits, the grid, the sections beside it."""

import argparse
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from typing import Any

import torch
from environment import allowed_cpus, settings_in_force
from limits import LimitProbe, Limits
from method import Activations, measure
from ours import bmm_methods, linear_methods, make_weights
from peers import peer_methods
from plot import plot_efficiency
from report import (
    print_limits,
    print_overhead,
    print_packing,
    print_pairs,
    print_results,
    print_scaling,
)
from results import Result, make_results
from rich.console import Console
from rich.progress import Progress
from sections import measure_overhead, measure_packing, measure_scaling
from shapes import SHAPES, Shape

import sgl_kernel


def machine_facts(threads: int) -> dict[str, Any]:
    """Processor, tier, caches, threads, affinity, versions, load: what explains a figure."""
    info = sgl_kernel.cpu_info()
    packages = ("torch", "numpy", "openvino", "sgl-kernel-cpu")
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu_model": info["cpu_model"],
        "tier": info["tier"],
        "features": sorted(name for name, has in info["features"].items() if has),
        "caches": info["caches"],
        "threads": threads,
        "cpus_allowed": allowed_cpus(),
        "cpus_online": os.cpu_count(),
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "versions": versions,
        "environment": settings_in_force(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def print_facts(console: Console, facts: dict[str, Any], cached: bool, rotate_mib: int) -> None:
    """The header."""
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in facts["caches"].items())
    versions = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in facts["versions"].items()
    )
    lines = [
        f"{facts['cpu_model']}, tier {facts['tier']} ({', '.join(facts['features'])})",
        f"{facts['threads']} threads on processors {facts['cpus_allowed']} of "
        f"{facts['cpus_online']}; caches of a core: {caches}",
        f"{versions}; Torch may use {facts['torch_cpu_capability']}",
        "  ".join(f"{name}={value}" for name, value in facts["environment"].items()),
        f"load average {facts['load_average'][0]:.2f}; weights "
        + ("stay where they are (--cached)" if cached else f"rotate through {rotate_mib} MiB"),
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def measure_limits(probe: LimitProbe, threads: int, rounds: int) -> list[Limits]:
    """Limits of one thread and of ``threads``: the best of some samples."""
    found = []
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        probe.reset()
        for _ in range(rounds):
            probe.sample(copy=True)
        found.append(probe.limits(best=True))
    torch.set_num_threads(threads)
    return found


def measure_shape(
    shape: Shape, args: argparse.Namespace, probe: LimitProbe, step: Any
) -> list[Result]:
    """All methods at one shape, for every M."""
    weights = make_weights(shape, 0 if args.cached else args.rotate_mib * 2**20)
    methods = bmm_methods(weights) if shape.batch else linear_methods(weights)
    if not args.no_peers:
        methods += peer_methods(weights, args.threads)
    found: list[Result] = []
    for m in args.plan.rows:
        step(f"{shape}, M={m}")
        probe.reset()
        present = [each for each in methods if each.most_rows is None or m <= each.most_rows]
        timings = measure(
            present, Activations(m, shape), args.plan.rounds, args.plan.seconds, probe
        )
        found += make_results(timings, shape, m, probe.limits())
    return found


def run_all(console: Console, args: argparse.Namespace) -> dict[str, Any]:
    """Run, print, write what was asked for; returns what ``--json`` writes."""
    facts = machine_facts(args.threads)
    print_facts(console, facts, args.cached, args.rotate_mib)
    if not args.no_peers and find_spec("openvino") is None:
        console.print("OpenVINO is not installed: pip install 'sgl-kernel-cpu[bench]' has it")
    probe = LimitProbe(args.rotate_mib * 2**20)
    limits = measure_limits(probe, args.threads, args.plan.rounds)
    print_limits(console, limits)
    shapes = [shape for name in args.plan.shapes.split(",") for shape in SHAPES[name]]
    results: list[Result] = []
    document: dict[str, Any] = {
        "machine": facts,
        "cached": args.cached,
        "limits": [asdict(limit) for limit in limits],
    }
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(shapes) * len(args.plan.rows))

        def step(text: str) -> None:
            progress.update(task, description=text)
            progress.advance(task)

        for shape in shapes:
            of_shape = measure_shape(shape, args, probe, step)
            print_results(console, of_shape)
            results += of_shape
    print_pairs(console, results)
    overhead, packing, scaling = [], [], []
    if not args.only_grid:
        rounds = args.plan.rounds
        overhead = measure_overhead(sorted({1, args.threads}), rounds)
        print_overhead(console, overhead)
        if linear := next((shape for shape in shapes if not shape.batch), None):
            packing = measure_packing(linear, rounds, probe)
            print_packing(console, packing)
            if args.threads > 1:
                weights = make_weights(linear, args.rotate_mib * 2**20)
                scaling = measure_scaling(linear, weights, args.plan.rows, args.threads, rounds)
                print_scaling(console, scaling)
    document |= {
        "results": [asdict(r) for r in results],
        "overhead": [asdict(row) | {"excess": row.excess} for row in overhead],
        "packing": [asdict(row) for row in packing],
        "scaling": [asdict(row) for row in scaling],
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(document, file, indent=1)
    if args.plot:
        title = f"{facts['cpu_model']}, tier {facts['tier']}, {args.threads} threads"
        plot_efficiency(results, title, args.plot)
    return document
