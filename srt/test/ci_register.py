"""Registration lines of test files.

A test file says once, at module level, which suite it belongs to and how long it takes. The suite
runner reads that line from the file's syntax tree, without importing the file, so the functions
here do nothing when they are called.
"""

from typing import Literal

Suite = Literal["per-commit", "full"]


def register_cpu_ci(est_time: float, suite: Suite) -> None:
    """Registers the calling test file for CPU machines.

    Args:
        est_time: Estimated run time of the whole file in seconds.
        suite: ``per-commit`` (every push) or ``full`` (before a release).
    """


def register_gpu_ci(est_time: float, suite: Suite) -> None:
    """Registers the calling test file for machines with a GPU; arguments as for
    :func:`register_cpu_ci`.
    """
