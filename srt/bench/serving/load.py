"""Who asks when: at a rate, or so many at once."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Load:
    """How requests arrive.

    Attributes:
        rate: Requests a second, in the intervals of a Poisson process; infinite for all at once.
        concurrency: Most that are open at a time; None for no limit.
    """

    rate: float = math.inf
    concurrency: int | None = None

    def arrivals(self, count: int, seed: str) -> list[float]:
        """Seconds from the start to each arrival."""
        if math.isinf(self.rate):
            return [0.0] * count
        rng, now, times = random.Random(seed), 0.0, []
        for _ in range(count):
            times.append(now)
            now += rng.expovariate(self.rate)
        return times

    def describe(self) -> str:
        """For a table."""
        rate = "" if math.isinf(self.rate) else f"{self.rate:g}/s"
        at_once = "" if self.concurrency is None else f"{self.concurrency} at once"
        return ", ".join(filter(None, (rate, at_once))) or "all at once"


async def run_load(
    load: Load,
    items: Sequence[Item],
    send: Callable[[Item], Awaitable[Result]],
    seed: str,
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Result]:
    """Sends all items; returns what came for each, in their order. Those that wait for others to
    end are not sent yet, so their time has not begun.
    """
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(load.concurrency or max(1, len(items)))

    async def one(item: Item) -> Result:
        async with gate:
            return await send(item)

    begun, tasks = loop.time(), list[asyncio.Task[Result]]()
    try:
        for item, due in zip(items, load.arrivals(len(items), seed), strict=True):
            ahead = begun + due - loop.time()
            if ahead > 0:
                await sleep(ahead)
            tasks.append(asyncio.create_task(one(item)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
