"""A KeyboardInterrupt between any two instructions of a recording leaves nothing behind."""

import itertools
import random
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch

import sgl_kernel
from sgl_kernel import Arena, RecordingError, StepGraph, graph, record
from sgl_kernel._library import graph_functions
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="per-commit")

# Where a recording runs Python code of its own.
FILES = (graph.__file__, _python_dispatch.__file__)
WEIGHT = torch.rand(64)


@pytest.fixture(autouse=True)
def no_modes() -> None:
    """Puts right what a test of two interrupts in a row may have left in this process."""
    record(lambda: None)


class Interrupt:
    """Raises KeyboardInterrupt before the count-th instruction in FILES."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted_recording(count: int, arena: Arena | None) -> tuple[bool, StorageWeakRef]:
    """Whether the interrupt came before the recording was over; and memory that a graph kept."""
    x = torch.randn(3, 64)
    memory = StorageWeakRef(x.untyped_storage())
    interrupt = Interrupt(count)
    sys.settrace(interrupt)
    try:
        record(
            lambda: sgl_kernel.rmsnorm_cpu(sgl_kernel.rmsnorm_cpu(x, WEIGHT, 0.1), WEIGHT, 0.1),
            arena,
        )
    except KeyboardInterrupt:
        return True, memory
    finally:
        sys.settrace(None)
    return interrupt.left <= 0, memory


def check_nothing_is_left(memory: StorageWeakRef) -> None:
    assert not graph_functions().recording()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not _python_dispatch._is_in_torch_dispatch_mode
    assert memory.expired()
    assert torch.arange(3).tolist() == [0, 1, 2]  # cannot be recorded


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_arena", [False, True])
def test_an_interrupt_before_any_instruction(in_arena: bool, step: int) -> None:
    arena = Arena(1 << 16) if in_arena else None
    for count in itertools.count(1, step):
        came, memory = interrupted_recording(count, arena)
        check_nothing_is_left(memory)
        if not came:
            break
    assert count > 500
    # And a recording succeeds.
    x = torch.randn(3, 64)
    recorded, out = record(lambda: sgl_kernel.rmsnorm_cpu(x, WEIGHT, 0.1), arena)
    expected = out.clone()
    out.zero_()
    recorded.replay()
    assert torch.equal(out, expected)


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_interrupts_at_random_moments() -> None:
    """Of recordings and replays: what is computed afterwards is right."""
    moments = random.Random(5)
    x, arena = torch.randn(3, 64), Arena(1 << 16)

    def work() -> Tensor:
        y = x
        for _ in range(10):
            y = sgl_kernel.rmsnorm_cpu(y, WEIGHT, 0.1)
        return y

    expected = work()
    seconds = time.perf_counter()
    recorded, out = record(work, arena)
    seconds = time.perf_counter() - seconds
    came = 0
    for _ in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 1.5 * seconds))
            recorded, out = record(work, arena)
            for _ in range(20):
                recorded.replay()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            came += 1
        assert not graph_functions().recording()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch.equal(work(), expected)
        out.fill_(torch.nan)
        recorded.replay()
        assert torch.equal(out, expected)
    assert came > 50


def test_a_recording_puts_right_what_was_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interrupts within a microsecond can leave Torch's note of a mode that is gone."""
    for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"):
        monkeypatch.setattr(_python_dispatch, name, True)
    assert _python_dispatch.is_in_torch_dispatch_mode()
    record(lambda: None)
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert not _python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)
    # Within a mode its notes are kept.
    with graph._Recorder(None):
        record(lambda: None)
        assert _python_dispatch.is_in_torch_dispatch_mode()
    assert not _python_dispatch.is_in_torch_dispatch_mode()


def test_a_mode_that_was_left_behind_does_nothing() -> None:
    """Two interrupts within a microsecond could do that."""
    recorder = graph._Recorder(None)
    with recorder:
        assert torch.arange(3).tolist() == [0, 1, 2]
    assert not recorder.kept


def test_a_graph_is_made_by_record_only() -> None:
    for wrong in (0, 12345, None, object()):
        with pytest.raises(TypeError, match=r"a StepGraph is what sgl_kernel\.record returns"):
            StepGraph(wrong, {})


def test_a_graph_is_freed_once() -> None:
    x = torch.ones(2, 64)
    recorded, _ = record(lambda: sgl_kernel.rmsnorm_cpu(x, WEIGHT, 0.1))
    same = StepGraph(recorded._capsule, {})
    del recorded
    same.replay()
    same.__init__(same._capsule, {})  # type: ignore[misc]
    same.replay()


@pytest.mark.parametrize("which", ["input", "weight", "result"])
@pytest.mark.parametrize("size", [0, 40, 1 << 20])
def test_memory_that_was_resized(which: str, size: int) -> None:
    x, weight = torch.randn(3, 64), torch.rand(64)
    recorded, out = record(lambda: sgl_kernel.rmsnorm_cpu(x, weight, 0.1))
    expected = out.clone()
    storage = {"input": x, "weight": weight, "result": out}[which].untyped_storage()
    before = storage.nbytes()
    storage.resize_(size)
    with pytest.raises(
        RuntimeError,
        match=f"StepGraph.replay: graph: expected the memory that it was recorded with, got a "
        f"storage that was resized since then, from {before} to {size} bytes",
    ):
        recorded.replay()
    assert expected.isfinite().all()


def test_an_arena_that_was_resized() -> None:
    x, arena = torch.randn(3, 64), Arena()
    recorded, out = record(lambda: sgl_kernel.rmsnorm_cpu(x, WEIGHT, 0.1), arena)
    out.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="replay: the memory of its arena was resized"):
        recorded.replay()


def test_a_result_of_another_graph_of_the_arena_is_no_input() -> None:
    """The graph would write over it while it reads it."""
    x, arena = torch.randn(3, 64), Arena(1 << 16)
    _, out = record(lambda: sgl_kernel.rmsnorm_cpu(x, WEIGHT, 0.1), arena)
    with pytest.raises(RecordingError, match=r"rmsnorm_cpu\.default uses a tensor of the arena"):
        record(lambda: sgl_kernel.rmsnorm_cpu(out, WEIGHT, 0.1), arena)
    copied = out.clone()
    recorded, out = record(lambda: sgl_kernel.rmsnorm_cpu(copied, WEIGHT, 0.1), arena)
    recorded.replay()
    assert torch.equal(out, sgl_kernel.rmsnorm_cpu(copied, WEIGHT, 0.1))
