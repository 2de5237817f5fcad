"""One turn of whatever is timed between others."""

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Untimed calls first, until the cores are awake again and the threads of others asleep.
_WAKING_SECONDS = 0.006
_TURN_SECONDS = 0.010
_MOST_CALLS = 64


def take_turn(run: Callable[[], T]) -> tuple[float, T]:
    """Median of the seconds of some calls, and the result of the last.

    A call of several turns' length is made once: waking is lost in it.
    """
    start = time.perf_counter()
    result = run()
    first = time.perf_counter() - start
    if first > 4 * _TURN_SECONDS:
        return first, result
    while time.perf_counter() - start < _WAKING_SECONDS:
        run()
    seconds: list[float] = []
    while sum(seconds) < _TURN_SECONDS and len(seconds) < _MOST_CALLS:
        begin = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), result
