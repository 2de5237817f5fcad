"""Waiting OpenMP threads sleep soon on a busy machine, unless the user has decided otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from srt.test.ci_register import register_cpu_ci
from srt.utils.openmp import is_machine_busy, limit_spinning

register_cpu_ci(est_time=15, suite="per-commit")

# The beginning of a program that finds a busy machine.
BUSY = "import os, srt.utils.openmp as o; o.is_machine_busy = lambda *_: True; "


def make_load(root: Path, runnable: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/loadavg").write_text(f"0.50 0.40 0.30 {runnable} 4711\n")
    return root


@pytest.mark.parametrize(
    ("runnable", "cpus", "busy"),
    [("1/90", 2, False), ("2/90", 2, True), ("2/90", 4, False), ("3/90", 4, True), ("x", 4, False)],
)
def test_a_machine_is_busy_when_others_want_half_of_it(
    tmp_path: Path, runnable: str, cpus: int, busy: bool
) -> None:
    assert is_machine_busy(make_load(tmp_path, runnable), cpus) is busy


@pytest.mark.parametrize(
    ("runnable", "expected"), [("999/1000", {"GOMP_SPINCOUNT": "1000"}), ("1/9", {})]
)
def test_spinning_is_limited_on_a_busy_machine(
    tmp_path: Path, runnable: str, expected: dict[str, str]
) -> None:
    environ = {"HOME": "/"}
    limit_spinning(environ, make_load(tmp_path, runnable))
    assert environ == {"HOME": "/", **expected}


@pytest.mark.parametrize("setting", [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_users_setting_stands(tmp_path: Path, setting: dict[str, str]) -> None:
    environ = dict(setting)
    limit_spinning(environ, make_load(tmp_path, "999/1000"))
    assert environ == setting


def test_engine_sets_it_if_torch_is_not_loaded_yet() -> None:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    for before, expected in (("", "1000"), ("import torch; ", "None")):
        code = f"{BUSY}{before}from srt import Engine; print(os.environ.get('GOMP_SPINCOUNT'))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_the_command_line_sets_it_before_torch_loads() -> None:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = (
        f"{BUSY}import sys; from srt.cli.main import main; "
        "assert 'torch' not in sys.modules; "
        "main(['env', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["environment"]["GOMP_SPINCOUNT"] == "1000"
