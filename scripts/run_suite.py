#!/usr/bin/env python3
"""Run the registered tests of a suite, or list them.

A test file under test/registered/ says at module level which suite it belongs to and how many
seconds it takes:

    register_cpu_ci(est_time=4, suite="per-commit")

The line is read from the syntax tree, so no test is imported to find or list it. Files that would
silently not run (no registration, an unknown suite, a name pytest does not collect, a test without
its ``test_`` prefix) are errors.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REGISTERED = ROOT / "test" / "registered"
# Functions of srt.test.ci_register and the machines they mean; a GPU test skips itself elsewhere.
BACKENDS = {"register_cpu_ci": "cpu", "register_gpu_ci": "gpu"}
# A suite runs its own files and those of the suites before it.
SUITES = ("per-commit", "full")
# A file is reported when it took this many times its estimate and at least this many seconds more.
OVERRUN_FACTOR = 2.0
OVERRUN_SECONDS = 2.0
# What pytest or unittest calls by name.
HOOKS = frozenset(
    f"{stage}_{scope}"
    for stage in ("setup", "teardown")
    for scope in ("module", "function", "class", "method")
) | {"setUp", "tearDown", "setUpClass", "tearDownClass", "__init__", "__getattr__"}

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Registration:
    """What a test file says of itself: path below the root, backend, seconds and suite."""

    path: str
    backend: str
    est_time: float
    suite: str


class SuiteError(Exception):
    """A file under test/registered/ that would not run as its author expects."""


def _called_name(node: ast.expr) -> str:
    """The last part of a dotted name, called or not: ``fixture`` of ``@pytest.fixture(...)``."""
    if isinstance(node, ast.Call):
        return _called_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_collected_class(node: ast.ClassDef) -> bool:
    return node.name.startswith("Test") or any(
        _called_name(base).endswith("TestCase") for base in node.bases
    )


def _defines_tests(tree: ast.Module) -> bool:
    return any(
        (isinstance(node, Function) and node.name.startswith("test"))
        or (isinstance(node, ast.ClassDef) and _is_collected_class(node))
        for node in tree.body
    )


def _uncollected(tree: ast.Module) -> Iterator[str]:
    """Functions and classes of a test file that neither pytest nor the file itself runs."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    def is_idle(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        decorators = {_called_name(decorator) for decorator in function.decorator_list}
        return not (
            function.name.startswith(("test", "pytest_"))
            or function.name in used | HOOKS
            or decorators & {"fixture", "property"}
        )

    for node in tree.body:
        if isinstance(node, Function) and is_idle(node):
            yield f"line {node.lineno}: nothing calls {node.name}(); a test is named test_*"
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [item for item in node.body if isinstance(item, Function)]
        if not _is_collected_class(node):
            if any(method.name.startswith("test") for method in methods):
                yield f"line {node.lineno}: class {node.name} holds tests but is not named Test*"
            continue
        for method in methods:
            if is_idle(method):
                name = f"{node.name}.{method.name}"
                yield f"line {method.lineno}: nothing calls {name}(); a test is named test_*"


def _parse_call(call: ast.Call, path: str) -> Registration:
    register = _called_name(call.func)
    try:
        given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise SuiteError(
            f"{path}:{call.lineno}: {register} takes literals only: it is read without running"
        ) from None
    if call.args or set(given) != {"est_time", "suite"}:
        raise SuiteError(
            f"{path}:{call.lineno}: expected {register}(est_time=<seconds>, suite=<name>), "
            f"got {ast.unparse(call)}"
        )
    est_time, suite = given["est_time"], given["suite"]
    if isinstance(est_time, bool) or not isinstance(est_time, (int, float)) or est_time <= 0:
        raise SuiteError(
            f"{path}:{call.lineno}: est_time must be a positive number of seconds, got {est_time!r}"
        )
    if suite not in SUITES:
        raise SuiteError(
            f"{path}:{call.lineno}: unknown suite {suite!r}, expected one of {', '.join(SUITES)}"
        )
    return Registration(path, BACKENDS[register], float(est_time), suite)


def read_registration(file: Path, root: Path = ROOT) -> Registration | None:
    """Read the registration of one Python file.

    Args:
        file: the file.
        root: directory that paths in results and messages are relative to.

    Returns:
        The registration, or None for a helper module (no ``test_`` prefix and no tests in it).

    Raises:
        SuiteError: the file would not run as its author expects; the message names file and line.
    """
    path = file.relative_to(root).as_posix()
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=path)
    except SyntaxError as error:
        raise SuiteError(f"{path}:{error.lineno}: {error.msg}") from None

    everywhere = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called_name(node.func) in BACKENDS
    ]
    if not file.name.startswith("test_"):
        if everywhere or _defines_tests(tree):
            raise SuiteError(f"{path}: holds tests, so its name must be test_*.py")
        return None

    calls = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _called_name(node.value.func) in BACKENDS
    ]
    if len(calls) != 1 or len(everywhere) != 1:
        raise SuiteError(
            f"{path}: expected one {' or '.join(BACKENDS)}(...) at module level, "
            f"found {len(calls)} there and {len(everywhere) - len(calls)} elsewhere"
        )
    if not _defines_tests(tree):
        raise SuiteError(f"{path}: defines no test")
    if idle := list(_uncollected(tree)):
        raise SuiteError("\n".join(f"{path}: {problem}" for problem in idle))
    return _parse_call(calls[0], path)


