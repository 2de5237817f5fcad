"""Memory of this process and of the machine, in bytes."""

import resource
import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# Directory, limit, usage and the statistic of reclaimable file pages, which count as used, of the control group that a
# container sees as its root; version 2, then version 1.
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def peak_rss() -> int:
    """Largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int | None:
    """Memory that can still be used, within the container's limit; None where the system does not tell."""
    candidates = []
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                candidates.append(int(line.split()[1]) * 1024)
    for directory, limit_name, usage_name, reclaimable_name in _CGROUPS:
        files = [directory / name for name in (limit_name, usage_name, "memory.stat")]
        if all(file.exists() for file in files):
            limit, usage, statistics = (file.read_text() for file in files)
            if limit.strip().isdigit():
                reclaimable = dict(line.split() for line in statistics.splitlines())[reclaimable_name]
                candidates.append(max(0, int(limit) - int(usage) + int(reclaimable)))
    return min(candidates, default=None)
