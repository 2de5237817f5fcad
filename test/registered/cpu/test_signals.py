"""A signal ends the command with status 128 + its number, whenever it comes."""

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=15, suite="per-commit")

SRT = [sys.executable, "-m", "srt"]
# Sends a signal to its own process when a module is looked for, before anything of it has run.
TRAP = """
import os, signal, sys

class Trap:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["TRAP_MODULE"] and "srt" in sys.modules:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.Signals[os.environ["TRAP_SIGNAL"]])

sys.meta_path.insert(0, Trap())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("signals")
    return str(write_text_model(directory))


def generate(model: str) -> list[str]:
    return [*SRT, "generate", "--model", model, "--prompt", "x", "--max-new-tokens", "9", "--quiet"]


@pytest.mark.parametrize(
    ("module", "name", "status"),
    [
        ("srt.cli.main", "SIGINT", 130),
        pytest.param("argparse", "SIGINT", 130, marks=pytest.mark.slow),
        ("numpy", "SIGINT", 130),
        pytest.param("numpy._core._multiarray_umath", "SIGINT", 130, marks=pytest.mark.slow),
        pytest.param("numpy.linalg", "SIGTERM", 143, marks=pytest.mark.slow),
        ("torch._C", "SIGINT", 130),
        pytest.param("torch.autograd", "SIGHUP", 129, marks=pytest.mark.slow),
        ("sgl_kernel._library", "SIGHUP", 129),
        pytest.param("srt.managers.scheduler", "SIGTERM", 143, marks=pytest.mark.slow),
        ("transformers", "SIGTERM", 143),
        pytest.param("transformers.tokenization_utils_base", "SIGINT", 130, marks=pytest.mark.slow),
    ],
)
def test_while_a_module_is_imported(
    model: str, tmp_path: Path, module: str, name: str, status: int
) -> None:
    """KeyboardInterrupt there was dropped, or became an ImportError: "the kernels do not load"."""
    (tmp_path / "sitecustomize.py").write_text(TRAP)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environ = os.environ | {"PYTHONPATH": path, "TRAP_MODULE": module, "TRAP_SIGNAL": name}
    result = subprocess.run(generate(model), capture_output=True, text=True, env=environ)
    assert (result.returncode, result.stdout, result.stderr) == (status, "", "")


def python(program: str, *, status: int) -> str:
    """Runs a program that has `signals`, installed, and `send()`; returns its stdout."""
    start = """
    import os, signal, sys, time
    from srt.utils.signals import Signals
    signals = Signals()
    signals.install()
    def send(signum=signal.SIGINT):
        os.kill(os.getpid(), signum)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (result.returncode, result.stderr) == (status, "")
    return result.stdout


IMPORT = """
    import importlib, importlib.util
    class Loader:
        def find_spec(self, name, path=None, target=None):
            if name == "victim":
                return importlib.util.spec_from_loader(name, self)
        def create_module(self, spec):
            return None
        def exec_module(self, module):
            {body}
    sys.meta_path.insert(0, Loader())
    try:
        with signals.working():
            import victim
            time.sleep(1)
            print("went on")
    except KeyboardInterrupt:
        print("interrupted", "victim" in sys.modules)
"""


@pytest.mark.parametrize(
    "body",
    [
        # What modules do with a KeyboardInterrupt that is raised in them.
        """
            try: send()
            except BaseException: pass""",
        """
            try: send()
            except BaseException as error: raise ImportError from error""",
        """
            class Finalized:
                __del__ = lambda self: send()
            Finalized()""",
    ],
    ids=["dropped", "an ImportError", "in a finalizer"],
)
def test_an_import_is_completed_first(body: str) -> None:
    assert python(IMPORT.replace("{body}", body), status=0) == "interrupted True\n"


