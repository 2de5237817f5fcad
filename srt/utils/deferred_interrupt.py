"""Ctrl-C at a moment that suits: SIGINT that comes while something must not be torn apart is taken
right after it.
"""

# What the module `signal` wraps: its conversions to enums take ten times as long, and a pass may
# take no more than a few milliseconds.
import _signal as signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class _Deferral:
    """Stands in for the handler of SIGINT: keeps the first signal, passes on the second."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._kept = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        # One that has ended keeps nothing: nobody would deliver it.
        if self._kept or not self._is_installed():
            self._kept = False
            self._handler(signum, frame)
        else:
            self._kept = True

    def end(self) -> None:
        """Puts the handler back. May be called again."""
        if self._is_installed():
            signal.signal(signal.SIGINT, self._handler)

    def deliver(self) -> None:
        """Hands the kept signal to the handler, if there is one."""
        if self._kept:
            self._kept = False
            self._handler(signal.SIGINT, None)

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGINT) is self


def defer_interrupt(function: Callable[[], T]) -> T:
    """Calls `function`. A SIGINT meanwhile reaches its handler (Python's raises KeyboardInterrupt)
    when the function has returned or raised; a second one at once, wherever the function is.

    Nothing is changed where signals are not the caller's to take: outside the main thread, or where
    SIGINT is ignored or ends the process. It costs two or three microseconds.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or isinstance(handler, _Deferral):
        return function()
    deferral = _Deferral(handler)
    # Twice, since a second signal may interrupt the first attempt to put the handler back.
    try:
        try:
            signal.signal(signal.SIGINT, deferral)
            return function()
        finally:
            deferral.end()
    finally:
        deferral.end()
        deferral.deliver()