def find_registrations(directory: Path = REGISTERED, root: Path = ROOT) -> list[Registration]:
    """Read every Python file below ``directory``; raise one SuiteError that holds all problems."""
    found: list[Registration] = []
    problems: list[str] = []
    for file in sorted(directory.rglob("*.py")):
        try:
            registration = read_registration(file, root)
        except SuiteError as error:
            problems.append(str(error))
        else:
            if registration is not None:
                found.append(registration)
    if problems:
        raise SuiteError("\n".join(problems))
    return found


def select(
    registrations: Sequence[Registration], suite: str, device: str | None = None
) -> list[Registration]:
    """The files that ``suite`` runs: its own and those of the suites before it in SUITES.

    With a ``device``, only the files that are registered for it.
    """
    names = SUITES[: SUITES.index(suite) + 1]
    return [r for r in registrations if r.suite in names and device in (None, r.backend)]


class FileTimes:
    """A pytest plugin that adds up the seconds spent in each file and reports them at the end."""

    def __init__(self, chosen: Sequence[Registration]) -> None:
        self.chosen = chosen
        self.seconds: dict[str, float] = defaultdict(float)

    def _add(self, nodeid: str, seconds: float) -> None:
        self.seconds[nodeid.split("::", 1)[0]] += seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for the setup, call and teardown of each test."""
        self._add(report.nodeid, report.duration)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Called by pytest around the collection of each node; for a module this is its import."""
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self._add(collector.nodeid, time.perf_counter() - start)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Called by pytest before its closing line."""
        terminalreporter.write_line("")
        for line in time_table(self.chosen, self.seconds):
            terminalreporter.write_line(line)


def time_table(chosen: Sequence[Registration], seconds: dict[str, float]) -> Iterator[str]:
    """Lines of a table of estimated and actual seconds; a file far over its estimate is marked."""
    width = max(len(registration.path) for registration in chosen)
    yield f"{'file':<{width}}  estimate   actual"
    for registration in chosen:
        actual, estimate = seconds.get(registration.path, 0.0), registration.est_time
        over = actual > OVERRUN_FACTOR * estimate and actual > estimate + OVERRUN_SECONDS
        note = f"  over {OVERRUN_FACTOR:g}x: make it faster or raise est_time" if over else ""
        yield f"{registration.path:<{width}}  {estimate:>6.1f} s {actual:>6.1f} s{note}"
    estimate = sum(registration.est_time for registration in chosen)
    yield f"{'total':<{width}}  {estimate:>6.1f} s {sum(seconds.values()):>6.1f} s"


def run(chosen: Sequence[Registration], suite: str, pytest_args: Sequence[str]) -> int:
    """Run the chosen files in one pytest process and return pytest's exit status."""
    # `slow` tests of a per-commit file wait for the full suite.
    marks = [] if suite == SUITES[-1] else ["-m", "not slow"]
    files = [str(ROOT / registration.path) for registration in chosen]
    arguments = ["--rootdir", str(ROOT), *marks, *pytest_args, *files]
    return int(pytest.main(arguments, plugins=[FileTimes(chosen)]))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: pytest's, or 2 when the registrations are wrong."""
    parser = argparse.ArgumentParser(
        description="Run or list the tests registered under test/registered/.",
        epilog="Arguments after -- go to pytest.",
    )
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0])
    parser.add_argument(
        "--device",
        choices=sorted(BACKENDS.values()),
        help="only the files registered for it (default: all; GPU tests skip themselves elsewhere)",
    )
    parser.add_argument("--list", action="store_true", help="list the suite's files, run nothing")
    parser.add_argument("--json", action="store_true", help="with --list: print JSON")
    parser.add_argument("pytest_args", nargs="*", metavar="-- PYTEST_ARG", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.json and not options.list:
        parser.error("--json needs --list")

    try:
        chosen = select(find_registrations(), options.suite, options.device)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(registration) for registration in chosen], indent=2))
        return 0
    if options.list:
        for registration in chosen:
            print(
                f"{registration.est_time:>7.1f} s  {registration.suite:<10}  "
                f"{registration.backend}  {registration.path}"
            )
        return 0
    if not chosen:
        where = f" on {options.device}" if options.device else ""
        print(f"error: no test is registered for suite {options.suite}{where}", file=sys.stderr)
        return 2
    return run(chosen, options.suite, options.pytest_args)


if __name__ == "__main__":
    sys.exit(main())
