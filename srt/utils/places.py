"""Where a path really lies: through links, mounts of the same directory in two places, and file
systems that ignore case.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")


class _Mount(NamedTuple):
    """A line of mountinfo: the file system's device, which of its directories is mounted, where."""

    device: str
    root: str
    point: str


def contains(outer: str | Path, inner: str | Path) -> bool:
    """Whether `inner` is `outer` or lies in it. Neither has to exist."""
    outer, inner = os.path.realpath(outer), os.path.realpath(inner)
    if _is_below(inner, outer):
        return True
    identity = _identity(outer)
    if identity is not None:
        place = Path(inner)
        if any(_identity(path) == identity for path in (place, *place.parents)):
            return True
    # A directory that is mounted elsewhere has another parent there, which the device's own tree
    # has not.
    mounts = _read_mounts()
    a, b = _find_on_device(outer, mounts), _find_on_device(inner, mounts)
    return a is not None and b is not None and a[0] == b[0] and _is_below(b[1], a[1])


def is_mount_point(path: str | Path) -> bool:
    """Whether something is mounted there, also a directory of the same file system."""
    path = os.path.realpath(path)
    return os.path.ismount(path) or any(mount.point == path for mount in _read_mounts())


def _is_below(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _identity(path: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _find_on_device(path: str, mounts: list[_Mount]) -> tuple[str, str] | None:
    """(device, path in its own tree) of a resolved path."""
    above = [mount for mount in mounts if _is_below(path, mount.point)]
    if not above:
        return None
    # Of two mounts on one point the later one is seen.
    mount = max(reversed(above), key=lambda mount: len(mount.point))
    rest = path[len(mount.point) :].lstrip("/")
    return mount.device, f"{mount.root.rstrip('/')}/{rest}".rstrip("/") or "/"


def _read_mounts() -> list[_Mount]:
    """All mounts that this process sees; empty where the system does not tell."""
    try:
        lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
    except OSError:
        return []
    fields = [line.split(" ") for line in lines]
    return [_Mount(f[2], _unescape(f[3]), _unescape(f[4])) for f in fields if len(f) > 4]


def _unescape(text: str) -> str:
    """Undoes mountinfo's octal escapes of blanks, which apply to bytes."""
    raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), os.fsencode(text))
    return os.fsdecode(raw)
