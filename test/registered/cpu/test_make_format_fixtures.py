"""scripts/make_format_fixtures.py: each tool writes in an environment of its own with exactly the
versions that the script pins. pip and the tools are stood in for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which makes its environments below `tmp_path`."""
    file = ROOT / "scripts/make_format_fixtures.py"
    spec = importlib.util.spec_from_file_location("make_format_fixtures", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ENVIRONMENTS", tmp_path / "environments")
    return module


@pytest.fixture
def installed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is asked for, in order; nothing is installed."""
    asked: list[str] = []

    def create(folder: Path, *, with_pip: bool, clear: bool) -> None:
        assert with_pip
        assert clear  # half an environment is not built on
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin/python").touch()
        (folder / "requirements.txt").unlink(missing_ok=True)

    def run(command: list[str], *, check: bool) -> None:
        assert check
        asked.extend(command[command.index("-q") + 1 :])

    monkeypatch.setattr(script.venv, "create", create)
    monkeypatch.setattr(script.subprocess, "run", run)
    return asked


@pytest.mark.parametrize("tool", ["transformers", "llmcompressor", "modelopt"])
def test_an_environment_is_made_once(
    script: ModuleType, installed: list[str], tool: str, tmp_path: Path
) -> None:
    python = script.make_environment(tool)
    assert python == tmp_path / "environments" / tool / "bin/python"
    described = script.TOOLS[tool]
    assert script.TORCH in installed
    assert f"{described.name}=={described.version}" in installed
    # What brings CUDA, or more than is imported, comes without its dependencies.
    bare = installed[installed.index("--no-deps") + 1 :]
    assert set(described.bare) <= set(bare)
    assert not set(described.needs) & set(bare)
    installed.clear()
    assert script.make_environment(tool) == python
    assert installed == []


def test_another_version_makes_another_environment(
    script: ModuleType, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script.make_environment("modelopt")
    installed.clear()
    newer = replace(script.TOOLS["modelopt"], version="0.48.0")
    monkeypatch.setattr(script, "TOOLS", {**script.TOOLS, "modelopt": newer})
    script.make_environment("modelopt")
    assert "nvidia-modelopt==0.48.0" in installed


@pytest.mark.parametrize("step", [0, 1])
def test_half_an_environment_is_made_anew(
    script: ModuleType, installed: list[str], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    run: Callable[..., None] = script.subprocess.run
    calls = 0

    def fail(command: list[str], *, check: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == step + 1:
            raise subprocess.CalledProcessError(1, command)
        run(command, check=check)

    monkeypatch.setattr(script.subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        script.make_environment("transformers")
    script.make_environment("transformers")
    assert "transformers==5.24.0" in installed


def test_another_version_writes_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "OUT", tmp_path / "formats")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(SystemExit, match=r"transformers 5\.24\.0 is to write; 9\.9 is installed"):
        script.write_fixtures("transformers")
    assert not (tmp_path / "formats").exists()


def test_the_repository_has_what_the_script_writes(script: ModuleType) -> None:
    """Names tell tool and version, so that a new version is a new fixture, and is seen."""
    written = {
        f"{tool}-{script.TOOLS[tool].version}-{fixture}"
        for tool, fixtures in script.FIXTURES.items()
        for fixture in fixtures
    }
    assert {path.name for path in script.OUT.iterdir()} == written


@pytest.mark.parametrize("tool", ["transformers", "llmcompressor", "modelopt"])
def test_tools_and_what_writes_with_them_are_pinned(script: ModuleType, tool: str) -> None:
    described = script.TOOLS[tool]
    pinned = [entry for entry in (*described.needs, *described.bare) if "==" in entry]
    names = {re.split("==", entry)[0] for entry in pinned} | {described.name}
    assert {"transformers", "accelerate"} <= names
    assert "==" in script.TORCH
