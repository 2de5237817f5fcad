"""Where a plot goes: checked before minutes of measuring."""

import os
from importlib.util import find_spec
from pathlib import Path

from srt.errors import RequestError, SrtError

_SUFFIXES = ("", ".png", ".svg", ".pdf")


def check_plot_file(path: Path) -> None:
    """Checks what writing a picture to `path` needs, without loading matplotlib.

    Raises:
        SrtError: matplotlib is not installed.
        RequestError: It is no name of a picture, or no file can be written there.
    """
    if find_spec("matplotlib") is None:
        raise SrtError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix not in _SUFFIXES:
        raise RequestError(f"--plot {path}: expected a name that ends in .png, .svg or .pdf")
    if path.is_dir():
        raise RequestError(f"--plot {path}: is a directory")
    if not path.parent.is_dir():
        raise RequestError(f"--plot {path}: there is no directory {path.parent}")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise RequestError(f"--plot {path}: {target} cannot be written")
