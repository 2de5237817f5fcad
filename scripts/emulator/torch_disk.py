#!/usr/bin/env python3
"""Write a disk image of this Python, Torch, the installed kernels and the tests for run.sh --disk.

Run it with the environment's Python: `.venv/bin/python scripts/emulator/torch_disk.py IMAGE`.
Every file has the path in the image that it has here, so the same command lines work in both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("torch", "numpy", "pytest", "sgl-kernel-cpu")
# Nothing that runs reads these; Torch's alone are 200 MB.
UNUSED_IN_TORCH = ("bin", "include", "share", "test")
USED_IN_TORCH = "torch/bin/torch_shm_manager"
UNUSED_IN_STDLIB = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "tkinter")


def installed_closure(names: tuple[str, ...]) -> Iterator[metadata.Distribution]:
    """Distributions of these names and all that they require here."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        distribution = metadata.distribution(name)
        yield distribution
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)


def files_of(distribution: metadata.Distribution) -> Iterator[Path]:
    """Its installed files that are needed at run time."""
    for file in distribution.files or []:
        in_torch = file.parts[0] == "torch" and file.parts[1] in UNUSED_IN_TORCH
        if in_torch and str(file) != USED_IN_TORCH:
            continue
        path = Path(os.path.normpath(str(distribution.locate_file(file))))
        if path.is_file():
            yield path


def files_of_python() -> Iterator[Path]:
    """The interpreter, its standard library and, in a virtual environment, what points to them."""
    yield from (Path(sys.executable), Path(sys.prefix) / "pyvenv.cfg")
    link = Path(sys.executable)
    while link.is_symlink():
        link = link.parent / link.readlink()
        yield link
    stdlib = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(stdlib):
        if Path(folder) == stdlib:
            subfolders[:] = [s for s in subfolders if s not in UNUSED_IN_STDLIB]
        yield from (Path(folder) / f for f in files if not f.endswith(".a"))


def files_of_repository() -> Iterator[Path]:
    """The registered tests and what they import from here."""
    yield REPOSITORY / "pyproject.toml"
    for folder in ("srt", "test"):
        yield from (p for p in (REPOSITORY / folder).rglob("*") if p.is_file())


def shared_libraries(files: set[Path]) -> Iterator[Path]:
    """The libraries that these files are linked with, and the program loader."""
    objects = [str(f) for f in files if ".so" in f.suffixes or f.name.startswith("python")]
    listing = subprocess.run(["ldd", *objects], capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        # "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x7f...)", or the loader's path alone
        for word in line.split():
            if word.startswith("/") and not word.endswith(":"):
                yield Path(os.path.normpath(word))


def stage(files: set[Path], root: Path) -> int:
    """Lay the files below root, symbolic links resolved; return their size in bytes."""
    for folder in ("proc", "sys", "dev", "tmp"):
        (root / folder).mkdir()
    size = 0
    for file in sorted(files):
        target = root / file.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), target)
        except OSError:  # another file system
            shutil.copy2(file, target)
        size += target.stat().st_size
    return size


def write_image(image: Path) -> None:
    """Make the ext4 image, replacing one that is there."""
    files = {*files_of_python(), *files_of_repository()}
    for distribution in installed_closure(DISTRIBUTIONS):
        files.update(files_of(distribution))
    files = {f for f in files if f.is_file()}
    files.update(shared_libraries(files))
    image.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=image.parent) as folder:
        root = Path(folder) / "root"
        root.mkdir()
        # A third more for the file system's own tables and small files' last blocks.
        megabytes = stage(files, root) * 4 // 3 // 2**20 + 100
        image.unlink(missing_ok=True)
        options = ["-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", str(root)]
        command = ["mke2fs", *options, str(image), f"{megabytes}M"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    print(f"{image}: {len(files)} files, {image.stat().st_size / 1e6:.0f} MB")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    image: Path = parser.parse_args().image
    for tool, package in (("mke2fs", "e2fsprogs"), ("ldd", "libc-bin")):
        if shutil.which(tool) is None:
            parser.error(f"missing; as root: apt-get install {package}")
    try:
        write_image(image.absolute())
    except metadata.PackageNotFoundError as e:
        parser.error(f"{e.name} is not installed in {sys.prefix}: run make env kernels")


if __name__ == "__main__":
    main()
