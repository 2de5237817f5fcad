"""Steps on files that others build on: replacing one at once, exchanging two, errors in words.

What is to replace something is written beside it and renamed, so that at any moment either the old
or the new is there, whole.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

from srt.errors import SrtError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# A file system, or a kernel or C library, that cannot exchange two paths.
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
# A file system without locks.
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_DIGEST_BYTES = 8 << 20


@contextmanager
def os_errors_explained(what: str) -> Iterator[None]:
    """Turns what the operating system refuses into one line: "`what`: No space left on device".

    Raises:
        SrtError: An OSError was raised inside.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if name]
        where = f" ({' -> '.join(map(_shorten, names))})" if names else ""
        raise SrtError(f"{_shorten(what)}: {reason}{where}") from error


def _shorten(text: str) -> str:
    """A path can be longer than an error, whose end is what says what is wrong with it."""
    return text if len(text) <= 400 else f"{text[:300]} ... {text[-50:]}"


def try_lock(stream: IO[str]) -> bool | None:
    """Takes the lock of an open file without waiting; it is released when the file is closed.

    Returns:
        Whether it was free; None if the file system has no locks.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _CANNOT_LOCK:
            return None
        raise
    return True


def exchange(first: Path, second: Path) -> bool:
    """Exchanges two paths of one file system in one step.

    Returns:
        False if system or file system cannot do that; nothing has changed then.

    Raises:
        OSError: It was refused for another reason.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (os.fsencode(first), os.fsencode(second))
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def sync(path: Path) -> None:
    """Has the content of a file, or the entries of a directory, on the disk when it returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot do this with a directory.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(handle)


def digest_file(file: Path) -> str:
    """XXH3 hash (128 bits, 32 hexadecimal digits) of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while data := stream.read(_DIGEST_BYTES):
            hasher.update(data)
    return hasher.hexdigest()


@contextmanager
def replacing_file(file: str | Path) -> Iterator[Path]:
    """A path to write to, beside `file` and with its suffix; it becomes `file` at the end, or
    vanishes after an error. A link is followed; what is no regular file (a pipe, a device) is
    written to directly.

    What a killed run of the same target left is removed.

    Raises:
        SrtError: The operating system refuses something.
    """
    with os_errors_explained(f"cannot write {file}"):
        target = Path(os.path.realpath(file))
        mode = _mode(Path(file))
        if mode is not None and stat.S_ISDIR(mode):
            raise SrtError(f"cannot write {file}: it is a directory")
        if mode is not None and not stat.S_ISREG(mode):
            yield Path(file)
            return
        # The name tells the target, and has the same length whatever the target's is.
        stem = f".srt-{xxhash.xxh3_64_hexdigest(os.fsencode(target.name))}"
        for left in target.parent.glob(f"{stem}-*"):
            with suppress(OSError), left.open("r") as stream:
                if try_lock(stream):
                    left.unlink()
        scratch = target.parent / f"{stem}-{secrets.token_hex(8)}{target.suffix[:16]}"
        with scratch.open("w") as stream:
            try_lock(stream)
            try:
                yield scratch
                if mode is not None:
                    scratch.chmod(stat.S_IMODE(mode))
                sync(scratch)
                scratch.replace(target)
            except BaseException:
                scratch.unlink(missing_ok=True)
                raise
        sync(target.parent)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def write_text(file: str | Path, text: str) -> None:
    """Replaces the content of a file by `text` in UTF-8, at once.

    Raises:
        SrtError: The operating system refuses something.
    """
    with replacing_file(file) as scratch:
        scratch.write_text(text, encoding="utf-8")
