"""How much memory this process may use: the machine's, or less where a cgroup limits it.

Linux only: https://docs.kernel.org/filesystems/proc.html (meminfo, self/cgroup) and
https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max, memory.current, cpu.max). Where a
file is absent its answer is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemory:
    """Bytes of memory; None where the system does not tell.

    Attributes:
        total: physical memory of the machine.
        available: what new allocations can get without swapping, within the cgroup's limit.
        limit: the tightest cgroup limit, None if there is none.
    """

    total: int | None
    available: int | None
    limit: int | None


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Reads the memory facts; `root` is where `proc` and `sys` are mounted."""
    text = _read(root / "proc/meminfo") or ""
    meminfo = {k: int(v) << 10 for k, v in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    available = meminfo.get("MemAvailable")
    limit: int | None = None
    for directory in cgroup_directories(root):
        own_limit = _number(directory / "memory.max") or _number(
            directory / "memory.limit_in_bytes"
        )
        used = _number(directory / "memory.current") or _number(directory / "memory.usage_in_bytes")
        # Version 1 writes "no limit" as a number near 2^63.
        if own_limit is None or own_limit >= 1 << 62:
            continue
        limit = own_limit if limit is None else min(limit, own_limit)
        if available is not None and used is not None:
            available = min(available, max(0, own_limit - used + _reclaimable(directory)))
    return HostMemory(meminfo.get("MemTotal"), available, limit)


def read_cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the tightest cgroup allows, None without a limit."""
    quotas = []
    for directory in cgroup_directories(root):
        quota, _, period = (_read(directory / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            quotas.append(int(quota) / int(period))
        own_quota = _number(directory / "cpu.cfs_quota_us")
        own_period = _number(directory / "cpu.cfs_period_us")
        if own_quota is not None and own_period:
            quotas.append(own_quota / own_period)
    return min(quotas, default=None)


def cgroup_directories(root: Path = Path("/")) -> Iterator[Path]:
    """Directories of this process's cgroups and their parents, version 2 and version 1."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else [""]:
            if controller not in ("", "memory", "cpu"):
                continue
            top = root / "sys/fs/cgroup" / controller
            directory = top / path.strip("/")
            while True:
                if directory.is_dir():
                    yield directory
                if directory == top or top not in directory.parents:
                    break
                directory = directory.parent


def _reclaimable(directory: Path) -> int:
    """Bytes of file cache that count against the limit but give way under pressure."""
    text = _read(directory / "memory.stat") or ""
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _number(file: Path) -> int | None:
    text = (_read(file) or "").strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
