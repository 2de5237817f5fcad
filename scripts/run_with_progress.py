"""Runs a build and shows how far it is.

usage: python run_with_progress.py COMMAND [ARGUMENT ...]

The command's output is kept back, and shown if it fails, without the lines in which ninja counts
(`[12/90] ...`). What they say is shown meanwhile: on a terminal in one line that changes, elsewhere
in a line every half minute. The exit status is the command's. Needs nothing but the standard
library.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from typing import TextIO

_COUNT = re.compile(r"\[\s*(\d+)/(\d+)\]")
_SECONDS_BETWEEN_LINES = 30.0


class ProgressLine:
    """The line that says how far a build is.

    Args:
        stream: Where it goes.
        interval: Seconds between two lines where the stream is not a terminal.
    """

    def __init__(self, stream: TextIO, interval: float = _SECONDS_BETWEEN_LINES) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()
        self._interval = 0.2 if self._rewrites else interval
        self._begin = self._shown_at = time.monotonic()
        self._width = 0

    def show(self, done: int, total: int) -> None:
        """Says it if the last time is long enough ago."""
        now = time.monotonic()
        if now - self._shown_at < self._interval:
            return
        self._shown_at = now
        text = f"    {done} of {total} steps, {now - self._begin:.0f} s"
        if self._rewrites:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Leaves the terminal as it was."""
        if self._rewrites and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()


def run(command: list[str], progress: ProgressLine) -> int:
    """Runs `command`; returns its exit status."""
    output: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                count = _COUNT.search(line)
                if count is None:
                    output.append(line)
                else:
                    progress.show(int(count[1]), int(count[2]))
        finally:
            progress.clear()
    if process.returncode != 0:
        sys.stderr.writelines(output)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main(arguments: list[str]) -> int:
    """The command line."""
    if not arguments:
        print("usage: run_with_progress.py COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    try:
        return run(arguments, ProgressLine(sys.stderr))
    except KeyboardInterrupt:  # the command has got the signal, too
        return 130
    except OSError as error:
        print(f"error: {arguments[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
