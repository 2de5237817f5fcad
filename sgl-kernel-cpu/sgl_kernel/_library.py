"""The shared library: loading it, choosing its ISA tier, and what it says about the machine."""

import ctypes
import functools
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LIBRARY_PATH = Path(__file__).parent / "sgl_kernel_ops.so"
REBUILD = "rebuild with `make -C sgl-kernel-cpu` or reinstall sgl-kernel-cpu"


@functools.cache
def _library() -> ctypes.CDLL:
    if not _LIBRARY_PATH.exists():
        raise ImportError(f"sgl_kernel: {_LIBRARY_PATH} is missing; {REBUILD}")
    try:
        torch.ops.load_library(str(_LIBRARY_PATH))
    except OSError as error:
        raise ImportError(
            f"sgl_kernel: cannot load {_LIBRARY_PATH} with Torch {torch.__version__} on "
            f"{platform.machine()} (it needs Torch 2.10 or later): {error}; {REBUILD}"
        ) from error
    library = ctypes.CDLL(str(_LIBRARY_PATH))
    for name in ("sgl_kernel_set_isa", "sgl_kernel_check_isa", "sgl_kernel_cpu_info"):
        getattr(library, name).restype = ctypes.c_char_p
    library.sgl_kernel_set_isa.argtypes = [ctypes.c_char_p]
    return library


def load_library() -> str:
    """Load the ops and return the package's version.

    Raises:
        ImportError: the library is missing or does not load, ``SGL_KERNEL_ISA`` names a tier that
            this machine cannot run, or library and package are of different versions.
    """
    error = _library().sgl_kernel_check_isa()
    if error is not None:
        raise ImportError(error.decode())
    version = importlib.metadata.version("sgl-kernel-cpu")
    built = _library_info()["version"]
    if built != version:
        raise ImportError(
            f"sgl_kernel: the package is version {version}, its library {built}; {REBUILD}"
        )
    return version


def set_isa(tier: str | None) -> None:
    """Use the kernels of ``tier`` from now on, in the whole process; ``None`` means the best one.

    For tests and bug reports; ``SGL_KERNEL_ISA`` does the same from outside.

    Raises:
        RuntimeError: no such tier, or this machine cannot run it; the message says why.
    """
    error = _library().sgl_kernel_set_isa(None if tier is None else tier.encode())
    if error is not None:
        raise RuntimeError(error.decode())


@dataclass(frozen=True)
class GraphFunctions:
    """The library's functions behind :mod:`sgl_kernel.graph`. A capsule is a Python object that
    owns a graph and frees it.
    """

    new: Callable[[], Any]
    pointer: Callable[[Any], int]
    record: Callable[[Any, Any, int, Callable[[], Any]], Any]
    recording: Callable[[], bool]
    size: Callable[[int], int]
    replay: Callable[[int], bytes | None]
    refused: Callable[[], bool]


@functools.cache
def graph_functions() -> GraphFunctions:
    """Bound once: ctypes looks a function up by name, and a replay is timed in microseconds."""
    library = _library()
    # Its functions keep the GIL and raise what they leave as Python's current error.
    with_python = ctypes.PyDLL(str(_LIBRARY_PATH))

    def bind(owner: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(owner, f"sgl_kernel_graph_{name}")
        function.restype, function.argtypes = result, list(arguments)
        return function

    pointer, capsule, integer = ctypes.c_void_p, ctypes.py_object, ctypes.c_int64
    bind(library, "use_python", None, pointer, pointer, pointer)(
        *(
            ctypes.cast(getattr(ctypes.pythonapi, name), pointer)
            for name in ("PyObject_CallNoArgs", "PyCapsule_New", "PyCapsule_GetPointer")
        )
    )
    return GraphFunctions(
        new=bind(with_python, "new", capsule),
        pointer=bind(with_python, "pointer", pointer, capsule),
        record=bind(with_python, "record", capsule, capsule, pointer, integer, capsule),
        recording=bind(library, "recording", ctypes.c_bool),
        size=bind(library, "size", integer, pointer),
        replay=bind(library, "replay", ctypes.c_char_p, pointer),
        refused=bind(library, "refused", ctypes.c_bool),
    )


def active_tier() -> str:
    """The tier in use."""
    tier: str = _library_info()["tier"]
    return tier


def cpu_info() -> dict[str, Any]:
    """What the kernels know about this machine.

    Returns:
        ``version``, ``tier`` in use, ``tiers_available``, ``tiers_unavailable`` (tier to reason),
        ``features`` (name to bool), ``threads`` (Torch's intra-op threads), ``cpu_model`` and
        ``caches`` (for example ``{"L1d": 32768, "L2": 1048576}``, bytes, of one core).
    """
    return {
        **_library_info(),
        "threads": torch.get_num_threads(),
        "cpu_model": _cpu_model(),
        "caches": _caches(),
        "isa_override": os.environ.get("SGL_KERNEL_ISA") or None,
    }


def _library_info() -> dict[str, Any]:
    info: dict[str, Any] = json.loads(_library().sgl_kernel_cpu_info().decode())
    return info


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _caches() -> dict[str, int]:
    """Sizes in bytes of the caches of the first core, as Linux reports them; empty elsewhere."""
    sizes = {}
    suffix = {"Data": "d", "Instruction": "i", "Unified": ""}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level = (index / "level").read_text().strip()
            kind = (index / "type").read_text().strip()
            size = (index / "size").read_text().strip()
        except OSError:
            continue
        unit = {"K": 1024, "M": 1024**2}.get(size[-1:], 1)
        sizes[f"L{level}{suffix.get(kind, '')}"] = int(size.rstrip("KM")) * unit
    return sizes
