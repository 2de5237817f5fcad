"""The thread policy over made-up machines, and what happens when the system refuses it."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from srt.test.ci_register import register_cpu_ci
from srt.utils.threads import (
    ThreadPlan,
    apply_thread_plan,
    interleave_memory,
    parse_cpu_list,
    plan_threads,
)

register_cpu_ci(est_time=3, suite="per-commit")


def make_machine(
    root: Path, cores: list[list[int]], nodes: list[str], quota: str | None = None
) -> Path:
    """A file tree with these physical cores (lists of CPUs) and nodes (CPU lists)."""
    for core in cores:
        for cpu in core:
            topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "core_cpus_list").write_text(",".join(map(str, core)) + "\n")
    for number, cpus in enumerate(nodes):
        node = root / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
    if quota is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("0::/box\n")
        box = root / "sys/fs/cgroup/box"
        box.mkdir(parents=True)
        (box / "cpu.max").write_text(f"{quota}\n")
    return root


PLAIN = [[0], [1], [2], [3]]
SMT = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("cores", "affinity", "quota", "threads", "cpus"),
    [
        (PLAIN, range(4), None, 4, None),
        (PLAIN, [2, 3], None, 2, None),
        (SMT, range(8), None, 4, {0, 1, 2, 3}),
        (SMT, [1, 5, 6], None, 2, {1, 6}),
        (SMT, [0, 1], None, 2, None),
        (PLAIN, range(4), "250000 100000", 2, None),
        (PLAIN, range(4), "50000 100000", 1, None),
        (PLAIN, range(4), "800000 100000", 4, None),
        (PLAIN, range(4), "max 100000", 4, None),
        ([], range(3), None, 3, None),
    ],
    ids=[
        "plain",
        "part of the machine",
        "hardware threads",
        "part of the hardware threads",
        "one thread of each core",
        "quota",
        "quota below one",
        "quota above the cores",
        "no quota",
        "a system that does not tell",
    ],
)
def test_policy(
    tmp_path: Path,
    cores: list[list[int]],
    affinity: Iterable[int],
    quota: str | None,
    threads: int,
    cpus: set[int] | None,
) -> None:
    root = make_machine(tmp_path, cores, ["0-7"], quota)
    plan = plan_threads(None, affinity=affinity, environ={}, root=root)
    assert plan.threads == threads
    assert plan.cpus == (None if cpus is None else frozenset(cpus))
    assert plan.nodes == ()


@pytest.mark.parametrize(
    ("requested", "omp", "threads", "reason"),
    [
        (3, "2", 3, "as asked for"),
        (None, "2", 2, "OMP_NUM_THREADS"),
        (None, "6,2", 6, "OMP_NUM_THREADS"),
        (None, "0", 4, "4 physical cores in the affinity mask"),
        (None, "many", 4, "4 physical cores in the affinity mask"),
    ],
)
def test_the_users_choice_wins(
    tmp_path: Path, requested: int | None, omp: str, threads: int, reason: str
) -> None:
    root = make_machine(tmp_path, SMT, ["0-7"], "100000 100000" if requested else None)
    plan = plan_threads(requested, affinity=range(8), environ={"OMP_NUM_THREADS": omp}, root=root)
    assert (plan.threads, plan.reason) == (threads, reason)
    assert (plan.cpus is None) == (reason != "4 physical cores in the affinity mask")


@pytest.mark.parametrize(
    ("affinity", "nodes"), [(range(4), (0, 1)), ([0, 1], ()), ([2, 3], ()), ([1, 2], (0, 1))]
)
def test_memory_is_spread_over_the_nodes_in_use(
    tmp_path: Path, affinity: Iterable[int], nodes: tuple[int, ...]
) -> None:
    root = make_machine(tmp_path, PLAIN, ["0-1", "2-3"])
    assert plan_threads(None, affinity=affinity, environ={}, root=root).nodes == nodes


def test_what_the_system_refuses_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = torch.get_num_threads()
    plan = ThreadPlan(1, frozenset({0, 2}), (0, 1), "a test")
    try:
        with caplog.at_level(logging.WARNING):
            apply_thread_plan(plan, set_affinity=refuse, set_interleave=refuse)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    text = caplog.text
    assert "cannot restrict the process to CPUs [0, 2]: [Errno 1] Operation not permitted" in text
    assert "cannot spread memory over NUMA nodes [0, 1]" in text


def test_a_plan_is_carried_out() -> None:
    calls: list[object] = []
    before = torch.get_num_threads()
    try:
        apply_thread_plan(
            ThreadPlan(2, frozenset({3}), (0, 1), "a test"),
            set_affinity=lambda pid, cpus: calls.append((pid, set(cpus))),
            set_interleave=lambda nodes: calls.append(tuple(nodes)),
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert calls == [(0, {3}), (0, 1)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_interleaving_works_or_says_why() -> None:
    """In a child, so that the policy does not outlive the test."""
    pid = os.fork()
    if pid == 0:
        try:
            interleave_memory([0])
        except OSError as error:
            os._exit(0 if error.strerror or error.args else 1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", [0, 1, 2, 3, 8]), ("5\n", [5]), ("", []), ("1,3", [1, 3])]
)
def test_cpu_lists(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_this_machine() -> None:
    plan = plan_threads(None, environ={})
    assert 1 <= plan.threads <= (os.cpu_count() or 1)
