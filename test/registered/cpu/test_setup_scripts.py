"""What the Makefile calls to set up: scripts/install_torch.py and scripts/run_with_progress.py."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="per-commit")

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("requirement", "system", "machine", "expected"),
    [
        ("torch==2.13.0", "Linux", "x86_64", "torch==2.13.0+cpu"),
        ("torch==2.10", "Linux", "x86_64", "torch==2.10+cpu"),
        # Builds for these have no CUDA in them, or no local version.
        ("torch==2.13.0", "Linux", "aarch64", None),
        ("torch==2.13.0", "Darwin", "x86_64", None),
        # Whoever says more than a version gets what they say.
        ("torch==2.13.0+cu130", "Linux", "x86_64", None),
        ("torch>=2.10", "Linux", "x86_64", None),
        ("torch", "Linux", "x86_64", None),
        ("torch==2.13.0 --index-url https://example.org", "Linux", "x86_64", None),
    ],
)
def test_cpu_build(requirement: str, system: str, machine: str, expected: str | None) -> None:
    assert load("install_torch").cpu_build(requirement, system, machine) == expected


def write_wheel(directory: Path, version: str) -> None:
    """A wheel of a package that is called torch."""
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(directory / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", f"__version__ = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def install(tmp_path: Path, versions: Sequence[str], requirement: str) -> tuple[str, int, str]:
    """Runs the script where an index has `versions`; returns what is installed then, the exit
    status and stderr.
    """
    index, target = tmp_path / "index", tmp_path / "target"
    index.mkdir()
    for version in versions:
        write_wheel(index, version)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_TARGET": str(target),
        "PIP_NO_CACHE_DIR": "1",
    }
    result = subprocess.run(
        [sys.executable, str(SCRIPTS / "install_torch.py"), requirement],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    installed = [
        info.name[len("torch-") : -len(".dist-info")] for info in target.glob("*.dist-info")
    ]
    return ",".join(installed), result.returncode, result.stderr


on_x86_linux = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="only x86-64 Linux has a choice of builds",
)


@on_x86_linux
def test_takes_the_cpu_build_where_there_is_one(tmp_path: Path) -> None:
    version, status, stderr = install(tmp_path, ["9.1.0", "9.1.0+cpu"], "torch==9.1.0")
    assert (version, status, stderr) == ("9.1.0+cpu", 0, "")


@on_x86_linux
def test_says_what_the_plain_build_brings_before_it_is_downloaded(tmp_path: Path) -> None:
    version, status, stderr = install(tmp_path, ["9.1.0"], "torch==9.1.0")
    assert (version, status) == ("9.1.0", 0)
    assert "a build for CUDA: some 3 GB" in stderr
    assert "make TORCH='torch==9.1.0+cpu --extra-index-url URL'" in stderr


@pytest.mark.parametrize(
    ("requirement", "expected"), [("torch==9.1.0+cu1", "9.1.0+cu1"), ("'torch<9.1' --pre", "9.0.5")]
)
def test_a_build_that_is_named_is_the_one_installed(
    tmp_path: Path, requirement: str, expected: str
) -> None:
    versions = ["9.0.5", "9.1.0", "9.1.0+cpu", "9.1.0+cu1"]
    assert install(tmp_path, versions, requirement) == (expected, 0, "")


def test_no_such_torch_is_pips_error(tmp_path: Path) -> None:
    version, status, stderr = install(tmp_path, ["9.1.0"], "torch==9.2.0")
    assert (version, status) == ("", 1)
    assert "No matching distribution found for torch==9.2.0" in stderr


def progress(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "run_with_progress.py"), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )


def test_output_is_kept_back_unless_the_command_fails() -> None:
    lines = "import sys; print('[1/2] compiled a'); print('b.cpp: error', file=sys.stderr)"
    assert progress(lines).stderr == ""
    failed = progress(lines + "; sys.exit(3)")
    assert (failed.returncode, failed.stderr, failed.stdout) == (3, "b.cpp: error\n", "")


def test_a_command_that_a_signal_ends_has_the_shells_status() -> None:
    assert progress("import os; os.kill(os.getpid(), 15)").returncode == 128 + 15


def test_a_command_that_does_not_exist() -> None:
    script = str(SCRIPTS / "run_with_progress.py")
    result = subprocess.run(
        [sys.executable, script, "/no/such/command"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 127
    assert result.stderr == "error: /no/such/command cannot be run: No such file or directory\n"


class Screen:
    """Keeps what is written to it."""

    def __init__(self, is_terminal: bool) -> None:
        self.text = ""
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("is_terminal", "expected"),
    [
        (True, "\r    9 of 90 steps, 1 s\r    88 of 90 steps, 40 s\r" + " " * 24 + "\r"),
        (False, "    88 of 90 steps, 40 s\n"),
    ],
)
def test_progress_line(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, expected: str) -> None:
    module, screen, clock = load("run_with_progress"), Screen(is_terminal), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    line = module.ProgressLine(screen)
    for seconds, done in [(0.1, 1), (1.0, 9), (1.1, 10), (40.0, 88)]:
        clock[0] = 100.0 + seconds
        line.show(done, 90)
    line.clear()
    assert screen.text == expected