def test_a_finalizer_is_completed_first() -> None:
    program = """
    class Finalized:
        def __del__(self):
            send()
    try:
        with signals.working():
            Finalized()
            time.sleep(1)
    except KeyboardInterrupt:
        print("interrupted")
    """
    assert python(program, status=0) == "interrupted\n"


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_finally_blocks_run(name: str, status: int) -> None:
    program = f"""
    try:
        with signals.working():
            try:
                send(signal.{name})
            finally:
                time.sleep(0.01)
                print("cleaned up")
    except KeyboardInterrupt:
        raise SystemExit(130)
    """
    assert python(program, status=status) == "cleaned up\n"


def test_a_second_signal_ends_at_once_but_not_a_repeated_first_one() -> None:
    """A terminal that closes sends SIGHUP twice."""
    program = """
    with signals.working():
        try:
            send(signal.SIGHUP)
        finally:
            send(signal.SIGHUP)
            send(signal.SIGTERM)
            print("cleans up", flush=True)
            time.sleep(0.4)
            send(signal.SIGTERM)
            print("not reached", flush=True)
    """
    assert python(program, status=143) == "cleans up\n"


def test_after_one_that_was_dealt_with_the_next_is_a_first_one() -> None:
    program = """
    with signals.working():
        for _ in range(3):
            try:
                send()
            except KeyboardInterrupt:
                print("stopped")
                signals.handled()
    assert signals.status is None
    """
    assert python(program, status=0) == "stopped\n" * 3


def test_one_that_waits_for_an_import_ends_the_import_of_the_next() -> None:
    program = IMPORT.replace("{body}", "send()").replace(
        "            import victim\n",
        "            import victim\n            with signals.importing():\n"
        "                time.sleep(1)\n",
    )
    assert python(program, status=130) == ""


@pytest.mark.parametrize(
    "program",
    [
        "try: send()\nfinally: print('not reached')",
        "with signals.working(), signals.importing():\n    try: send()\n"
        "    finally: print('not reached')",
    ],
    ids=["before the work", "before the work's modules are there"],
)
def test_where_nothing_is_to_be_cleaned_up_it_ends_at_once(program: str) -> None:
    assert python(program, status=130) == ""


def test_what_the_parent_made_it_ignore_stays_ignored(model: str) -> None:
    result = subprocess.run(
        [*SRT, "--version"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0
    program = """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Signals().install()
    with signals.working():
        send(signal.SIGHUP)
    """
    assert python(program, status=0) == ""


def run_interrupted(command: list[str], delay: float, signum: signal.Signals) -> tuple[int, str]:
    """Status and stderr of a command that gets a signal some time after its handlers are there.

    Before that, Python itself starts: SIGINT ends it with a traceback of its `site` module, or
    kills it.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    status = Path(f"/proc/{process.pid}/status")
    last = 1 << (signal.SIGHUP - 1)  # the one that is installed last
    while process.poll() is None:
        caught = re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.MULTILINE)
        if caught is not None and int(caught[1], 16) & last:
            break
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def check_random_moments(command: list[str], count: int, seed: int) -> None:
    """Sends signals at random moments of a command's life; none may leave more than a status."""
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - started
    rng = random.Random(seed)
    statuses = []
    for _ in range(count):
        signum = rng.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        delay = rng.uniform(0, seconds)
        status, err = run_interrupted(command, delay, signum)
        assert status in (0, 128 + signum), f"{signum.name} after {delay:.3f} s: {status}\n{err}"
        assert err == "", f"{signum.name} after {delay:.3f} s"
        statuses.append(status)
    assert any(statuses), "no signal came in time"


def test_at_random_moments(model: str) -> None:
    check_random_moments(generate(model), 2, seed=0)
    check_random_moments([*SRT, "--help"], 4, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_at_many_random_moments(model: str, seed: int) -> None:
    check_random_moments(generate(model), 20, seed)
    check_random_moments([*SRT, "env"], 10, seed)
    check_random_moments([*SRT, "inspect", model], 10, seed)
    check_random_moments([*SRT, "--help"], 20, seed)
