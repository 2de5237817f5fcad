"""SGLang's CPU runtime: FP8 checkpoints run as they are, on any CPU.

from srt import Engine, SamplingParams

with Engine("path/to/checkpoint") as engine:
    print(engine.generate("The capital of France is", SamplingParams(temperature=0)).text)
"""

import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from srt.utils.openmp import limit_spinning
from srt.version import KERNEL_DISTRIBUTION, KERNEL_VERSIONS, __version__

if TYPE_CHECKING:
    from srt.entrypoints.engine import Engine
    from srt.sampling.sampling_params import SamplingParams

__all__ = ["Engine", "KernelVersionError", "SamplingParams", "__version__"]


class KernelVersionError(ImportError):
    """The kernel package is absent or has a version that this srt does not work with."""


def _check_kernel_version() -> None:
    # The installed metadata is asked, not the module: loading the kernels loads Torch, which
    # commands such as `srt --version` can do without.
    try:
        found = metadata.version(KERNEL_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        found = None
    if found is not None and SpecifierSet(KERNEL_VERSIONS).contains(found, prereleases=True):
        return
    state = "is not installed" if found is None else f"has version {found}"
    raise KernelVersionError(
        f"srt {__version__} needs {KERNEL_DISTRIBUTION} {KERNEL_VERSIONS} "
        f"(the package `sgl_kernel`), which {state}. Run: make -C sgl-kernel-cpu",
        name="sgl_kernel",
    )


_check_kernel_version()


def __getattr__(name: str) -> Any:
    if name == "Engine":
        if "torch" not in sys.modules:
            limit_spinning(os.environ)
        from srt.entrypoints.engine import Engine

        return Engine
    if name == "SamplingParams":
        from srt.sampling.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'srt' has no attribute {name!r}")
