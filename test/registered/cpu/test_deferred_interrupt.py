"""When SIGINT is taken, and that functions which exclude each other are free again afterwards."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from srt.errors import EngineStateError
from srt.test.ci_register import register_cpu_ci
from srt.utils.deferred_interrupt import defer_interrupt
from srt.utils.exclusive import Exclusive

register_cpu_ci(est_time=2, suite="per-commit")


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler() -> Iterator[Any]:
    before = signal.getsignal(signal.SIGINT)
    yield before
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_waits_for_the_end() -> None:
    done = []

    def work() -> None:
        press()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        defer_interrupt(work)
    assert done


def test_ctrl_c_comes_after_an_error_too() -> None:
    def work() -> None:
        press()
        raise ValueError("broken")

    with pytest.raises(KeyboardInterrupt) as caught:
        defer_interrupt(work)
    assert isinstance(caught.value.__context__, ValueError)


def test_the_second_comes_at_once() -> None:
    done = []

    def work() -> None:
        press()
        done.append(1)
        press()
        done.append(2)

    with pytest.raises(KeyboardInterrupt):
        defer_interrupt(work)
    assert done == [1]
    defer_interrupt(lambda: None)  # nothing is left of them


def test_without_a_signal_the_result_comes_back() -> None:
    assert defer_interrupt(lambda: 5) == 5


def test_within_another_the_outer_one_decides() -> None:
    done = []

    def inner() -> None:
        press()
        done.append("inner")

    def outer() -> None:
        defer_interrupt(inner)
        done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        defer_interrupt(outer)
    assert done == ["inner", "outer"]


def test_a_handler_of_the_application_is_called_afterwards() -> None:
    calls: list[str] = []

    def mine(signum: int, frame: FrameType | None) -> None:
        calls.append("handler")

    before = signal.signal(signal.SIGINT, mine)
    try:

        def work() -> int:
            press()
            calls.append("work")
            return 3

        assert defer_interrupt(work) == 3
        assert calls == ["work", "handler"]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_not_pythons_to_handle_stays_as_it_is(kind: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, kind)
    try:
        assert defer_interrupt(lambda: signal.getsignal(signal.SIGINT)) is kind
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_the_handler_alone(handler: Any) -> None:
    seen = []
    thread = threading.Thread(
        target=lambda: defer_interrupt(lambda: seen.append(signal.getsignal(signal.SIGINT)))
    )
    thread.start()
    thread.join()
    assert seen == [handler]


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        defer_interrupt(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_exclusion_ends_with_an_exception() -> None:
    exclusive = Exclusive("the tool")

    def nested() -> None:
        exclusive.run(lambda: None)

    for _ in range(2):
        with pytest.raises(EngineStateError, match="the tool is in use further up in this thread"):
            exclusive.run(nested)
        assert not exclusive.is_held
    assert exclusive.run(lambda: 7) == 7
