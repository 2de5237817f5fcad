"""From the times of requests to what a table shows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from srt.bench.serving.timings import Timing

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2e")


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, as NumPy's default.

    Args:
        values: In any order, at least one.
        share: Percent.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and the largest; None where there are no values."""
    names = [f"p{share}" for share in PERCENTILES]
    if not values:
        return dict.fromkeys(["mean", *names, "max"])
    shares = [percentile(values, share) for share in PERCENTILES]
    mean = sum(values) / len(values)
    return {"mean": mean, **dict(zip(names, shares, strict=True)), "max": max(values)}


def summarize(timings: Sequence[Timing], goodput: Mapping[str, float]) -> dict[str, Any]:
    """One run.

    Args:
        timings: Of its requests, at least one.
        goodput: Limits by metric (`ttft`, `tpot`, `e2e`), in seconds; may be empty.

    Returns:
        Counts, rates over the time from the first request to the last answer, and
        :func:`spread` of the seconds of each metric, of the requests that did not fail.
    """
    good = [timing for timing in timings if timing.failure is None]
    seconds = max(t.ended for t in timings) - min(t.started for t in timings)
    seconds = max(seconds, 1e-9)
    prompt = sum(timing.prompt_tokens for timing in good)
    output = sum(timing.output_tokens for timing in good)
    met = sum(_meets(timing, goodput) for timing in good)
    return {
        "seconds": seconds,
        "completed": len(good),
        "failures": dict(Counter(t.failure for t in timings if t.failure is not None)),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "goodput": met / seconds if goodput else None,
        "ttft": spread([timing.ttft for timing in good]),
        "tpot": spread([t.tpot for t in good if t.tpot is not None]),
        "itl": spread([gap for timing in good for gap in timing.itl]),
        "e2e": spread([timing.e2e for timing in good]),
    }


def _meets(timing: Timing, limits: Mapping[str, float]) -> bool:
    values = {"ttft": timing.ttft, "tpot": timing.tpot or 0.0, "e2e": timing.e2e}
    return all(values[name] <= limit for name, limit in limits.items())


def median_of(runs: Sequence[Mapping[str, Any]], *path: str) -> float | None:
    """The median over runs of a value of :func:`summarize`, found by its keys."""
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value[key]
        if value is not None:
            values.append(float(value))
    return percentile(values, 50) if values else None
