"""One at a time, or an error at once."""

import threading
from collections.abc import Callable
from typing import TypeVar

from srt.errors import EngineStateError

T = TypeVar("T")


class Exclusive:
    """Refuses to run two functions at once, be it from two threads or one inside the other.

    Unlike a lock it is free again whatever interrupts the holder wherever: an exception from a
    signal handler can come between taking a lock and the `try` that would release it.

    Args:
        what: What is in use, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # At most one entry. `setdefault` is one step to other threads and signal handlers.
        self._holder: dict[str, list[int]] = {}

    @property
    def is_held(self) -> bool:
        """Whether a function runs."""
        return bool(self._holder)

    def run(self, function: Callable[[], T]) -> T:
        """Calls `function`.

        Raises:
            EngineStateError: Another one runs.
        """
        token = [threading.get_ident()]
        try:
            try:
                holder = self._holder.setdefault("", token)
                if holder is not token:
                    raise EngineStateError(
                        f"{self._what} is in use by another thread; one at a time may use it"
                        if holder != token
                        else f"{self._what} is in use further up in this thread"
                    )
                return function()
            finally:
                self._release(token)
        finally:
            self._release(token)

    def _release(self, token: list[int]) -> None:
        if self._holder.get("") is token:
            self._holder.pop("", None)
