"""From a request to what is queued for it, with an engine that computes nothing."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from srt import SamplingParams
from srt.configs.engine_config import EngineConfig
from srt.entrypoints.model_files import ModelFiles
from srt.serve.config import ServerConfig
from srt.serve.errors import ApiError
from srt.serve.generation.answer_stream import AnswerStream, split_by_answer
from srt.serve.generation.answers import AnswerDelta
from srt.serve.generation.service import CompletionCall, GenerationService
from srt.serve.http_io import EventStream
from srt.serve.openai.shapes import error_event
from srt.serve.parsers.choice import AnswerParsers
from srt.serve.state import ServerState
from srt.test.ci_register import register_cpu_ci
from srt.test.fake_engine import FakeEngine, FakeGeneration
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=5, suite="per-commit")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, ModelFiles]:
    config = EngineConfig(write_text_model(tmp_path_factory.mktemp("tiny")), progress=False)
    return config, ModelFiles.load(config)


@pytest.fixture
def state(files: tuple[EngineConfig, ModelFiles]) -> ServerState:
    config, loaded = files
    return ServerState(
        config=ServerConfig(),
        engine_config=config,
        files=loaded,
        parsers=AnswerParsers("", "auto", "auto", {}, {}),
        engine=FakeEngine(config),
        model_names=(Path(config.model_path).name,),
        started_at=0,
    )


def generations(state: ServerState) -> list[FakeGeneration]:
    assert isinstance(state.engine, FakeEngine)
    return state.engine.generations


def complete(state: ServerState, call: CompletionCall) -> list[AnswerStream]:
    service = GenerationService(state)

    async def work() -> list[AnswerStream]:
        return [answer for one in await service.complete(call) for answer in one.answers]

    return asyncio.run(work())


def test_fewest_tokens_above_the_most_are_the_clients_error(state: ServerState) -> None:
    params = SamplingParams(min_new_tokens=20)
    with pytest.raises(ApiError, match=r"min_tokens: .* from 0 to .*\(10\), found 20") as raised:
        complete(state, CompletionCall([[1, 2]], params, 10))
    assert (raised.value.status, raised.value.param) == (400, "min_tokens")
    assert generations(state) == []
    complete(state, CompletionCall([[1, 2]], params, 20))
    assert [one.params.max_new_tokens for one in generations(state)] == [20]


def test_more_answers_than_may_wait_are_refused_before_any_is_prepared(state: ServerState) -> None:
    builder = state.files.builder
    with (
        mock.patch.object(builder, "check", side_effect=AssertionError("work was done")),
        pytest.raises(ApiError) as raised,
    ):
        complete(state, CompletionCall([[1, 2]] * 2048, SamplingParams(), 10, 128))
    assert (raised.value.status, raised.value.code) == (429, "queue_full")
    # Four run and eight wait.
    complete(state, CompletionCall([[1, 2]] * 3, SamplingParams(seed=7), 10, 4))
    assert len(generations(state)) == 12
    assert len({one.params.seed for one in generations(state)}) == 4


def test_nothing_is_queued_where_a_parser_cannot_be_made(state: ServerState) -> None:
    def fail() -> None:
        raise ValueError("no parser")

    async def work() -> None:
        GenerationService(state)._start([[1, 2]], SamplingParams(), 10, 2, "prompt", fail)

    with pytest.raises(ValueError, match="no parser"):
        asyncio.run(work())
    assert generations(state) == []


@pytest.mark.parametrize("has_gone", [False, True], ids=["the head fails", "the client goes"])
def test_answers_whose_stream_never_begins_are_aborted(has_gone: bool) -> None:
    generation = FakeGeneration(SamplingParams())
    was_read = []

    async def events() -> AsyncIterator[bytes]:
        was_read.append(True)
        yield b""

    async def send(message: MutableMapping[str, Any]) -> None:
        if not has_gone:
            raise OSError("the connection is broken")
        await asyncio.get_running_loop().create_future()

    async def receive() -> dict[str, Any]:
        if not has_gone:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.disconnect"}

    async def work() -> None:
        stream = EventStream(events(), error_event, [AnswerStream(generation)])
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 10)

    if has_gone:
        asyncio.run(work())
    else:
        with pytest.raises(OSError, match="broken"):
            asyncio.run(work())
    assert not was_read
    assert generation.num_aborts == 1


def test_events_of_several_answers_are_told_apart() -> None:
    events = [(index, AnswerDelta(content=text)) for index, text in ((2, "a"), (0, "b"), (2, "c"))]
    split = split_by_answer(events, 3)
    assert split == [[events[1][1]], [], [events[0][1], events[2][1]]]
