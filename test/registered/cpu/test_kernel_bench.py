"""The benchmark runs, writes what it found, and tells a slower run from an equal one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sgl_kernel
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="per-commit")

BENCHMARK = Path(__file__).parents[3] / "sgl-kernel-cpu" / "benchmark" / "bench_gemm.py"
TINY = "--shapes smollm2-135m,mla --m 1,5 --rounds 2 --seconds 0.01 --rotate-mib 1 --no-peers"


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Standard output and the JSON file of a run that takes a second or two."""
    file = tmp_path_factory.mktemp("bench") / "run.json"
    done = bench(*TINY.split(), "--isa", "scalar", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout, file


def test_every_op_is_timed_at_every_shape(run: tuple[str, Path]) -> None:
    document = json.loads(run[1].read_text())
    timed = {(r["shape"], r["m"], r["method"]) for r in document["results"]}
    linear = {
        "fp8 per-tensor",
        "fp8 recorded",
        "fp8 per-tensor, bias",
        "fp8 per-tensor, fp16",
        "fp8 per-channel",
        "fp8 block 128x128",
        "bf16 packed",
    }
    for layer in ("qkv", "o", "gate_up", "down"):
        for m in (1, 5):
            assert {t[2] for t in timed if t[:2] == (f"SmolLM2-135M {layer}", m)} == linear
    assert {t[2] for t in timed if "MLA" in t[0]} == {"fp8 bmm", "bf16 bmm"}
    for result in document["results"]:
        flops = 2 * result["m"] * result["n"] * result["k"] * max(1, result["batch"])
        assert result["gflops"] == pytest.approx(flops / result["median"] / 1e9)
        # How large is the machine's affair: such small weights stay in cache, and it may be shared.
        assert result["efficiency"] > 0


def test_header_and_sections(run: tuple[str, Path]) -> None:
    output, file = run
    machine = json.loads(file.read_text())["machine"]
    assert machine["tier"] == "scalar"
    assert machine["cpus_allowed"] == sorted(os.sched_getaffinity(0))
    assert machine["environment"]["SGL_KERNEL_ISA"] == "scalar"
    for text in (
        sgl_kernel.cpu_info()["cpu_model"],
        "tier scalar",
        "load average",
        "share of copy",
    ):
        assert text in output


def test_small_calls_and_packing_add_up(run: tuple[str, Path]) -> None:
    document = json.loads(run[1].read_text())
    assert {row["shape"] for row in document["overhead"]} == {
        f"N={n} K=576" for n in (192, 576, 1536)
    }
    for row in document["overhead"]:
        # By how much an empty op is slower after a call is the machine's affair.
        assert min(row[part] for part in ("call", "kernel", "empty", "empty_after")) > 0
        rest = row["call"] - row["kernel"] / row["parts"] - row["empty_after"]
        assert row["excess"] == pytest.approx(rest)
    packed = {row["weight"]: row for row in document["packing"]}
    assert len(packed) == 2
    rows = {name.split()[-1]: int(name.split()[0]) for name in packed}
    assert rows["float8_e4m3fn"] == 2 * rows["bfloat16"]  # as many bytes
    for row in packed.values():
        assert row["of_copy"] > 0


def changed(run: tuple[str, Path], to: Path, factor: float, **machine: Any) -> str:
    """The run again, as a file, with all efficiencies times ``factor``."""
    document = json.loads(run[1].read_text())
    document["machine"] |= machine
    for result in document["results"]:
        result["efficiency"] *= factor
        result["spread"] = 0.01
    to.write_text(json.dumps(document))
    return str(to)


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (0.95, 0), (1.5, 0), (0.8, 1)])
def test_compare(run: tuple[str, Path], tmp_path: Path, factor: float, status: int) -> None:
    before = changed(run, tmp_path / "a.json", 1.0)
    after = changed(run, tmp_path / "b.json", factor)
    done = bench("compare", before, after)
    assert done.returncode == status, done.stderr
    assert ("SLOWER" in done.stdout) == (status == 1)


def test_compare_refuses_other_machines_and_other_files(
    run: tuple[str, Path], tmp_path: Path
) -> None:
    before = changed(run, tmp_path / "a.json", 1.0)
    after = changed(run, tmp_path / "b.json", 1.0, tier="avx2")
    done = bench("compare", before, after)
    assert done.returncode == 2
    assert "tier differs: 'scalar' in" in done.stderr
    (tmp_path / "c.json").write_text("{}")
    for path, message in (("c.json", "not a file that"), ("d.json", "No such file")):
        done = bench("compare", before, str(tmp_path / path))
        assert done.returncode == 2
        assert message in done.stderr


def test_markdown(run: tuple[str, Path]) -> None:
    done = bench("markdown", str(run[1]))
    assert done.returncode == 0, done.stderr
    assert "SmolLM2-135M qkv: N=960, K=576" in done.stdout
    assert done.stdout.count("\n| 5 |") == 6  # a row for M=5 in each shape's table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shapes nonesuch", "--shapes: unknown nonesuch; expected any of square,"),
        ("--m 1,x", "--m: expected row counts with commas, got '1,x'"),
        ("--m 0", "--m: expected 1 or more, got 0"),
        ("--threads 0", "--threads: expected 1 or more, got 0"),
        ("--json nowhere/a.json", "argument --json: nowhere/a.json: there is no directory nowhere"),
        ("--json /", "argument --json: / is a directory"),
        ("--plot a.txt", "argument --plot: a.txt: expected a name in .png, .svg or .pdf"),
    ],
)
def test_bad_arguments(arguments: str, message: str) -> None:
    done = bench(*arguments.split())
    assert done.returncode == 2
    assert message in done.stderr
