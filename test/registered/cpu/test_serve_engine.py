"""The engine in a process of its own: what it generates, refuses and survives."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srt import Engine, SamplingParams
from srt.configs.engine_config import EngineConfig
from srt.errors import SrtError
from srt.serve.engine.client import EngineClient, EngineState
from srt.serve.engine.generations import Generation, GenerationPiece
from srt.serve.engine.protocol import MAX_PART, FrameReader, ProtocolError, encode_frame
from srt.serve.errors import ApiError
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, write_checkpoint

register_cpu_ci(est_time=40, suite="per-commit")

PROMPTS = [[1, 5, 9, i, 2 * i + 3] for i in range(12)]


RUNNING, QUEUED, KV_TOKENS = 4, 8, 400


def params(**values: object) -> SamplingParams:
    return SamplingParams.from_mapping({"max_new_tokens": 24, "ignore_eos": True} | values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY_CONFIG, make_tensors(TINY_CONFIG))
    return path


def make_client(model: Path, timeout: float | None = None, **options: Any) -> EngineClient:
    config = EngineConfig(model, progress=False, num_threads=1, **options)
    return EngineClient(config, max_queued_requests=QUEUED, request_timeout=timeout)


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a test's work in the event loop of all of them, in which their engine lives."""
    loop = asyncio.new_event_loop()
    yield lambda work: loop.run_until_complete(asyncio.wait_for(work, 120))
    loop.close()


@pytest.fixture(scope="module")
def client(model: Path, run: Run) -> Iterator[EngineClient]:
    holder: list[EngineClient] = []

    async def start() -> None:
        options = {"max_running_requests": RUNNING, "max_total_tokens": KV_TOKENS}
        holder.append(make_client(model, **options))
        await holder[0].start()

    run(start())
    yield holder[0]
    run(holder[0].close())


async def read(generation: Generation) -> list[GenerationPiece]:
    return [piece async for piece in generation]


async def tokens(generation: Generation) -> tuple[int, ...]:
    return tuple(token for piece in await read(generation) for token in piece.token_ids)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), seconds)


def test_tokens_and_logprobs_are_those_of_an_engine_in_this_process(
    model: Path, client: EngineClient, run: Run
) -> None:
    own = [
        params(temperature=0.8, seed=i, return_logprob=True, top_logprobs_num=2) for i in range(11)
    ]
    own.append(params(return_prompt_logprob=True, top_logprobs_num=1))
    with Engine(model, progress=False, num_threads=1) as engine:
        expected = engine.generate(input_ids=PROMPTS, sampling_params=own)

    async def work() -> None:
        generations = client.submit_all(list(zip(PROMPTS, own, strict=True)))
        found = await asyncio.gather(*map(read, generations))
        for one, want in zip(found, expected, strict=True):
            assert tuple(t for piece in one for t in piece.token_ids) == want.token_ids
            entries = tuple(entry for piece in one for entry in piece.logprobs)
            assert entries == (want.logprobs or ())
            end = one[-1].end
            assert end is not None
            assert (end.finish_reason, end.completion_tokens) == ("length", 24)
            assert end.prompt_logprobs == want.prompt_logprobs
            assert all(piece.end is None for piece in one[:-1])
        await until(lambda: client.stats.running == 0 and client.stats.work.decode_tokens > 0)
        assert client.stats.kv_used_tokens == 0
        assert client.num_open == client.num_queued == 0

    run(work())


def test_what_is_not_read_is_merged(client: EngineClient, run: Run) -> None:
    async def work() -> None:
        lazy, eager = client.submit_all([(PROMPTS[0], params())] * 2)
        whole = await tokens(eager)
        await until(lambda: client.num_open == 0)
        (piece,) = await read(lazy)
        assert piece.token_ids == whole
        assert piece.end is not None

    run(work())


def test_an_abort_ends_a_request_before_the_next_pass_and_frees_its_slots(
    client: EngineClient, run: Run
) -> None:
    async def work() -> None:
        many = client.submit_all([(PROMPTS[i], params(max_new_tokens=90)) for i in range(6)])
        await anext(many[0])
        assert client.num_queued < 6
        for one in (*many, *many):
            one.abort()
        for one in many:
            end = (await read(one))[-1].end
            assert end is not None
            assert (end.finish_reason, end.error) == ("abort", None)
            assert end.completion_tokens < 90
        many[0].abort()  # long after its end
        assert client.num_open == client.num_queued == 0
        await until(lambda: client.stats.kv_used_tokens == 0 and client.stats.running == 0)
        assert len(await tokens(client.submit(PROMPTS[2], params()))) == 24

    run(work())


