"""Room for work beside the directory that it will replace, which no killed process leaves behind.

A scratch directory `.srt-*.tmp` lies in the parent of its destination and holds

- `owner.json`: the destination's name. Its owner keeps it locked, so a free lock tells that the
  owner has ended, whatever process has its number by then;
- `new`: what is being written. All of it is the owner's;
- `swap`: `new` once it is complete, and after the exchange what it replaced;
- `old`: what is being replaced, on file systems that cannot exchange two directories;
- `remove.json`: the files of `swap` and `old` that may be deleted. What else is found there stays.

The next run in the same parent removes what a killed one left. It first puts `old` back if the
destination is gone, so that after a kill at any point the old or the new directory is there.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from srt.utils.files import exchange, sync, try_lock

logger = logging.getLogger(__name__)

_PREFIX, _SUFFIX = ".srt-", ".tmp"
_OWNER = "owner.json"
_REMOVE = "remove.json"
_TRIES = 100


class Scratch:
    """The scratch directory of a running process. Use `open_scratch`.

    Attributes:
        new: An empty directory to write to.
    """

    def __init__(self, path: Path, destination: Path) -> None:
        self._path = path
        self._destination = destination
        self.new = path / "new"
        self.new.mkdir()

    def move_to_destination(self) -> None:
        """Renames `new` to the destination, which is absent or an empty directory.

        Raises:
            OSError: The destination is something else by now.
        """
        self.new.rename(self._destination)
        sync(self._destination.parent)

    def exchange_with_destination(self, files: Iterable[str]) -> None:
        """Puts `new` in the destination's place.

        Args:
            files: Names in the destination that may be deleted afterwards.

        Raises:
            OSError: The system refuses it; the destination is as it was.
        """
        swap, old = self._path / "swap", self._path / "old"
        names = sorted({*files, *(file.name for file in self.new.iterdir())})
        (self._path / _REMOVE).write_text(json.dumps(names))
        sync(self._path / _REMOVE)
        self.new.rename(swap)
        sync(self._path)
        if not exchange(swap, self._destination):
            self._destination.rename(old)
            try:
                swap.rename(self._destination)
            except OSError:
                _put_back(old, self._destination)
                raise
        sync(self._destination.parent)


@contextmanager
def open_scratch(destination: Path) -> Iterator[Scratch]:
    """A scratch directory beside `destination`, removed at the end with all that may be deleted.

    Args:
        destination: A resolved path; its parent exists.

    Raises:
        OSError: It cannot be created.
    """
    path, owner = _create(destination)
    with owner:
        try:
            yield Scratch(path, destination)
        finally:
            _remove(path, destination)


def recover(parent: Path) -> set[str]:
    """Removes what killed runs left in `parent`, as far as that is certain.

    Returns:
        Names of the destinations that running processes write at this moment.
    """
    busy: set[str] = set()
    try:
        found = [path for path in parent.iterdir() if _is_scratch_name(path.name)]
    except OSError:  # cannot be listed; whether it can be written to is another question
        return busy
    for path in found:
        with suppress(OSError):
            name = _recover_one(path)
            if name is not None:
                busy.add(name)
    return busy


def _recover_one(path: Path) -> str | None:
    """Returns the destination's name if the owner is alive."""
    mode = path.lstat()
    if not stat.S_ISDIR(mode.st_mode) or mode.st_uid != os.geteuid():
        return None
    try:
        handle = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        path.rmdir()  # ended right after creating it, or right before removing it; else it fails
        return None
    with os.fdopen(handle, "r+") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        is_free = try_lock(stream)
        name = _read_owner(stream)
        if is_free is None:
            return None
        if not is_free:
            return name
        if name is not None:
            _remove(path, path.parent / name)
        elif {entry.name for entry in path.iterdir()} == {_OWNER}:
            (path / _OWNER).unlink()  # ended before it had written anything
            path.rmdir()
    return None


def _is_scratch_name(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def _create(destination: Path) -> tuple[Path, IO[str]]:
    for _ in range(_TRIES):
        path = destination.parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        path.mkdir(mode=0o700)
        # Between any two of these steps another process may take it for a dead one's and remove it.
        try:
            stream = (path / _OWNER).open("x")
        except FileNotFoundError:
            continue
        if try_lock(stream) is not False and _is_there(path / _OWNER, stream):
            json.dump({"destination": destination.name}, stream)
            stream.flush()
            return path, stream
        stream.close()
    raise OSError(f"cannot keep a scratch directory in {destination.parent}")


def _is_there(file: Path, stream: IO[str]) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def _read_owner(stream: IO[str]) -> str | None:
    content = _parse(stream.read())
    name = content.get("destination") if isinstance(content, dict) else None
    return name if _is_plain_name(name) else None


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _put_back(old: Path, destination: Path) -> None:
    """Undoes the first of the two renames that replace a directory without an exchange."""
    if old.exists() and not os.path.lexists(destination):
        old.rename(destination)


def _remove(path: Path, destination: Path) -> None:
    """Removes a scratch directory whose lock is held, and from what was replaced only the files
    that are listed.
    """
    old, lists = path / "old", path / _REMOVE
    _put_back(old, destination)
    if not (path / "new").is_symlink():
        shutil.rmtree(path / "new", ignore_errors=True)
    content = _parse(lists.read_text()) if lists.is_file() else None
    names = [name for name in content or () if _is_plain_name(name)]
    for directory in (path / "swap", old):
        if directory.is_symlink() or not directory.is_dir():
            continue
        for name in names:
            (directory / name).unlink(missing_ok=True)
        try:
            directory.rmdir()
        except OSError:
            left = sorted(entry.name for entry in directory.iterdir())
            logger.warning("%s: kept in %s: %s", destination, directory, ", ".join(left))
            return
    lists.unlink(missing_ok=True)
    (path / _OWNER).unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()
