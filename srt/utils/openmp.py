"""How OpenMP threads wait between the parallel regions of Torch and the kernels."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

# Turns of GNU OpenMP's waiting loop before a thread sleeps: some microseconds.
_SPIN_COUNT = "1000"
_USER_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# The load is looked at this often, and the lowest counts: what runs for a moment does not disturb.
_SAMPLES = 3
_SAMPLE_SECONDS = 0.002


def spin_limit(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Variables with which waiting threads sleep soon, where something else uses the machine; none
    where it is idle, or where the user has set how threads wait.

    By default GNU OpenMP spins for milliseconds, which is right on an idle machine: a thread that
    sleeps takes some 60 us to wake up, for each of the hundreds of operators of a token, and
    decoding is up to three times slower. Next to a busy process it is wrong: a spinning thread
    takes the core that the thread it waits for needs, every parallel region costs a time slice of
    the scheduler, and decoding is ten times slower.

    Args:
        environ: The process's environment.
        root: Where `proc` is mounted.
    """
    if any(name in environ for name in _USER_SETTINGS) or not is_machine_busy(root):
        return {}
    return {"GOMP_SPINCOUNT": _SPIN_COUNT}


def spin_limit_beside_server(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for an engine next to which a server and its clients work: threads that wait sleep
    soon; none where the user has set how they wait.

    Whether the machine is busy cannot be seen when the engine starts, since the requests that will
    make it so come later. To wake a thread costs some 50 us for a token that is decoded in one
    parallel region, to spin on a busy machine ten times the token.

    Args:
        environ: The environment that the engine's process would inherit.
    """
    if any(name in environ for name in _USER_SETTINGS):
        return {}
    return {"GOMP_SPINCOUNT": _SPIN_COUNT}


def restart_with_spin_limit() -> None:
    """Starts the program of this process over in an environment with `spin_limit`; returns if there
    is none to set, or if Torch is loaded: then another program is at work, which calls the command.

    OpenMP reads the environment once, when it is loaded with Torch, and has no function for it. So
    a process whose environment lacks the limit must become another one, before it has done
    anything: that costs the start of an interpreter, some 40 ms, and the environment of a process
    stays what its user made it. A program that came through stdin or a pipe is not there to be
    started again.
    """
    limit = {} if "torch" in sys.modules else spin_limit(os.environ)
    if limit and sys.executable and _can_be_read_again(sys.argv[0]):
        # Where the system refuses, threads spin, and that is all.
        with contextlib.suppress(OSError):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | limit)


def _can_be_read_again(program: str) -> bool:
    """Whether the program of this name in `sys.argv` is still there for another interpreter."""
    return program not in ("", "-") and not Path(program).is_fifo()


def warn_of_spinning() -> None:
    """Says what the environment lacks, where it is too late to start over."""
    for name, value in spin_limit(os.environ).items():
        logger.warning(
            "other processes keep this machine busy, and OpenMP's waiting threads take CPUs from "
            "them and from each other: %s=%s in the environment, before Torch is imported, makes "
            "them sleep instead",
            name,
            value,
        )


def is_machine_busy(root: Path = Path("/"), cpus: int | None = None) -> bool:
    """Whether other processes want half of the CPUs or more, by the number of runnable threads in
    /proc/loadavg; False where the system does not tell.
    """
    others = []
    for sample in range(_SAMPLES):
        if sample:
            time.sleep(_SAMPLE_SECONDS)
        try:
            runnable = (root / "proc/loadavg").read_text().split()[3].partition("/")[0]
            others.append(int(runnable) - _own_runnable_threads(root))
        except (OSError, IndexError, ValueError):
            return False
    return 2 * min(others) >= (cpus or os.cpu_count() or 1)


def _own_runnable_threads(root: Path) -> int:
    """Threads of this process that run or could: this one, and those of a Torch that waits for work
    by spinning.
    """
    states = []
    for stat in (root / "proc/self/task").glob("*/stat"):
        # A thread may end between the listing and the reading.
        with contextlib.suppress(OSError):
            # The name before it, in parentheses, may hold anything.
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return max(1, states.count("R"))
