"""Waiting OpenMP threads sleep soon on a busy machine, unless the user has decided otherwise."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import srt
from srt.test.ci_register import register_cpu_ci
from srt.utils.openmp import is_machine_busy, spin_limit

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


@pytest.mark.parametrize(("states", "busy"), [("RS", True), ("RRR", False), ("RRRRR", False)])
def test_the_own_threads_are_no_others(tmp_path: Path, states: str, busy: bool) -> None:
    root = make_load(tmp_path, "3/90")
    for thread, state in enumerate(states):
        (task := root / f"proc/self/task/{thread}").mkdir(parents=True)
        (task / "stat").write_text(f"{thread} (a) R (b) {state} 1 1 0\n")
    assert is_machine_busy(root, 2) is busy


@pytest.mark.parametrize(
    ("runnable", "expected"), [("999/1000", {"GOMP_SPINCOUNT": "1000"}), ("1/9", {})]
)
def test_spinning_is_limited_on_a_busy_machine(
    tmp_path: Path, runnable: str, expected: dict[str, str]
) -> None:
    assert spin_limit({"HOME": "/"}, make_load(tmp_path, runnable)) == expected


@pytest.mark.parametrize("setting", [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_users_setting_stands(tmp_path: Path, setting: dict[str, str]) -> None:
    assert spin_limit(setting, make_load(tmp_path, "999/1000")) == {}


def make_environ() -> dict[str, str]:
    """An environment without any setting of how threads wait."""
    environ = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    return environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def run(code: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds a busy machine and no setting of the user's."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY + code, *arguments],
        env=make_environ(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    return done


def test_the_command_starts_over_in_an_environment_that_limits_spinning() -> None:
    code = (
        "import sys; from srt.__main__ import main; "
        "print('started', 'torch' in sys.modules, file=sys.stderr); sys.exit(main())"
    )
    done = run(code, "env", "--json")
    assert json.loads(done.stdout)["environment"]["GOMP_SPINCOUNT"] == "1000"
    assert done.stderr == "started False\n" * 2


STARTS = """
import os, signal, sys
if "GOMP_SPINCOUNT" in os.environ:
    # What a signal in the start of this interpreter would do without being held.
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= signal.pthread_sigmask(0, ())
    os.kill(os.getpid(), signal.Signals[sys.argv.pop()])
from srt.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_waits_until_the_command_that_starts_over_is_there(name: str, status: int) -> None:
    done = run(STARTS, "env", "--json", name, status=status)
    assert (done.stdout, done.stderr) == ("", "")


def test_signals_are_not_held_once_the_command_runs() -> None:
    code = """
import os, signal, sys
import srt.cli.main as cli
cli.main = lambda **_: print(signal.pthread_sigmask(0, ()), "GOMP_SPINCOUNT" in os.environ)
from srt.__main__ import main
main()
"""
    for start in ("", "o.is_machine_busy = lambda *_: False; import os, sys; "):
        assert run(start + code).stdout == f"set() {not start}\n"


def test_a_program_that_is_read_from_stdin_does_not_start_over(tmp_path: Path) -> None:
    code = BUSY + "from srt.__main__ import main; main()"
    os.mkfifo(pipe := tmp_path / "pipe")
    for options, text in ((["-", "--version"], code), ([str(pipe), "--version"], None)):
        with subprocess.Popen(
            [sys.executable, *options],
            env=make_environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            if text is None:
                pipe.write_text(code)
            assert process.communicate(text)[0].startswith("srt ")


@pytest.mark.parametrize(
    "call",
    [
        "from srt.cli.main import main; main(['env', '--json'])",
        # It has loaded Torch, so it is more than the command.
        "import torch; from srt.__main__ import main; main()",
    ],
)
def test_a_program_that_calls_the_command_does_not_start_over(call: str) -> None:
    done = run(f"import sys; print('started', file=sys.stderr); {call}", "env", "--json")
    assert "GOMP_SPINCOUNT" not in json.loads(done.stdout)["environment"]
    assert done.stderr == "started\n"


def test_an_engine_leaves_the_environment_alone_and_says_what_it_lacks(tmp_path: Path) -> None:
    code = f"""
import os
before = dict(os.environ)
import srt.errors
try:
    srt.Engine({str(tmp_path)!r})
except srt.errors.SrtError:
    assert os.environ == before
"""
    assert "GOMP_SPINCOUNT=1000 in the environment, before Torch" in run(code).stderr


WRITERS = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}


def writes_environment(node: ast.AST) -> bool:
    """Whether a statement or call changes `os.environ` or what lies under it."""

    def is_environ(value: ast.AST) -> bool:
        return ast.unparse(value) in ("os.environ", "environ")

    if isinstance(node, ast.Subscript):
        return is_environ(node.value) and not isinstance(node.ctx, ast.Load)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(is_environ(target) for target in targets)
    if isinstance(node, ast.Call):
        function = node.func
        if ast.unparse(function) in ("os.putenv", "os.unsetenv", "putenv", "unsetenv"):
            return True
        return (
            isinstance(function, ast.Attribute)
            and function.attr in WRITERS
            and is_environ(function.value)
        )
    return False


@pytest.mark.parametrize(
    ("code", "writes"),
    [
        ("os.environ['A'] = 'b'", True),
        ("del os.environ['A']", True),
        ("os.environ |= {}", True),
        ("os.environ.setdefault('A', 'b')", True),
        ("os.putenv('A', 'b')", True),
        ("a = os.environ['A'], os.environ.get('B'), os.environ | {}", False),
    ],
)
def test_writing_is_noticed(code: str, writes: bool) -> None:
    assert any(map(writes_environment, ast.walk(ast.parse(code)))) is writes


def test_nothing_in_srt_writes_the_environment() -> None:
    files = list(Path(srt.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        writers = [n for n in ast.walk(ast.parse(file.read_text())) if writes_environment(n)]
        assert not writers, f"{file}: {ast.unparse(writers[0])}"