def test_requests_beyond_the_queue_are_refused_all_or_none(client: EngineClient, run: Run) -> None:
    async def work() -> None:
        first = client.submit_all([(PROMPTS[i], params()) for i in range(11)])
        with pytest.raises(ApiError) as raised:
            client.submit_all([(prompt, params()) for prompt in PROMPTS[3:5]])
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        assert f"at most {QUEUED} may" in raised.value.message
        assert int(raised.value.headers["Retry-After"]) >= 1
        assert client.num_open == 11
        await asyncio.gather(*map(tokens, first))
        assert len(await tokens(client.submit(PROMPTS[3], params()))) == 24

    run(work())


def test_a_killed_engine_fails_what_is_open_and_comes_back(model: Path, run: Run) -> None:
    """And one whose model has gone meanwhile says so until it is there again."""
    client = make_client(model, timeout=20, max_total_tokens=40)
    gone = model.with_name("gone")

    async def die() -> None:
        generation = client.submit(PROMPTS[0], params(max_new_tokens=36))
        await anext(generation)
        assert client.facts is not None
        os.kill(client.facts.pid, signal.SIGSTOP)  # it must not end by itself before
        os.kill(client.facts.pid, signal.SIGKILL)
        with pytest.raises(ApiError, match="SIGKILL") as raised:
            await read(generation)
        assert (raised.value.status, raised.value.code) == (503, "engine_died")
        assert client.num_open == 0
        with pytest.raises(ApiError) as refused:
            client.submit(PROMPTS[0], params())
        assert (refused.value.status, refused.value.code) == (503, "engine_not_ready")
        assert "Retry-After" in refused.value.headers

    async def work() -> None:
        await client.start()
        with pytest.raises(ApiError, match=r"53 tokens .* holds 40") as raised:
            client.submit(list(range(30)), params())
        assert raised.value.status == 400
        before = await tokens(client.submit(PROMPTS[0], params()))
        await die()
        await until(lambda: client.state is EngineState.READY)
        assert client.restarts == 1
        assert await tokens(client.submit(PROMPTS[0], params())) == before

        model.rename(gone)
        assert await tokens(client.submit(PROMPTS[0], params())) == before
        await die()
        await until(lambda: "no such checkpoint" in (client.problem or ""))
        with pytest.raises(ApiError, match=r"restarting .*no such checkpoint"):
            client.check_available()
        gone.rename(model)
        await until(lambda: client.state is EngineState.READY)
        assert await tokens(client.submit(PROMPTS[0], params())) == before

        client._timeout = 0.02
        generation = client.submit(PROMPTS[0], params(max_new_tokens=36))
        assert client.facts is not None
        os.kill(client.facts.pid, signal.SIGSTOP)
        with pytest.raises(ApiError) as late:
            await read(generation)
        assert (late.value.status, late.value.code) == (408, "request_timeout")
        os.kill(client.facts.pid, signal.SIGCONT)
        await until(lambda: client.num_open == 0)
        pid = client.facts.pid
        await client.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(ApiError, match="shutting down"):
            client.check_available()

    run(work())


def test_a_model_that_cannot_be_loaded_is_the_engines_own_error(tmp_path: Path, run: Run) -> None:
    with pytest.raises(SrtError, match=r"config\.json"):
        run(_start(make_client(tmp_path)))


async def _start(client: EngineClient) -> None:
    await client.start()


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_frames_come_whole_however_the_stream_is_cut(size: int) -> None:
    frames: list[tuple[dict[str, object], Sequence[int]]] = [
        ({"op": "add", "text": "é\ud800", "n": 1.5}, [1, -2, 3]),
        ({}, []),
        ({"a": [None, {"b": "x" * 300}]}, list(range(500))),
    ]
    content = b"".join(
        encode_frame(message, np.array(ids, dtype=np.int32)) for message, ids in frames
    )
    reader = FrameReader()
    found = [
        (message, ids.tolist())
        for at in range(0, len(content), size)
        for message, ids in reader.feed(content[at : at + size])
    ]
    assert found == frames


@pytest.mark.parametrize(
    "content",
    [
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
        b"\x01\x00\x00\x00\x00\x00\x00\x00{",
        b"\x02\x00\x00\x00\x03\x00\x00\x00{}abc",
        (MAX_PART + 1).to_bytes(4, "little") + bytes(4),
    ],
)
def test_what_is_no_frame_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(content))
