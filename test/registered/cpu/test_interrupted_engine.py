"""A stream that Ctrl-C interrupts at any moment is closed or read on, and later answers are those
of a fresh engine: what `srt chat` promises.
"""

import ctypes
import itertools
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import sgl_kernel
from srt import Engine, SamplingParams
from srt.errors import SrtError
from srt.test.cache_invariants import check_consistent
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import TEXT_CONFIG, write_text_model

register_cpu_ci(est_time=20, suite="per-commit")

CONFIG = TEXT_CONFIG | {"max_position_embeddings": 128}
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=14, ignore_eos=True),
    SamplingParams(seed=3, temperature=1, max_new_tokens=11, ignore_eos=True, top_p=0.9),
    SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True, return_logprob=True),
]
PROMPTS = [f"{'a conversation so far, ' * (i % 3)}{i}" for i in range(9)]
# Several share the cache, and it holds few of them.
OPTIONS: dict[str, Any] = {
    "max_total_tokens": 170,
    "max_running_requests": 4,
    "chunked_prefill_size": 24,
    "progress": False,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("interrupted")
    return write_text_model(directory, CONFIG)


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[tuple[int, int], tuple[int, ...]]:
    """What each prompt gets with each of the parameters, in a fresh engine."""
    with Engine(path, **OPTIONS | {"max_total_tokens": 2000}) as engine:
        return {
            (i, j): engine.generate(prompt, params).token_ids
            for i, prompt in enumerate(PROMPTS)
            for j, params in enumerate(PARAMS)
        }


def raise_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def press_ctrl_c(signum: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


def press_twice(signum: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


class Timer:
    """Calls a function under a timer that interrupts it by a signal."""

    def __init__(self, action: Callable[[int, FrameType | None], None]) -> None:
        self._action = action

    def interrupts(self, function: Callable[[], object], delay: float) -> bool:
        """Whether the function was interrupted."""
        before = signal.signal(signal.SIGALRM, self._action)
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                function()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            return False
        except KeyboardInterrupt:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class OtherThread:
    """Calls a function while another thread raises KeyboardInterrupt in this one."""

    def interrupts(self, function: Callable[[], object], delay: float) -> bool:
        """Whether the function was interrupted."""
        here, done = ctypes.c_ulong(threading.get_ident()), threading.Event()

        def bomb() -> None:
            if not done.wait(delay):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    here, ctypes.py_object(KeyboardInterrupt)
                )

        thread = threading.Thread(target=bomb)
        interrupted = False
        try:
            thread.start()
            function()
        except KeyboardInterrupt:
            interrupted = True
        try:
            done.set()
            thread.join()
            for _ in range(100):
                pass  # where what came late is raised
        except KeyboardInterrupt:
            interrupted = True
            thread.join()
        return interrupted


def check_thread() -> None:
    """Nothing that a pass switches on for its thread has stayed on."""
    assert not torch.is_inference_mode_enabled()
    assert not _get_current_dispatch_mode_stack()
    sgl_kernel.record(lambda: None)  # which fails while this thread is recording


def interrupt_often(
    path: Path, bomb: Timer | OtherThread, moments: int, expected: dict[tuple[int, int], Any]
) -> None:
    rng = random.Random(moments)
    handler = signal.getsignal(signal.SIGINT)
    hits = rounds = 0
    with Engine(path, **OPTIONS) as engine:
        while hits < moments:
            rounds += 1
            assert rounds < 20 * moments, "hardly anything was interrupted"
            which = rng.sample(range(len(PROMPTS)), rng.randint(1, 3))
            kind = rng.randrange(len(PARAMS))
            tokens: list[list[int]] = [[] for _ in which]
            stream = engine.generate([PROMPTS[i] for i in which], PARAMS[kind], stream=True)

            def read(stream: Any = stream, tokens: list[list[int]] = tokens) -> None:
                for chunk in stream:
                    tokens[chunk.index].append(chunk.token_id)

            was_hit = bomb.interrupts(read, rng.uniform(0.0002, 0.020))
            hits += was_hit
            assert signal.getsignal(signal.SIGINT) is handler
            check_thread()
            goes_on = not was_hit or rng.random() < 0.3
            if goes_on:
                read()
            stream.close()
            check_consistent(engine.scheduler, idle=True)
            # A chunk may have been on its way to the reader when the signal came.
            for i, got in zip(which, tokens, strict=True):
                want = expected[i, kind]
                it = iter(want)
                assert all(token in it for token in got), "tokens that are not the request's"
                assert not goes_on or len(got) >= len(want) - 1
            if rng.random() < 0.5:
                again = rng.randrange(len(PROMPTS))
                output = engine.generate(PROMPTS[again], PARAMS[kind])
                assert output.token_ids == expected[again, kind]
        for (i, j), want in expected.items():
            assert engine.generate(PROMPTS[i], PARAMS[j]).token_ids == want


# Raised at once, as no handler of SIGINT may raise while a pass runs; or a key is pressed.
BOMBS: dict[str, Timer | OtherThread] = {
    "anywhere": Timer(raise_interrupt),
    "ctrl-c": Timer(press_ctrl_c),
    "ctrl-c twice": Timer(press_twice),
    "thread": OtherThread(),
}


@pytest.fixture(params=BOMBS)
def bomb(request: pytest.FixtureRequest) -> Iterator[Timer | OtherThread]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield BOMBS[request.param]
    sys.setswitchinterval(interval)


def test_later_answers_are_those_of_a_fresh_engine(
    path: Path, bomb: Timer | OtherThread, expected: dict[tuple[int, int], Any]
) -> None:
    interrupt_often(path, bomb, 125, expected)


@pytest.mark.slow
def test_many_more_interruptions(
    path: Path, bomb: Timer | OtherThread, expected: dict[tuple[int, int], Any]
) -> None:
    interrupt_often(path, bomb, 600, expected)


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_fails_while_a_pass_is_recorded(
    path: Path, error: type[BaseException], call: int, expected: dict[tuple[int, int], Any]
) -> None:
    """A pass is recorded twice to find places for its tensors; then it is replayed."""
    with Engine(path, **OPTIONS) as engine:
        recorder = engine.model_runner.step_graph_runner
        assert recorder is not None
        model, calls = recorder._model, itertools.count(1)

        def failing(batch: Any) -> Any:
            logits = model(batch)
            if next(calls) == call:
                raise error
            return logits

        recorder._model = failing  # type: ignore[assignment]
        failed = 0
        for i in (0, 1, 2):
            try:
                assert engine.generate(PROMPTS[i], PARAMS[0]).token_ids == expected[i, 0]
            except (KeyboardInterrupt, SrtError):
                failed += 1
            check_thread()
            check_consistent(engine.scheduler, idle=True)
        assert failed == (call < 3)
        assert recorder.recorded_sizes == (1,)
        for (i, j), want in expected.items():
            assert engine.generate(PROMPTS[i], PARAMS[j]).token_ids == want
