"""A server of ours for the time of a measurement."""

import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from srt.errors import SrtError

_READY = re.compile(r"srt: serving .* at (https?://\S+) \(")
_END_SECONDS = 60


@contextmanager
def own_server(options: Sequence[str], start_seconds: float = 600) -> Iterator[tuple[str, str]]:
    """Starts `srt serve` on a free port and ends it afterwards.

    Args:
        options: Of `srt serve`, with its model.
        start_seconds: How long it may take to start.

    Yields:
        Its URL, and the line in which it says what it serves.

    Raises:
        SrtError: It has not started; the message is its own.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "srt", "serve", "--port", "0", "--quiet", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    try:
        yield _await_url(lines, start_seconds)
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    """Hands the lines on until one says the address; those after it are read and forgotten, so that
    the server never waits for a reader.
    """
    assert process.stdout is not None
    is_ready = False
    for line in process.stdout:
        if not is_ready:
            lines.put(line.rstrip("\n"))
            is_ready = _READY.match(line) is not None
    lines.put(None)


def _await_url(lines: "queue.Queue[str | None]", seconds: float) -> tuple[str, str]:
    said: list[str] = []
    while True:
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            raise SrtError(f"the server has not started within {seconds:g} s") from None
        if line is None:
            reason = said[-1] if said else "it said nothing"
            raise SrtError(f"the server has not started: {reason.removeprefix('srt: error: ')}")
        said.append(line)
        match = _READY.match(line)
        if match:
            return match[1], line.removeprefix("srt: serving ")
