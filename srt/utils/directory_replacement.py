"""Writes a directory of files that appears at its place when it is complete, and replaces only
what was written that way before.

The directory holds a manifest with size and hash of each of its files. A later run deletes what the
manifest of the old directory names and its hash confirms. Anything else that is found there, a file
of the user's or one that was edited, makes it refuse before it does anything.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from srt.errors import SrtError
from srt.utils.files import digest_file, os_errors_explained, sync
from srt.utils.places import contains, is_mount_point
from srt.utils.scratch import open_scratch, recover

MANIFEST_FILE = "srt_manifest.json"
_FORMAT = 1
# Room for headers, configuration and tokenizer when the free disk space is checked.
_DISK_RESERVE = 64 << 20
# Names that an error shows.
_SHOWN = 5

_Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class Destination:
    """A directory that may be written.

    Attributes:
        shown: The path as the user spells it.
        path: The same without links.
        old: Files of the directory that will be replaced, with what tells whether they are still
            the same; None if there is no such directory, or an empty one.
    """

    shown: Path
    path: Path
    old: Mapping[str, _Identity] | None


def check_destination(
    destination: str | Path, *, overwrite: bool = False, sources: Iterable[Path] = ()
) -> Destination:
    """Finds out whether `destination` can be written, from what costs no time.

    Puts right what a killed run left beside it.

    Args:
        destination: A directory to create, an empty one, or one to replace. Links are followed.
        overwrite: Replace a directory that an earlier run wrote.
        sources: What the result is made from: the destination neither is one of these, nor lies in
            one, nor holds one.

    Raises:
        SrtError: It cannot be written, or something would be lost.
    """
    shown = Path(destination)
    with os_errors_explained(f"cannot write {shown}"):
        path = Path(os.path.realpath(shown))
        _check_overlap(shown, path, sources)
        if not path.parent.is_dir():
            raise SrtError(f"destination {shown}: its parent directory does not exist")
        if path.name in recover(path.parent):
            raise SrtError(f"destination {shown} is being written by another process")
        if not os.path.lexists(path):
            _check_parent(shown, path)
            return Destination(shown, path, None)
        if not path.is_dir():
            raise SrtError(f"destination {shown} exists and is not a directory")
        if is_mount_point(path):
            raise SrtError(
                f"destination {shown} is a mount point, which cannot be replaced; "
                "name a directory in it"
            )
        if _holds_working_directory(path):
            raise SrtError(
                f"destination {shown} is or holds the current directory, which cannot be replaced; "
                "start from another one, or name a directory in it"
            )
        _check_parent(shown, path)
        names = sorted(entry.name for entry in path.iterdir())
        if not names:
            return Destination(shown, path, None)
        if not overwrite:
            raise SrtError(f"destination {shown} is not empty; --overwrite replaces it")
        return Destination(shown, path, _find_replaceable(shown, path, names))


@contextmanager
def replacing_directory(
    destination: str | Path,
    *,
    overwrite: bool = False,
    sources: Iterable[Path] = (),
    nbytes: int = 0,
) -> Iterator[Path]:
    """A directory to write files to. It becomes `destination` at the end, with a manifest, or
    vanishes after an error. A kill at any moment leaves the old or the new one, and the next run in
    the same parent removes the rest.

    Args:
        destination: As of `check_destination`, as are `overwrite` and `sources`.
        nbytes: Bytes that are going to be written.

    Raises:
        SrtError: The destination cannot be written, the disk has not enough space, or the operating
            system refuses a step.
    """
    place = check_destination(destination, overwrite=overwrite, sources=sources)
    with os_errors_explained(f"{destination} is not written"):
        if place.old is not None:
            _check_content(place)
        free = shutil.disk_usage(place.path.parent).free
        if free < nbytes + _DISK_RESERVE:
            raise SrtError(
                f"not enough disk space for {destination}: needs {nbytes + _DISK_RESERVE:,} bytes, "
                f"{free:,} are free"
            )
        with open_scratch(place.path) as scratch:
            yield scratch.new
            _write_manifest(scratch.new)
            for file in scratch.new.iterdir():
                sync(file)
            sync(scratch.new)
            if place.path.is_dir():
                # Without the owner's rights it could not be moved.
                scratch.new.chmod(stat.S_IMODE(place.path.stat().st_mode) | stat.S_IRWXU)
            if place.old is None:
                scratch.move_to_destination()
            else:
                _check_unchanged(place)
                scratch.exchange_with_destination(place.old)


def _check_overlap(shown: Path, path: Path, sources: Iterable[Path]) -> None:
    for source in sources:
        if contains(source, path) and contains(path, source):
            raise SrtError(f"source and destination are the same directory: {source}")
        if contains(source, path):
            raise SrtError(f"destination {shown} lies in the source {source}")
        if contains(path, source):
            raise SrtError(f"destination {shown} holds the source {source}")


def _check_parent(shown: Path, path: Path) -> None:
    parent = path.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SrtError(f"destination {shown}: no permission to write to {parent}")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise SrtError(f"destination {shown}: no permission to read and write it")
    info = parent.stat()
    if info.st_mode & stat.S_ISVTX and path.exists():
        owners = (0, info.st_uid, path.stat().st_uid)
        if os.geteuid() not in owners:
            raise SrtError(f"destination {shown} belongs to another user and cannot be replaced")


def _holds_working_directory(path: Path) -> bool:
    try:
        return contains(path, Path.cwd())
    except OSError:  # it has been deleted
        return False


def _find_replaceable(shown: Path, path: Path, names: list[str]) -> dict[str, _Identity]:
    """Identities of the files that may be deleted, which are all that there is."""
    manifest = _read_manifest(path)
    if manifest is None:
        raise SrtError(
            f"destination {shown} was not written by this program (it has no {MANIFEST_FILE}), so "
            f"--overwrite does not replace it; it holds {_list(names)}"
        )
    foreign = [name for name in names if name not in manifest and name != MANIFEST_FILE]
    if foreign:
        raise SrtError(
            f"destination {shown} holds what --overwrite does not delete, since no earlier run "
            f"wrote it: {_list(foreign)}"
        )
    found = {name: _identify(path / name) for name in names}
    changed = [
        name
        for name, identity in found.items()
        if identity is None or (name in manifest and identity[0] != manifest[name][0])
    ]
    if changed:
        raise _changed(shown, changed)
    return {name: identity for name, identity in found.items() if identity is not None}


def _check_content(place: Destination) -> None:
    """Raises SrtError if a file is not the one that was written."""
    manifest = _read_manifest(place.path) or {}
    changed = [
        name
        for name in place.old or ()
        if name != MANIFEST_FILE
        and (name not in manifest or digest_file(place.path / name) != manifest[name][1])
    ]
    if changed:
        raise _changed(place.shown, changed)


def _check_unchanged(place: Destination) -> None:
    names = {entry.name for entry in place.path.iterdir()}
    old = place.old or {}
    changed = [
        name for name in sorted({*names, *old}) if old.get(name) != _identify(place.path / name)
    ]
    if changed:
        raise SrtError(
            f"destination {place.shown} has changed meanwhile and is left as it is: "
            f"{_list(changed)}"
        )


def _changed(shown: Path, names: list[str]) -> SrtError:
    return SrtError(
        f"destination {shown} holds files that were changed after they were written, which "
        f"--overwrite does not delete: {_list(names)}"
    )


def _identify(file: Path) -> _Identity | None:
    """Size, time, time of the last change, inode; None unless it is a regular file."""
    try:
        info = file.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def _write_manifest(directory: Path) -> None:
    files = {
        file.name: {"size": file.stat().st_size, "xxh3_128": digest_file(file)}
        for file in sorted(directory.iterdir())
    }
    content = {"format": _FORMAT, "files": files}
    (directory / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _read_manifest(directory: Path) -> dict[str, tuple[int, str]] | None:
    """(size, hash) of each file; None if there is no manifest, or not one of ours."""
    file = directory / MANIFEST_FILE
    if _identify(file) is None:
        return None
    try:
        content = json.loads(file.read_bytes())
        if content["format"] != _FORMAT:
            return None
        return {
            name: (entry["size"], entry["xxh3_128"]) for name, entry in content["files"].items()
        }
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
