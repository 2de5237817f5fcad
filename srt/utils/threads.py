"""How many threads compute, and on which CPUs and NUMA nodes: the one place that decides it.

One thread a physical core of the CPUs that this process may use, no more than a cgroup's quota
pays for. Decoding waits for memory, which a core's second hardware thread shares with the first, so
more threads only get in each other's way. A user's choice (an option, OMP_NUM_THREADS) wins.

Linux only: /sys/devices/system/cpu/cpu*/topology and /sys/devices/system/node
(https://docs.kernel.org/admin-guide/cputopology.html), set_mempolicy(2).
"""

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from srt.utils.host_memory import read_cpu_quota

logger = logging.getLogger(__name__)

MAX_THREADS = 8192
"""Linux can be built for so many CPUs; with many times as many threads a process dies."""

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_INTERLEAVE = 3


@dataclass(frozen=True)
class ThreadPlan:
    """What to use.

    Attributes:
        threads: Threads of Torch's operators and the kernels.
        cpus: CPUs to run on; None leaves the process where it may run now.
        nodes: NUMA nodes to spread memory over; empty leaves the system's policy, which puts memory
            where it is first touched.
        reason: Why this many threads.
    """

    threads: int
    cpus: frozenset[int] | None
    nodes: tuple[int, ...]
    reason: str


def plan_threads(
    requested: int | None,
    *,
    affinity: Iterable[int] | None = None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> ThreadPlan:
    """The policy.

    Args:
        requested: The user's number, or None.
        affinity: CPUs that the process may use; None asks the system.
        environ: Environment variables; OMP_NUM_THREADS counts.
        root: Where `sys` and `proc` are mounted.
    """
    allowed = set(_affinity() if affinity is None else affinity)
    cores = _physical_cores(allowed, root)
    nodes = _nodes(allowed, root)
    # Weights are loaded by one thread but read by all: on several nodes they are spread over them.
    spread = nodes if len(nodes) > 1 else ()
    omp = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if requested is not None:
        return ThreadPlan(requested, None, spread, "as asked for")
    # Anything else is ignored, as OpenMP does.
    if omp.isdecimal() and len(omp) < 10 and 0 < int(omp) <= MAX_THREADS:
        return ThreadPlan(int(omp), None, spread, "OMP_NUM_THREADS")
    count, reason = len(cores), f"{len(cores)} physical cores in the affinity mask"
    quota = read_cpu_quota(root)
    if quota is not None and quota < count:
        count = max(1, int(quota))
        reason = f"a cgroup quota of {quota:g} CPUs"
    # With hardware threads to spare, the scheduler could put two of ours onto one core.
    cpus = frozenset(core[0] for core in cores)
    return ThreadPlan(count, cpus if len(cpus) < len(allowed) else None, spread, reason)


def apply_thread_plan(
    plan: ThreadPlan,
    *,
    set_affinity: Callable[[int, Iterable[int]], None] | None = None,
    set_interleave: Callable[[Iterable[int]], None] | None = None,
) -> None:
    """Sets threads, CPUs and memory policy of this process; what the system refuses is logged.

    Args:
        plan: What to use. Threads that exist already keep their CPUs.
        set_affinity: `os.sched_setaffinity` or what stands for it in a test.
        set_interleave: Spreads further memory over NUMA nodes; raises OSError if it cannot.
    """
    import torch  # here, so that planning is possible without it

    torch.set_num_threads(plan.threads)
    logger.info("%d threads: %s", plan.threads, plan.reason)
    allowed = len(set(_affinity()))
    if plan.threads > allowed:
        logger.warning(
            "%d threads (%s) on %d CPUs: they take turns, which is much slower than %d threads",
            plan.threads,
            plan.reason,
            allowed,
            allowed,
        )
    if plan.cpus is not None:
        try:
            (set_affinity or os.sched_setaffinity)(0, plan.cpus)
        except OSError as error:
            logger.warning("cannot restrict the process to CPUs %s: %s", sorted(plan.cpus), error)
    if plan.nodes:
        try:
            (set_interleave or interleave_memory)(plan.nodes)
        except OSError as error:
            logger.warning(
                "cannot spread memory over NUMA nodes %s: %s; numactl --interleave=all may",
                list(plan.nodes),
                error,
            )


def interleave_memory(nodes: Iterable[int]) -> None:
    """Spreads the memory that this thread and its children touch from now on over NUMA nodes.

    Raises:
        OSError: The system refuses, as containers often do, or has no such call.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"set_mempolicy is not known on {platform.machine()}")
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    bits = 8 * ctypes.sizeof(mask)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    if libc.syscall(number, _MPOL_INTERLEAVE, ctypes.byref(mask), bits + 1) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8` as [0, 1, 2, 3, 8], the kernel's notation."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _affinity() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _physical_cores(allowed: set[int], root: Path) -> list[list[int]]:
    """The allowed CPUs by the core that they belong to; each CPU is a core where the system does
    not tell.
    """
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        cores.setdefault(tuple(parse_cpu_list(siblings or str(cpu))), []).append(cpu)
    return list(cores.values())


def _nodes(allowed: set[int], root: Path) -> tuple[int, ...]:
    """NUMA nodes of the allowed CPUs."""
    nodes = []
    for directory in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _read(directory / "cpulist")
        if cpus is not None and allowed.intersection(parse_cpu_list(cpus)):
            nodes.append(int(directory.name.removeprefix("node")))
    return tuple(sorted(nodes))


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
