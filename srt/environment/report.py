"""Everything about this machine and installation that a bug report needs.

Nothing here raises because something is missing or broken: that is what a report is for. Values of
environment variables that may be secrets are masked.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from srt.utils.host_memory import read_cpu_quota, read_host_memory
from srt.version import KERNEL_DISTRIBUTION, KERNEL_VERSIONS, __version__

PACKAGES = (
    KERNEL_DISTRIBUTION,
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "numpy",
)
_VARIABLES = re.compile(
    r"(SGL_|SRT_|OMP_|KMP_|GOMP_|MKL_|OPENBLAS_|ONEDNN_|DNNL_|ATEN_|TORCH|HF_|TRANSFORMERS_"
    r"|LD_PRELOAD$|LD_LIBRARY_PATH$|MALLOC_|CUDA_VISIBLE_DEVICES$)"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "****"
# Instruction sets that decide which kernels run, on x86 and on Arm.
_FLAGS = re.compile(
    r"(sse4_2|avx\w*|fma|f16c|amx_\w+|hypervisor|asimd\w*|fphp|bf16|i8mm|sve\w*|sme(?!p$)\w*)$"
)


def collect_environment() -> dict[str, Any]:
    """The facts by section, ready for JSON; None stands for what the system does not tell."""
    return {
        "versions": {"srt": __version__, **{name: _version(name) for name in PACKAGES}},
        "kernels": _kernels(),
        "torch": _torch(),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "system": {
            "os": _os_name(),
            "kernel": f"{platform.system()} {platform.release()}",
            "libc": " ".join(platform.libc_ver()).strip() or None,
            "machine": platform.machine(),
        },
        "cpu": _cpu(),
        "memory": _memory(),
        "environment": _variables(os.environ),
    }


def find_problems(environment: dict[str, Any]) -> list[str]:
    """What in the result of `collect_environment` keeps models from running."""
    return [
        f"{section}: {environment[section]['problem']}"
        for section in ("kernels", "torch")
        if "problem" in environment[section]
    ]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> dict[str, Any]:
    """`sgl_kernel.cpu_info()`, or the problem that keeps the kernels from loading."""
    facts: dict[str, Any] = {"versions_supported": KERNEL_VERSIONS}
    try:
        facts.update(importlib.import_module("sgl_kernel").cpu_info())
    except (ImportError, OSError, RuntimeError, AttributeError, ValueError) as error:
        facts["problem"] = f"{type(error).__name__}: {error}"
    return facts


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "openmp": torch.backends.openmp.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available(),
    }


def _cpu() -> dict[str, Any]:
    info = _read("/proc/cpuinfo") or ""
    model = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {
        "model": model[1] if model else platform.processor() or None,
        "flags": [flag for flag in flags[1].split() if _FLAGS.match(flag)] if flags else [],
        "logical_cpus": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "quota_cpus": read_cpu_quota(),
        "smt_active": _read("/sys/devices/system/cpu/smt/active"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "numa_nodes": {node.name: _read(node / "cpulist") for node in nodes},
    }


def _memory() -> dict[str, Any]:
    memory = read_host_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "cgroup_limit": memory.limit,
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def _os_name() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return platform.platform()


def _variables(environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The variables that change how models run, secrets masked."""
    return {
        name: _MASK if _SECRET.search(name) else _URL_USER.sub(_MASK, value)
        for name, value in sorted(environ.items())
        if _VARIABLES.match(name)
    }


def _read(file: str | Path) -> str | None:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return None
