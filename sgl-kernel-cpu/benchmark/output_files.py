"""Where results go: checked on the command line, before minutes or an hour of measuring."""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

_PICTURES = ("", ".png", ".svg", ".pdf")


def output_file(name: str) -> str:
    """The type of an option that names a file to write.

    Raises:
        argparse.ArgumentTypeError: No file can be written there.
    """
    path = Path(name)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{name} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{name}: there is no directory {path.parent}")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name}: {target} cannot be written")
    return name


def picture_file(name: str) -> str:
    """The type of an option that names a picture to write.

    Raises:
        argparse.ArgumentTypeError: No picture can be written there.
    """
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install matplotlib")
    if Path(name).suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{name}: expected a name in .png, .svg or .pdf")
    return output_file(name)
