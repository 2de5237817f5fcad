"""Text between the process and what it was started with: arguments, stdin, stdout and stderr, none
of which need be open, or in an encoding that knows all characters.
"""

import io
import os
import sys
from typing import TextIO

from srt.control_characters import escape_controls
from srt.errors import RequestError, SrtError


def prepare_streams() -> None:
    """Lets stdout and stderr write all that their encodings can, and the rest as escapes of
    backslash and number.

    Raises:
        SrtError: stdout is closed.
    """
    _occupy_standard_descriptors()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as we live
    if sys.stdout is None:
        raise SrtError("stdout is closed, and there is no other place to write to")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _occupy_standard_descriptors() -> None:
    """Opens those of 0, 1 and 2 that are closed: the next file, perhaps a checkpoint, would
    otherwise take their place, and messages of libraries would be written into it.
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return


def read_argument(name: str, text: str) -> str:
    """An argument as the user typed it: what the locale's encoding does not know is UTF-8.

    Raises:
        RequestError: It is not UTF-8; the message calls it `name`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # Python has put a lone surrogate for each byte that the locale's encoding does not know.
        return _decode(name, os.fsencode(text))
    return text


def read_stdin(name: str) -> str:
    """All of stdin, which is UTF-8 in any locale.

    Raises:
        RequestError: It is closed, cannot be read, or is not UTF-8; the message calls it `name`.
    """
    stream: TextIO | None = sys.stdin
    if stream is None:
        raise RequestError(f"{name} cannot be read: stdin is closed")
    try:
        buffer = getattr(stream, "buffer", None)
        return stream.read() if buffer is None else _decode(name, buffer.read())
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error}") from error


def read_stdin_line(name: str) -> str:
    """The next line of stdin, which is UTF-8 in any locale; empty at the end, or if it is closed.

    Raises:
        RequestError: It cannot be read, or is not UTF-8; the message calls it `name`.
    """
    stream: TextIO | None = sys.stdin
    if stream is None:
        return ""
    try:
        buffer = getattr(stream, "buffer", None)
        return stream.readline() if buffer is None else _decode(name, buffer.readline())
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error}") from error


def write_answer(text: str) -> None:
    """Writes what a model says to stdout, at once: as it is, but to a terminal with control
    characters as escapes, so that a model cannot steer it.
    """
    sys.stdout.write(escape_controls(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise RequestError(
            f"{name} is not UTF-8: byte 0x{byte:02x} at position {error.start}"
        ) from None


def abandon_stdout() -> None:
    """Lets stdout write to nowhere, after an error: Python would complain once more when it flushes
    it at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
