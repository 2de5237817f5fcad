"""Names that mean the wrong thing, engines that are shut down, and threads that meet in a pass: an
error says so, and the engine goes on with the right tokens.
"""

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from srt import Engine, SamplingParams
from srt.entrypoints.outputs import GenerateChunk
from srt.errors import EngineStateError, OptionError, RequestError, SrtError
from srt.sampling import logprobs, sampler
from srt.test.cache_invariants import check_consistent
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import TEXT_CONFIG, write_text_model

register_cpu_ci(est_time=10, suite="per-commit")

CONFIG = TEXT_CONFIG | {"max_position_embeddings": 128}
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("misuse")
    return write_text_model(directory, CONFIG)


def make_engine(path: Path) -> Engine:
    return Engine(path, max_total_tokens=400, max_running_requests=8, progress=False)


@pytest.fixture(scope="module")
def shared(path: Path) -> Iterator[Engine]:
    with make_engine(path) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An engine that is idle again after the test, and generates as before."""
    before = shared.generate("how are you?", GREEDY).token_ids
    yield shared
    run(shared)
    assert shared.generate("how are you?", GREEDY).token_ids == before
    assert not shared.has_work
    check_consistent(shared.scheduler, idle=True)


def run(engine: Engine) -> dict[Any, list[GenerateChunk]]:
    """Steps to the end; the chunks of each request."""
    chunks: dict[Any, list[GenerateChunk]] = {}
    while engine.has_work:
        for chunk in engine.step():
            chunks.setdefault(chunk.rid, []).append(chunk)
    return chunks


def tokens(chunks: list[GenerateChunk]) -> tuple[int | None, ...]:
    return tuple(chunk.token_id for chunk in chunks)


def test_an_abort_means_the_request_that_has_the_name_when_it_is_said(engine: Engine) -> None:
    expected = engine.generate("second", GREEDY).token_ids
    engine.add_request("a", "first", GREEDY)
    run(engine)
    engine.abort("a")  # it has ended
    engine.add_request("a", "second", GREEDY)
    assert tokens(run(engine)["a"]) == expected


def test_a_name_is_taken_until_its_request_has_ended(engine: Engine) -> None:
    engine.add_request("a", "first", LONG)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"request a: there is a request of this name"):
            engine.add_request("a", "second", GREEDY)
        engine.step()
    engine.abort("a")
    engine.abort("a")
    with pytest.raises(RequestError, match="this name"):
        engine.add_request("a", "second", GREEDY)
    last = run(engine)["a"][-1]
    assert last.output is not None
    assert last.output.finish_reason == "abort"
    engine.add_request("a", "second", GREEDY)
    assert tokens(run(engine)["a"]) == engine.generate("second", GREEDY).token_ids


@pytest.mark.parametrize("rid", ["generate-0", "0", "1", ""])
def test_no_name_collides_with_those_of_the_engine(engine: Engine, rid: str) -> None:
    expected = [engine.generate(text, GREEDY).token_ids for text in ("one", "two")]
    stream = engine.generate(["one", "two"], GREEDY, stream=True)
    engine.add_request(rid, "one", SamplingParams(temperature=0, max_new_tokens=3))
    first = next(stream)
    engine.abort(rid)
    own: list[list[int | None]] = [[], []]
    for chunk in [first, *stream]:
        assert isinstance(chunk.rid, int)
        own[chunk.index].append(chunk.token_id)
    assert [tuple(ids) for ids in own] == expected
    assert tokens(run(engine)[rid])[-1] is None


@pytest.mark.parametrize("rid", [[1], 1, None, {"a": 1}, b"a", 0.5, ("a",)])
def test_a_name_that_is_no_text_is_refused(engine: Engine, rid: Any) -> None:
    for call in (lambda: engine.add_request(rid, "x", GREEDY), lambda: engine.abort(rid)):
        with pytest.raises(RequestError, match="rid: expected a text, found"):
            call()


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": 5},
        {"prompt": ["a", "b"]},
        {"messages": 5},
        {"messages": [5]},
        {"input_ids": 5},
        {"input_ids": [[1], [2]]},
        {"input_ids": ["a"]},
        {"input_ids": [None]},
        {"input_ids": [10**30]},
        {"prompt": "x", "sampling_params": "greedy"},
        {"prompt": "x", "sampling_params": 5},
        {"prompt": "x", "sampling_params": {"temperature": "hot"}},
        {},
    ],
    ids=str,
)
def test_what_is_refused_leaves_nothing_behind(engine: Engine, arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        engine.add_request("a", **arguments)
    engine.add_request("a", "first", GREEDY)  # the name is free
    assert tokens(run(engine)["a"]) == engine.generate("first", GREEDY).token_ids


def test_after_shutdown_everything_says_so(path: Path) -> None:
    engine = make_engine(path)
    untouched = engine.generate("one", LONG, stream=True)
    begun = engine.generate(["one", "two"], LONG, stream=True)
    next(begun)
    ended = engine.generate("three", GREEDY, stream=True)
    assert len(list(ended)) == 8
    engine.add_request("a", "four", LONG)
    engine.shutdown()
    engine.shutdown()
    calls: list[Callable[[], object]] = [
        lambda: next(untouched),
        lambda: next(begun),
        lambda: engine.generate("x"),
        lambda: engine.generate("x", stream=True),
        lambda: engine.generate(),
        lambda: engine.add_request("b", "x"),
        lambda: engine.abort("a"),
        lambda: engine.step(),
        lambda: engine.has_work,
        lambda: engine.scheduler,
        lambda: engine.model_runner,
    ]
    for call in calls:
        with pytest.raises(EngineStateError, match="the engine is shut down"):
            call()
    assert list(ended) == []
    for stream in (untouched, begun):
        stream.close()
        assert list(stream) == []


def test_shutdown_gives_the_model_back_while_streams_are_held(path: Path) -> None:
    engine = make_engine(path)
    stream = engine.generate("one", LONG, stream=True)
    next(stream)
    model = weakref.ref(engine.model_runner.model)
    engine.shutdown()
    gc.collect()
    assert model() is None
    with pytest.raises(EngineStateError):
        next(stream)


class Meeting:
    """Lets something happen in the middle of a pass, once."""

    def __init__(self, patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
        self.raised: BaseException | None = None
        self.happened = False

        def sample(*args: Any) -> Any:
            if not self.happened:
                self.happened = True
                try:
                    action()
                except BaseException as error:  # noqa: BLE001 - the test looks at it
                    self.raised = error
            return sampler.sample(*args)

        patch.setattr("srt.managers.forward_pass.sample", sample)


def in_thread(action: Callable[[], object]) -> Callable[[], object]:
    def run_there() -> None:
        errors: list[BaseException] = []

        def target() -> None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return run_there


@pytest.mark.parametrize("thread", [False, True], ids=["inside", "thread"])
@pytest.mark.parametrize("use", ["step", "generate", "next", "same stream"])
def test_two_in_a_pass_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, thread: bool, use: str
) -> None:
    expected = engine.generate("one", GREEDY).token_ids
    other = engine.generate("two", GREEDY, stream=True)
    stream = engine.generate("one", GREEDY, stream=True)
    action = {
        "step": lambda: engine.step(),
        "generate": lambda: engine.generate("three", GREEDY),
        "next": lambda: next(other),
        "same stream": lambda: next(stream),
    }[use]
    meeting = Meeting(monkeypatch, in_thread(action) if thread else action)
    assert tokens(list(stream)) == expected
    assert isinstance(meeting.raised, EngineStateError)
    what = "the stream" if use == "same stream" else "the engine"
    where = "by another thread; one at a time may use it" if thread else "further up in this thread"
    assert str(meeting.raised) == f"{what} is in use {where}"
    assert tokens(list(other)) == engine.generate("two", GREEDY).token_ids


@pytest.mark.parametrize("thread", [False, True], ids=["inside", "thread"])
@pytest.mark.parametrize("end", ["close", "del", "abort", "close itself"])
def test_what_ends_within_a_pass_ends_after_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, thread: bool, end: str
) -> None:
    expected = engine.generate("one", GREEDY).token_ids
    held = [engine.generate("two", LONG, stream=True)]
    engine.add_request("a", "three", LONG)
    stream = engine.generate("one", GREEDY, stream=True)
    action: Callable[[], object] = {
        "close": lambda: held[0].close(),
        "del": held.clear,
        "abort": lambda: engine.abort("a"),
        "close itself": stream.close,
    }[end]
    meeting = Meeting(monkeypatch, in_thread(action) if thread else action)
    got = tokens(list(stream))
    assert meeting.happened
    assert meeting.raised is None
    assert got == (() if end == "close itself" else expected)
    if end in ("close", "del"):
        running = [*engine.scheduler._prefilling, *engine.scheduler._decoding]
        assert [req.rid for req in running] == ["a"]
    if end == "abort":
        last = run(engine)["a"][-1]
        assert last.output is not None
        assert last.output.finish_reason == "abort"
    else:
        engine.abort("a")
    for one in held:
        one.close()


@pytest.mark.parametrize("thread", [False, True], ids=["inside", "thread"])
def test_shutdown_within_a_pass(path: Path, monkeypatch: pytest.MonkeyPatch, thread: bool) -> None:
    engine = make_engine(path)
    stream = engine.generate("one", GREEDY, stream=True)
    Meeting(monkeypatch, in_thread(engine.shutdown) if thread else engine.shutdown)
    with pytest.raises(EngineStateError, match="shut down"):
        next(stream)


@pytest.mark.parametrize(
    "option",
    [
        {"context_length": "9"},
        {"context_length": 9.5},
        {"max_running_requests": "4"},
        {"max_running_requests": True},
        {"max_total_tokens": 10.0},
        {"chunked_prefill_size": 0},
        {"num_threads": "many"},
        {"compiled_batch_sizes": [1, "2"]},
        {"compiled_batch_sizes": [4, -1]},
    ],
)
def test_numbers_of_an_engine_are_integers(option: dict[str, Any]) -> None:
    """Which is said before the model is looked for."""
    name = next(iter(option))
    with pytest.raises(OptionError, match=f"^{name}: expected an integer >= 1, found "):
        Engine("/nonexistent", **option)


@pytest.mark.parametrize(
    "option", [{"mem_fraction": "0.5"}, {"mem_fraction": 2}, {"kv_cache_dtype": ["fp8"]}]
)
def test_other_options_of_an_engine(path: Path, option: dict[str, Any]) -> None:
    name, value = next(iter(option.items()))
    with pytest.raises(OptionError, match=f"^{name}: expected .*, found {re.escape(repr(value))}"):
        Engine(path, **option)


def test_threads_that_all_generate_get_the_right_tokens_or_an_error(engine: Engine) -> None:
    texts = [f"thread {i}" for i in range(6)]
    expected = {text: engine.generate(text, GREEDY).token_ids for text in texts}
    refused, wrong, right = [0], [], [0]

    def work(text: str) -> None:
        for _ in range(15):
            try:
                output = engine.generate(text, GREEDY)
            except EngineStateError:
                refused[0] += 1
            else:
                right[0] += 1
                if output.token_ids != expected[text]:
                    wrong.append(text)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert right[0] + refused[0] == 90


def test_of_several_inputs_one_may_fail(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["one", "two", "three"]
    expected = [output.token_ids for output in engine.generate(texts, GREEDY)]

    def failing(logits: Any, ids: Any, top: int) -> Any:
        if top == 2:
            raise MemoryError("no room")
        return logprobs.token_logprobs(logits, ids, top)

    monkeypatch.setattr("srt.managers.forward_pass.token_logprobs", failing)
    bad = SamplingParams(temperature=0, max_new_tokens=8, return_logprob=True, top_logprobs_num=2)
    outputs = engine.generate(texts, [GREEDY, bad, GREEDY])
    assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("abort", ())
    assert outputs[1].error == "request 1: MemoryError: no room"
    with pytest.raises(SrtError, match="request 0: MemoryError: no room"):
        engine.generate("two", bad)
