"""Signs of life in a stream whose next event takes long, such as the first of a long prompt."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")

# Proxies and agents give up after a minute without a byte.
HEARTBEAT_SECONDS = 10.0


async def with_heartbeats(
    events: AsyncIterator[T], seconds: float = HEARTBEAT_SECONDS
) -> AsyncIterator[T | None]:
    """The events, and None whenever none has come for so many seconds. Closing it closes them."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait([pending], timeout=seconds))[0]:
                yield None
            try:
                event = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield event
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.wait([pending])
        await events.aclose()  # type: ignore[attr-defined]
