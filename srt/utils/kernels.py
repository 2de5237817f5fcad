"""The kernel package (`sgl_kernel`): whether it is there, in a version that works with this srt."""

import importlib
from importlib import metadata

from packaging.specifiers import SpecifierSet

from srt.errors import KernelVersionError, SrtError
from srt.version import KERNEL_DISTRIBUTION, KERNEL_VERSIONS, __version__


def check_kernel_version() -> None:
    """Checks the installed version, without loading the kernels, which would load Torch.

    Raises:
        KernelVersionError: There is none, or it is out of the range that this srt works with.
    """
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


def load_kernels() -> None:
    """Checks the version, then loads the kernels.

    Raises:
        SrtError: They are absent, of another version, or do not load on this machine.
    """
    check_kernel_version()
    try:
        importlib.import_module("sgl_kernel")
    except ImportError as error:
        raise SrtError(f"the kernels do not load: {error}") from error
