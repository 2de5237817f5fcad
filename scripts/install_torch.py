"""Installs Torch with pip into the environment of this Python: the CPU build wherever there is one.

For x86-64 Linux the plain `torch==X` on PyPI is a CUDA build, which brings gigabytes of libraries
that a CPU never uses. Where an index that pip is configured for offers `torch==X+cpu`, that is
taken. Where none does, what is about to be downloaded is said first, and how to avoid it.

usage: python scripts/install_torch.py REQUIREMENT

A requirement that says more than a version (a build, as in `torch==2.13.0+cpu`, a range, options of
pip) is installed as it is. On a terminal pip shows its progress.
"""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys

# How pip says that no index has what was asked for; everything else that fails is an error.
_NOT_FOUND = "No matching distribution found for torch=="


def cpu_build(requirement: str, system: str, machine: str) -> str | None:
    """The CPU build of `requirement`; None where there is no choice: the requirement says more
    than a version, or `system` and `machine` (as :mod:`platform` names them) are not x86-64 Linux,
    the only one whose plain build is for CUDA.
    """
    if system != "Linux" or machine != "x86_64":
        return None
    return f"{requirement}+cpu" if re.fullmatch(r"torch==[0-9][0-9.]*", requirement) else None


def remark(requirement: str) -> str:
    """What to say before the plain build is downloaded."""
    return (
        f"note: no package index that pip is configured for has {requirement}+cpu, so "
        f"{requirement} is installed.\n"
        "      On PyPI that is a build for CUDA: some 3 GB to download and 5 GB on disk, most of "
        "which nothing here uses.\n"
        "      To avoid it, stop (Ctrl-C) and name an index of Torch's CPU builds (PyTorch's "
        "installation page has its address):\n"
        f"      make TORCH='{requirement}+cpu --extra-index-url URL' ..."
    )


def pip_install(requirement: str) -> tuple[int, str]:
    """Installs it; returns pip's exit status and what it wrote to stderr."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    if not sys.stdout.isatty():
        command.append("-qq")
    result = subprocess.run(
        [*command, *shlex.split(requirement)], stderr=subprocess.PIPE, text=True, check=False
    )
    return result.returncode, result.stderr


def main(requirement: str) -> int:
    """Installs Torch; the exit status is pip's."""
    candidate = cpu_build(requirement, platform.system(), platform.machine())
    if candidate is not None:
        status, errors = pip_install(candidate)
        if status == 0 or _NOT_FOUND not in errors:
            sys.stderr.write(errors)
            return status
        print(remark(requirement), file=sys.stderr, flush=True)
    status, errors = pip_install(requirement)
    sys.stderr.write(errors)
    return status


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: install_torch.py REQUIREMENT")
    try:
        sys.exit(main(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
