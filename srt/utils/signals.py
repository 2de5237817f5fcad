"""What SIGINT, SIGTERM and SIGHUP do to the command `srt`: it ends with status 128 + the signal's
number, at any moment, and leaves nothing behind.

Python's own way is not enough. Its KeyboardInterrupt is raised wherever the program happens to be,
and inside an import that may be anywhere in NumPy, Torch or transformers: some of their code drops
it, some turns it into an ImportError, and a module that was imported by half stays broken. SIGTERM
and SIGHUP would end the process without a single `finally`.
"""

import atexit
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
# What is raised in these is printed and forgotten.
_SWALLOWING = frozenset({"__del__"})
_RETRY_SECONDS = 0.01
# A terminal that closes sends SIGHUP twice, `timeout` sends SIGTERM to the group and to the
# process: what comes this soon after the first is the same request to end, not an impatient one.
_SAME_SECONDS = 0.3


class Signals:
    """Handlers of the signals that end a process, and what they do at this moment.

    While a command works, a signal raises KeyboardInterrupt (SIGINT) or SystemExit (SIGTERM,
    SIGHUP) in the main thread, so that every `finally` runs; if a module is just being imported,
    as soon as it is. Before and after (see :meth:`working` and :meth:`importing`) there is nothing
    to clean up, and it ends the process where it is. So does a second signal, at any time.

    Nothing happens to signals before :meth:`install`.
    """

    def __init__(self) -> None:
        self._working = False
        self._received: int | None = None
        self._received_at = 0.0

    @property
    def status(self) -> int | None:
        """The exit status that a signal asked for; None if none came."""
        return None if self._received is None else 128 + self._received

    def install(self) -> None:
        """Takes the signals over, but those that the parent process made this one ignore, as
        `nohup` does. Those that wait are dealt with here: see :meth:`held`. Only the main thread
        may call it.
        """
        # Registered first, so run last: then Python forgets all handlers.
        atexit.register(_ignore)
        signal.signal(signal.SIGALRM, self._on_alarm)
        for signum in _ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, signals wait. A program that this process becomes inherits that: while its
        interpreter starts, Python's own handlers would print a traceback, so signals go on waiting
        until it calls :meth:`install`.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, signals raise: there may be something to clean up."""
        self._working = True
        try:
            yield
        finally:
            self._working = False

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Inside :meth:`working`: modules are loaded before the work itself, so that a signal ends
        the process without waiting for them.
        """
        before, self._working = self._working, False
        try:
            yield
        finally:
            self._working = before

    def handled(self) -> None:
        """Forgets a signal: the command has dealt with its exception and goes on, as a
        conversation does after Ctrl-C. The next one is a first one again.
        """
        self._received = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_first = self._received is None
        if not is_first and now - self._received_at < _SAME_SECONDS:
            return
        self._received, self._received_at = signum, now
        if is_first and self._working:
            self._raise(frame)
        else:
            _exit(128 + signum)

    def _on_alarm(self, _: int, frame: FrameType | None) -> None:
        if self._received is None:
            return
        if self._working:
            self._raise(frame)
        else:
            _exit(128 + self._received)

    def _raise(self, frame: FrameType | None) -> None:
        """Raises the exception, or comes back soon where nothing would pass it on."""
        if _is_swallowed(frame):
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)
        elif self._received == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(self.status)


def _is_swallowed(frame: FrameType | None) -> bool:
    """Whether an exception raised here may not reach the command: a module is being imported."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _IMPORT_SYSTEM or code.co_name in _SWALLOWING:
            return True
        frame = frame.f_back
    return False


def end_line() -> None:
    """Ends the line in which a terminal shows the `^C` that was typed."""
    if os.isatty(2):
        os.write(2, b"\n")


def _ignore() -> None:
    """From here on the status is what it is: nothing is left but to end."""
    for signum in _ENDING:
        signal.signal(signum, signal.SIG_IGN)


def _exit(status: int) -> None:
    """Ends the process here, without `finally` blocks."""
    end_line()
    os._exit(status)
