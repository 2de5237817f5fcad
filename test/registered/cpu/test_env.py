"""`srt env`: what a bug report needs, also when the kernels are broken, and never a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from srt.cli.main import main
from srt.environment.report import collect_environment, find_problems
from srt.test.ci_register import register_cpu_ci
from srt.utils.host_memory import HostMemory, read_cpu_quota, read_host_memory

register_cpu_ci(est_time=8, suite="per-commit")

MIB = 1 << 20


def test_reports_versions_machine_and_kernels() -> None:
    environment = collect_environment()
    assert environment["versions"].keys() >= {"srt", "sgl-kernel-cpu", "torch", "transformers"}
    assert all(environment["versions"].values())
    assert environment["kernels"]["tier"] in environment["kernels"]["tiers_available"]
    assert environment["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["cpu"]["logical_cpus"] == os.cpu_count()
    assert environment["torch"]["threads"] >= 1
    assert find_problems(environment) == []
    json.dumps(environment)


def test_prints_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for section in collect_environment():
        assert f"\n{section}" in f"\n{printed}"
    assert "problem" not in printed


def test_masks_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {
        "OMP_NUM_THREADS": "3",
        "SGL_KERNEL_TEST": "on",
        "KMP_AFFINITY": "compact",
        "MKL_VERBOSE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    secrets = ["HF_TOKEN", "HF_API_KEY", "SGL_secret", "HF_PASSWORD", "HF_AUTH_HEADER"]
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    for name in secrets:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hunter2@hub.example/path")
    monkeypatch.setenv("UNRELATED_TOKEN", "hunter2")
    for argv in (["env"], ["env", "--json"]):
        assert main(argv) == 0
        assert "hunter2" not in capsys.readouterr().out
    variables = collect_environment()["environment"]
    assert variables.items() >= shown.items()
    assert {variables[name] for name in secrets} == {"****"}
    assert variables["HF_ENDPOINT"] == "https://****@hub.example/path"
    assert "UNRELATED_TOKEN" not in variables


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_reports_broken_kernels(tmp_path: Path, error: str) -> None:
    broken = tmp_path / "sgl_kernel"
    broken.mkdir()
    (broken / "__init__.py").write_text(f"raise {error}('no such symbol')")
    search_path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-m", "srt", "env", "--json"],
        env={**os.environ, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=True,
    )
    environment = json.loads(result.stdout)
    assert environment["kernels"]["problem"] == f"{error}: no such symbol"
    assert find_problems(environment) == [f"kernels: {error}: no such symbol"]
    assert environment["cpu"]["logical_cpus"] == os.cpu_count()


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  8192 kB\nMemFree:  10 kB\nMemAvailable:  4096 kB\n"}


def test_memory_without_cgroup(tmp_path: Path) -> None:
    assert read_host_memory(tmp_path) == HostMemory(None, None, None)
    write_files(tmp_path, MEMINFO)
    assert read_host_memory(tmp_path) == HostMemory(8 * MIB, 4 * MIB, None)


def test_memory_limit_of_a_parent_cgroup(tmp_path: Path) -> None:
    """The tightest of the limits from here up to the root counts; file cache gives way."""
    cgroup = "sys/fs/cgroup/slice"
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        f"{cgroup}/job/memory.max": "max\n",
        f"{cgroup}/job/memory.current": f"{MIB}\n",
        f"{cgroup}/memory.max": f"{3 * MIB}\n",
        f"{cgroup}/memory.current": f"{2 * MIB}\n",
        f"{cgroup}/memory.stat": f"anon 5\ninactive_file {MIB // 2}\n",
    }
    write_files(tmp_path, {**MEMINFO, **files})
    assert read_host_memory(tmp_path) == HostMemory(8 * MIB, 3 * MIB // 2, 3 * MIB)


def test_memory_limit_of_cgroup_version_1(tmp_path: Path) -> None:
    cgroup = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n",
        f"{cgroup}/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        f"{cgroup}/job/memory.limit_in_bytes": f"{2 * MIB}\n",
        f"{cgroup}/job/memory.usage_in_bytes": f"{MIB}\n",
    }
    write_files(tmp_path, {**MEMINFO, **files})
    assert read_host_memory(tmp_path) == HostMemory(8 * MIB, MIB, 2 * MIB)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert read_cpu_quota(write_files(tmp_path, files)) == expected
