"""Many short requests over many connections, some of which leave: each has an outcome, and neither
memory nor slots of the KV cache are lost.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import LiveServer, live_server, wait_until
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=15, suite="per-commit")

CONNECTIONS = 64
GROWTH = 30 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_text_model(tmp_path_factory.mktemp("models") / "tiny")
    with live_server(model, ["--max-total-tokens", "2048"]) as running:
        yield running


def metric(server: LiveServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def memory(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


def engine_pid(server: LiveServer) -> int:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    pids = [int(pid) for pid in children.split()]
    return max(pids, key=memory)


async def ask(client: httpx.AsyncClient, rng: random.Random) -> str:
    """One request; returns what became of it."""
    body = {"prompt": "Once upon a time " * rng.randrange(1, 4), "max_tokens": rng.randrange(1, 12)}
    body |= {"temperature": 1, "seed": rng.randrange(1000), "stream": rng.random() < 0.5}
    leaves = rng.random()
    if leaves < 0.1:
        body["max_tokens"] = 200
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return str(answer.status_code)
            async for _ in answer.aiter_bytes():
                if leaves < 0.05:
                    return "left"
        return "done"
    except httpx.ReadTimeout:
        return "left" if leaves < 0.1 else "lost"


async def load(server: LiveServer, count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    left = iter(range(count))

    async def work(own: random.Random) -> None:
        limits = httpx.Limits(max_connections=1)
        timeout = httpx.Timeout(60)
        async with httpx.AsyncClient(base_url=server.url, timeout=timeout, limits=limits) as client:
            for _ in left:
                if own.random() < 0.05:  # a client that gives up
                    task = asyncio.ensure_future(ask(client, own))
                    await asyncio.wait([task], timeout=own.random() * 0.05)
                    if not task.done():
                        task.cancel()
                        await asyncio.wait([task])
                        outcomes["given up"] += 1
                        continue
                    outcomes[task.result()] += 1
                    continue
                outcomes[await ask(client, own)] += 1

    await asyncio.gather(*(work(random.Random(rng.random())) for _ in range(CONNECTIONS)))
    return outcomes


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_is_lost(server: LiveServer, count: int) -> None:
    asyncio.run(load(server, max(64, count // 10), 1))  # warms up
    pids = (server.process.pid, engine_pid(server))
    wait_until(lambda: metric(server, "srt_num_requests_running") == 0, 60)
    before = [memory(pid) for pid in pids]
    counted = metric(server, "srt_requests_total{")
    outcomes = asyncio.run(load(server, count, 2))
    assert sum(outcomes.values()) == count
    assert not outcomes["lost"] and not [name for name in outcomes if name.startswith("5")]
    assert outcomes["done"] > 0.8 * count and outcomes["given up"] + outcomes["left"] > 0
    wait_until(lambda: metric(server, "srt_num_requests_running") == 0, 60)
    wait_until(lambda: metric(server, "srt_num_requests_waiting") == 0, 60)
    # The tree's prefixes are all that the cache holds; what requests used is back.
    wait_until(lambda: metric(server, "srt_kv_cache_used_tokens") == 0, 20)
    # Each has been counted, those that came before it was given up, too.
    assert metric(server, "srt_requests_total{") - counted >= count - outcomes["given up"]
    grown = [memory(pid) - old for pid, old in zip(pids, before, strict=True)]
    print(f"{count} requests: {dict(outcomes)}, grown by {[g >> 10 for g in grown]} KiB")
    assert max(grown) < GROWTH, grown
