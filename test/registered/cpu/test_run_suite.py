"""scripts/run_suite.py: what it reads from test files, what it refuses, what a run returns."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from srt.test.ci_register import Suite, register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "run_suite.py"
REGISTERED = 'register_cpu_ci(est_time=2, suite="per-commit")\n'
PASSES = "def test_passes():\n    assert True\n"


@pytest.fixture(scope="module")
def run_suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_suite", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_suite"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout in miniature, whose runner is a copy of ours."""
    for folder in ("scripts", "test/registered/cpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts" / "run_suite.py").write_text(SCRIPT.read_text())
    return tmp_path


def add(tree: Path, name: str, text: str) -> None:
    define = "def register_cpu_ci(est_time, suite): pass\n"
    (tree / "test" / "registered" / "cpu" / name).write_text(define + text)


def runner(tree: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(tree / "scripts" / "run_suite.py"), *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_suites_are_those_that_files_can_name(run_suite: ModuleType) -> None:
    assert get_args(Suite) == run_suite.SUITES


def test_reads_without_importing(run_suite: ModuleType, tree: Path) -> None:
    text = "import not_there\nci.register_gpu_ci(suite='full', est_time=0.5)\n" + PASSES
    file = tree / "test_a.py"
    file.write_text(text)
    expected = run_suite.Registration("test_a.py", "gpu", 0.5, "full")
    assert run_suite.read_registration(file, tree) == expected


def test_full_holds_per_commit(run_suite: ModuleType) -> None:
    registrations = [run_suite.Registration(f"{s}.py", "cpu", 1.0, s) for s in run_suite.SUITES]
    assert [r.suite for r in run_suite.select(registrations, "per-commit")] == ["per-commit"]
    assert [r.suite for r in run_suite.select(registrations, "full")] == ["per-commit", "full"]


def test_a_device_narrows_the_suite(run_suite: ModuleType, tree: Path) -> None:
    registrations = [run_suite.Registration(f"{d}.py", d, 1.0, "full") for d in ("cpu", "gpu")]
    assert run_suite.select(registrations, "full") == registrations
    for registration in registrations:
        device = registration.backend
        assert run_suite.select(registrations, "full", device) == [registration]
        assert run_suite.select(registrations, "per-commit", device) == []
    add(tree, "test_a.py", REGISTERED + PASSES)
    result = runner(tree, "--device", "gpu")
    assert result.returncode == 2
    assert "no test is registered for suite per-commit on gpu" in result.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("test_a.py", PASSES, "expected one register_cpu_ci or register_gpu_ci"),
        ("test_a.py", REGISTERED * 2 + PASSES, "found 2 there and 0 elsewhere"),
        ("test_a.py", f"if True:\n    {REGISTERED}{PASSES}", "found 0 there and 1 elsewhere"),
        ("test_a.py", f"{REGISTERED.replace('2', 'N')}{PASSES}", "takes literals only"),
        (
            "test_a.py",
            f"{REGISTERED.replace('2', '0')}{PASSES}",
            "positive number of seconds, got 0",
        ),
        ("test_a.py", f"{REGISTERED.replace('2', 'True')}{PASSES}", "positive number of seconds"),
        (
            "test_a.py",
            REGISTERED.replace("per-commit", "nightly") + PASSES,
            "unknown suite 'nightly'",
        ),
        (
            "test_a.py",
            f'register_cpu_ci(2, "full")\n{PASSES}',
            r"expected register_cpu_ci\(est_time=",
        ),
        ("test_a.py", REGISTERED, "defines no test"),
        ("test_a.py", REGISTERED + "def test_(:\n", "test_a.py:2: "),
        ("test_a.py", REGISTERED + PASSES + "def check_b(): pass\n", r"nothing calls check_b\(\)"),
        (
            "test_a.py",
            REGISTERED + PASSES + "class Cases:\n    def test_b(self): pass\n",
            "class Cases holds tests but is not named Test",
        ),
        (
            "test_a.py",
            REGISTERED + "class TestA:\n    def test_a(self): pass\n    def b_test(self): pass\n",
            r"line 4: nothing calls TestA.b_test\(\)",
        ),
        ("a_test.py", REGISTERED + PASSES, r"name must be test_\*\.py"),
        ("helpers.py", PASSES, r"name must be test_\*\.py"),
    ],
)
def test_refuses_what_would_not_run(
    run_suite: ModuleType, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(run_suite.SuiteError, match=message):
        run_suite.find_registrations(tmp_path, tmp_path)


def test_accepts_fixtures_helpers_and_hooks(run_suite: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pytest\n" + REGISTERED + "@pytest.fixture(scope='module')\ndef thing(): return 1\n"
        "def helper(): return 1\ndef setup_module(): pass\n"
        "class Fake:\n    def method(self): pass\n"
        "class TestThing:\n    def setup_method(self): pass\n"
        "    def test_thing(self, thing): assert thing == helper()\n"
    )
    (tmp_path / "helpers.py").write_text("def shared(): pass\n")
    assert [r.path for r in run_suite.find_registrations(tmp_path, tmp_path)] == ["test_a.py"]


def test_reports_every_problem_at_once(tree: Path) -> None:
    add(tree, "test_a.py", PASSES)
    add(tree, "test_b.py", REGISTERED.replace("per-commit", "nightly") + PASSES)
    result = runner(tree, "--list")
    assert result.returncode == 2
    assert "cpu/test_a.py: expected one" in result.stderr
    assert "cpu/test_b.py:2: unknown suite 'nightly'" in result.stderr


def test_runs_the_suite_and_returns_the_status_of_pytest(tree: Path) -> None:
    add(tree, "test_a.py", REGISTERED + PASSES)
    add(
        tree, "test_b.py", REGISTERED.replace("per-commit", "full") + "def test_b(): assert False\n"
    )

    result = runner(tree, "--suite", "per-commit")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout.splitlines()[-1]
    assert "test/registered/cpu/test_a.py     2.0 s" in result.stdout

    result = runner(tree, "--suite", "full", "--", "-k", "test_b")
    assert result.returncode == 1
    assert "1 failed" in result.stdout.splitlines()[-1]


def test_an_empty_suite_is_an_error(tree: Path) -> None:
    add(tree, "test_b.py", REGISTERED.replace("per-commit", "full") + PASSES)
    result = runner(tree, "--suite", "per-commit")
    assert result.returncode == 2
    assert "no test is registered for suite per-commit" in result.stderr


def test_marks_a_file_far_over_its_estimate(run_suite: ModuleType) -> None:
    registrations = [run_suite.Registration(f"test_{n}.py", "cpu", 2.0, "full") for n in "abc"]
    seconds = {"test_a.py": 3.9, "test_b.py": 4.5}
    lines = list(run_suite.time_table(registrations, seconds))
    assert [("over" in line) for line in lines] == [False, False, True, False, False]
    assert lines[-1].split() == ["total", "6.0", "s", "8.4", "s"]
