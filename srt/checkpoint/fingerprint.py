"""Tells whether files, and bytes in memory, are still what they were.

Bytes are hashed with XXH3 (128 bits, https://xxhash.com), which runs at the speed of memory:
it finds damage and change, and makes no promise against someone who wants to forge a match.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import xxhash

_SAMPLES = 64
_SAMPLE_BYTES = 4096
# Longer than the tick of any file system's clock.
_RACY_NS = 2_000_000_000


def digest_bytes(data: bytes | memoryview) -> str:
    """Hash of a buffer, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def identify_files(files: Iterable[Path]) -> dict[str, list[int | str]]:
    """What tells cheaply whether files are still the same, by file name, ready for JSON.

    Size, times and inode, of which no program can set the time of the last change (`st_ctime`),
    and a hash of blocks spread over the file, for file systems that make these up.
    """
    identities: dict[str, list[int | str]] = {}
    for file in files:
        with file.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            hasher = xxhash.xxh3_128()
            last = max(0, stat.st_size - _SAMPLE_BYTES)
            for i in range(_SAMPLES):
                stream.seek(last * i // (_SAMPLES - 1))
                hasher.update(stream.read(_SAMPLE_BYTES))
        times = [stat.st_mtime_ns, stat.st_ctime_ns]
        identities[file.name] = [stat.st_size, *times, stat.st_ino, hasher.hexdigest()]
    return identities


def are_settled(files: Iterable[Path]) -> bool:
    """Whether a change of the files from now on would show in `identify_files`; not so if one was
    changed within the last tick of its file system's clock.
    """
    latest = max(file.stat().st_ctime_ns for file in files)
    return latest < time.time_ns() - _RACY_NS
