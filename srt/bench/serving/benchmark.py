"""All contenders in turns, so that what disturbs the machine disturbs them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from srt.bench.serving.contenders import Contender
from srt.bench.serving.dataset import BenchRequest
from srt.bench.serving.load import Load
from srt.bench.serving.statistics import METRICS, median_of, summarize

# Compared: a rate by what is higher, times by what is lower.
_RATE = ("output_tokens_per_second",)


class Dataset(Protocol):
    """Where requests come from."""

    def draw(self, count: int, seed: str) -> list[BenchRequest]:
        """Requests, always the same for a seed."""
        ...


def run_benchmark(
    contenders: Sequence[Contender],
    dataset: Dataset,
    loads: Sequence[Load],
    *,
    num_prompts: int,
    warmup: int,
    rounds: int,
    seed: int,
    goodput: Mapping[str, float],
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measures every load; in each round each contender gets the same requests, which differ from
    round to round, so that no cache holds them.

    Args:
        contenders: The first is the one that others are compared with.
        dataset: Where requests come from.
        loads: How they arrive.
        num_prompts: Requests of a run.
        warmup: Requests to each contender before, which do not count.
        rounds: Runs of each contender and load.
        seed: Of prompts, lengths and arrivals.
        goodput: See :func:`summarize`.
        progress: Called for each request that has ended.

    Returns:
        For each load and contender: its name and load, medians over the rounds, the ratio of its
        throughput to the first contender's, the share of a processor that this client took, and
        `runs`, each as of :func:`summarize`.
    """
    rows = []
    for contender in contenders:
        if warmup:
            contender.run(
                Load(concurrency=1), dataset.draw(warmup, f"{seed} warm-up"), "", progress
            )
    for load in loads:
        runs: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contenders}
        for turn in range(rounds):
            name = f"{seed} {load.rate} {load.concurrency} {turn}"
            requests = dataset.draw(num_prompts, name)
            # Who comes first changes, so that nobody gains by it.
            order = contenders if turn % 2 == 0 else list(reversed(contenders))
            for contender in order:
                before = time.process_time()
                timings = contender.run(load, requests, name, progress)
                busy = time.process_time() - before
                run = summarize(timings, goodput)
                runs[contender.name].append(run | {"client_cpu": busy / run["seconds"]})
        rows += [
            _row(one.name, load, runs[one.name], runs[contenders[0].name]) for one in contenders
        ]
    return rows


def _row(
    name: str, load: Load, runs: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    rate = median_of(runs, *_RATE)
    # Of each round its own: what disturbed a round disturbed both.
    ratios = [
        run["output_tokens_per_second"] / other["output_tokens_per_second"]
        for run, other in zip(runs, first, strict=True)
        if other["output_tokens_per_second"]
    ]
    return {
        "contender": name,
        "request_rate": None if load.rate == float("inf") else load.rate,
        "concurrency": load.concurrency,
        "output_tokens_per_second": rate,
        "ratio": statistics.median(ratios) if ratios else None,
        "requests_per_second": median_of(runs, "requests_per_second"),
        "goodput": median_of(runs, "goodput"),
        **{f"{metric}_p50": median_of(runs, metric, "p50") for metric in METRICS},
        **{f"{metric}_p99": median_of(runs, metric, "p99") for metric in METRICS},
        "failed": sum(sum(run["failures"].values()) for run in runs),
        "client_cpu": median_of(runs, "client_cpu"),
        "runs": list(runs),
    }
