"""The one way in which a checkpoint's small files are read: nothing but regular files, none larger
than its kind can be, and none whose JSON is nested beyond reason.

A checkpoint comes from outside. What lies where a file should be may be a pipe, on which reading
waits for ever, a device without an end, or gigabytes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from srt.errors import CheckpointError, SrtError

# Bytes. Ten times and more what the largest public checkpoints have.
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 128 << 20
MAX_TEMPLATE_BYTES = 2 << 20
MAX_TOKENIZER_BYTES = 512 << 20
# Objects and lists inside one another; real files have less than ten.
MAX_JSON_DEPTH = 64

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def describe(path: Path) -> str:
    """What lies at `path`, in words: `a file`, `a named pipe`, `nothing` ..."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link to nothing" if path.is_symlink() else "nothing"
    return _describe_mode(mode)


def _describe_mode(mode: int) -> str:
    return next((words for is_kind, words in _KINDS if is_kind(mode)), "a file")


def lies_there(path: Path) -> bool:
    """Whether anything is at `path`: a file, or what :func:`open_regular` then refuses by name, so
    that a pipe or a link to nothing is not taken for a file that is not there.
    """
    return os.path.lexists(path)


def open_regular(file: Path, max_bytes: int | None = None) -> BinaryIO:
    """Opens a regular file for reading, without waiting for whatever else may be there.

    Raises:
        CheckpointError: It is missing, something else than a regular file, cannot be read, or is
            larger than `max_bytes`.
    """
    try:
        # Opening some devices does something, and opening a pipe waits for a writer.
        _check_kind(file, file.stat())
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(file, flags)
    except FileNotFoundError:
        raise CheckpointError("no such file", file=file, found=_dangling(file)) from None
    except OSError as error:
        raise CheckpointError("cannot read file", file=file, found=error.strerror) from error
    stream = os.fdopen(descriptor, "rb")
    try:
        status = os.fstat(descriptor)
        _check_kind(file, status)
        if max_bytes is not None and status.st_size > max_bytes:
            raise CheckpointError(
                "file is too large for what it is",
                file=file,
                expected=f"at most {max_bytes:,} bytes",
                found=f"{status.st_size:,} bytes",
            )
    except BaseException:
        stream.close()
        raise
    return stream


def check_regular(file: Path, max_bytes: int | None = None) -> None:
    """Raises CheckpointError, like :func:`open_regular`, unless the file can be read as one."""
    open_regular(file, max_bytes).close()


def _check_kind(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            "not a regular file",
            file=file,
            expected="a file",
            found=_describe_mode(status.st_mode),
        )


def _dangling(file: Path) -> str | None:
    """Of a Hub cache that has lost a blob, or a copy that left the target behind."""
    return f"a link to {os.readlink(file)}, which is not there" if file.is_symlink() else None


def read_bytes(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Content of a regular file.

    Raises:
        CheckpointError: As :func:`open_regular`, or it grows while it is read.
    """
    with open_regular(file, max_bytes) as stream:
        try:
            content = stream.read(max_bytes + 1)
        except OSError as error:
            raise CheckpointError("cannot read file", file=file, found=error.strerror) from error
    if len(content) > max_bytes:
        raise CheckpointError("file grows while it is read", file=file)
    return content


def read_text(file: Path, max_bytes: int = MAX_TEMPLATE_BYTES) -> str:
    """Content of a UTF-8 file, line ends as in Python.

    Raises:
        CheckpointError: As :func:`read_bytes`, or it is not UTF-8.
    """
    try:
        text = read_bytes(file, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError("not UTF-8 text", file=file, found=error) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_object(content: bytes, file: Path) -> dict[str, Any]:
    """`content`, read from `file`, as a JSON object.

    Raises:
        CheckpointError: It is not JSON, is nested too deeply, or is something else than an object.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as error:
        raise CheckpointError("cannot read JSON", file=file, found=error) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            "not a JSON object", file=file, expected="{...}", found=type(value).__name__
        )
    _check_depth(value, file)
    return value


def read_json(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Raises:
        CheckpointError: As :func:`read_bytes` and :func:`parse_object`.
    """
    return parse_object(read_bytes(file, max_bytes), file)


def _check_depth(value: dict[str, Any], file: Path) -> None:
    """Whoever walks the value later, here or in a library, does so by recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise _too_deep(file)


def _too_deep(file: Path) -> CheckpointError:
    return CheckpointError(
        "JSON is nested too deeply", file=file, expected=f"at most {MAX_JSON_DEPTH} levels"
    )


@contextmanager
def blaming(problem: str, file: Path) -> Iterator[None]:
    """Turns what `file` provokes in a library, or in code that builds on its values, into a
    CheckpointError that names it. Errors of this package pass, and so does what is no error.

    Libraries in Rust raise plain Exception, and for a panic something that is not even that.
    """
    try:
        yield
    except (SrtError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(problem, file=file, found=explain(error)) from error


def explain(error: BaseException) -> str:
    """One line: what the error says, and its type where its text says little without."""
    text = " ".join(str(error).split())
    if isinstance(error, (OSError, ValueError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
