"""Signs of life in a stream, and that what it reads from ends with it."""

import asyncio
from collections.abc import AsyncIterator

from srt.serve.generation.heartbeat import with_heartbeats
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="per-commit")


def test_events_pass_and_silence_is_told() -> None:
    release = asyncio.Event()

    async def events() -> AsyncIterator[int]:
        yield 1
        await release.wait()
        yield 2

    async def run() -> list[int | None]:
        found: list[int | None] = []
        async for one in with_heartbeats(events(), 0.01):
            found.append(one)
            if found.count(None) == 3:
                release.set()
        return found

    found = asyncio.run(run())
    assert found[0] == 1 and found[-1] == 2 and set(found[1:-1]) == {None}


def test_an_error_passes() -> None:
    async def events() -> AsyncIterator[int]:
        yield 1
        raise ValueError("why")

    async def run() -> tuple[list[int | None], str]:
        found: list[int | None] = []
        try:
            async for one in with_heartbeats(events()):
                found.append(one)
        except ValueError as error:
            return found, str(error)
        return found, ""

    assert asyncio.run(run()) == ([1], "why")


def test_what_it_reads_from_ends_with_it() -> None:
    """Whether it is closed between two events, or its task is cancelled while it waits."""
    closed: list[str] = []

    async def events(name: str) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    async def close() -> None:
        stream = with_heartbeats(events("closed"), 0.01)
        assert [await anext(stream), await anext(stream)] == [1, None]
        await stream.aclose()  # type: ignore[attr-defined]

    async def cancel() -> None:
        async def read() -> None:
            stream = with_heartbeats(events("cancelled"))
            try:
                async for _ in stream:
                    began.set()
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

        began = asyncio.Event()
        task = asyncio.ensure_future(read())
        await began.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(close())
    asyncio.run(cancel())
    assert closed == ["closed", "cancelled"]
