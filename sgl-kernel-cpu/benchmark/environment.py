"""What must be decided before Torch, OpenMP and the peers load: threads, pinning, instruction sets.

All of that is read from environment variables when a library loads, so the benchmark sets them and
starts itself again.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MARK = "SGL_BENCH_PREPARED"

# What makes the peers use no more than a tier's instructions.
PEER_CAPS: dict[str, dict[str, str]] = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "avx512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "OPENBLAS_CORETYPE": "SkylakeX",
    },
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}


def allowed_cpus() -> list[int]:
    """Processors that this process may use, as it was started."""
    if kept := os.environ.get(_MARK):
        return [int(cpu) for cpu in kept.split(",")]
    return sorted(os.sched_getaffinity(0))


def default_threads() -> int:
    """``OMP_NUM_THREADS`` if the user has set it, else one thread for each allowed processor."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else len(allowed_cpus())


def restart_prepared(threads: int, isa: str | None, cap_peers: bool) -> None:
    """Replace this process by one whose environment is prepared; return where it already is."""
    if _MARK in os.environ:
        return
    cpus = allowed_cpus()
    prepared = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        # OpenBLAS's threads spin for 2^N cycles, by default 2^26: over the next method's turn.
        "OPENBLAS_THREAD_TIMEOUT": "18",
    }
    if threads <= len(cpus):
        prepared["OMP_PROC_BIND"] = "true"
        prepared["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in cpus[:threads])
    if "OMP_WAIT_POLICY" not in os.environ:
        # Long enough to stay awake between calls, short enough not to take a core from the next
        # method. By default threads spin for milliseconds.
        prepared["GOMP_SPINCOUNT"] = "10000"
    if isa is not None:
        prepared["SGL_KERNEL_ISA"] = isa
        if cap_peers:
            prepared |= PEER_CAPS.get(isa, {})
    # What the user has set stands; the tier is an option, so the option wins.
    environ = {**prepared, **os.environ}
    environ |= {
        name: prepared[name] for name in ("OMP_NUM_THREADS", "SGL_KERNEL_ISA") if name in prepared
    }
    environ[_MARK] = ",".join(str(cpu) for cpu in cpus)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv], environ)


def settings_in_force() -> dict[str, str]:
    """The variables that decide about threads and instruction sets, as they are set now."""
    names = {name for caps in PEER_CAPS.values() for name in caps}
    names |= {"OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    names |= {
        "OPENBLAS_NUM_THREADS",
        "OPENBLAS_THREAD_TIMEOUT",
        "MKL_NUM_THREADS",
        "SGL_KERNEL_ISA",
    }
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


@contextmanager
def all_allowed_cpus() -> Iterator[None]:
    """Inside, the calling thread may run on every allowed processor.

    OpenMP binds the main thread to one, and every thread pool that another library starts from it
    would inherit that.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed_cpus())
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
