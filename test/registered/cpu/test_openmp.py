"""Waiting OpenMP threads sleep soon, unless the user has decided otherwise."""

import json
import os
import subprocess
import sys

import pytest

from srt.test.ci_register import register_cpu_ci
from srt.utils.openmp import limit_spinning

register_cpu_ci(est_time=15, suite="per-commit")


def test_spinning_is_limited() -> None:
    environ = {"HOME": "/"}
    limit_spinning(environ)
    assert environ == {"HOME": "/", "GOMP_SPINCOUNT": "1000"}


@pytest.mark.parametrize("setting", [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_users_setting_stands(setting: dict[str, str]) -> None:
    environ = dict(setting)
    limit_spinning(environ)
    assert environ == setting


def test_engine_sets_it_if_torch_is_not_loaded_yet() -> None:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    for before, expected in (("", "1000"), ("import torch; ", "None")):
        code = f"{before}from srt import Engine; import os; print(os.environ.get('GOMP_SPINCOUNT'))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_the_command_line_sets_it_before_torch_loads() -> None:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = (
        "import sys; from srt.entrypoints.cli import main; assert 'torch' not in sys.modules; "
        "main(['env', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["environment"]["GOMP_SPINCOUNT"] == "1000"
