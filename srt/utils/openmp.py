"""How OpenMP threads wait between the parallel regions of Torch and the kernels."""

import os
import time
from collections.abc import MutableMapping
from pathlib import Path

# Turns of GNU OpenMP's waiting loop before a thread sleeps: some microseconds.
_SPIN_COUNT = "1000"
_USER_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# The load is looked at this often, and the lowest counts: what runs for a moment does not disturb.
_SAMPLES = 3
_SAMPLE_SECONDS = 0.002


def limit_spinning(environ: MutableMapping[str, str], root: Path = Path("/")) -> None:
    """Lets waiting threads sleep soon where something else uses the machine, unless the user has
    set how they wait.

    By default GNU OpenMP spins for milliseconds, which is right on an idle machine: a thread that
    sleeps takes some 60 us to wake up, for each of the hundreds of operators of a token, and
    decoding is up to three times slower. Next to a busy process it is wrong: a spinning thread
    takes the core that the thread it waits for needs, every parallel region costs a time slice of
    the scheduler, and decoding is ten times slower.

    Args:
        environ: The process's environment. Read when Torch loads OpenMP, so this must come first.
        root: Where `proc` is mounted.
    """
    if not any(name in environ for name in _USER_SETTINGS) and is_machine_busy(root):
        environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


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
            others.append(int(runnable) - 1)  # without this one
        except (OSError, IndexError, ValueError):
            return False
    return 2 * min(others) >= (cpus or os.cpu_count() or 1)
