"""Checkpoint: one mapped view over safetensors files, and what it says about damaged ones."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from srt.checkpoint.checkpoint import Checkpoint
from srt.errors import CheckpointError
from srt.layers.dtypes import TORCH_DTYPES
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="per-commit")

ROOT = Path(__file__).parents[3]

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}


def write_sharded(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(directory, weight_map)


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4), (0, 4)])
def test_reads_back_what_was_saved(tmp_path: Path, code: str, shape: tuple[int, ...]) -> None:
    saved = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[code])
    save_file({"w": saved}, tmp_path / "model.safetensors")
    with MappedCheckpoint.open(tmp_path) as checkpoint:
        meta = checkpoint.meta("w")
        assert (meta.dtype, meta.shape, meta.file.name) == (code, shape, "model.safetensors")
        assert TORCH_DTYPES[meta.dtype] == DTYPES[code]
        assert meta.nbytes == checkpoint.nbytes == saved.nbytes
        read = checkpoint.get("w")
        assert read.dtype == saved.dtype
        assert torch.equal(read.float(), saved.float())


def test_sharded_checkpoint_is_one_view(tmp_path: Path) -> None:
    a, b, c = torch.ones(2, 3), torch.zeros(4), torch.full((5,), 7.0)
    write_sharded(tmp_path, {"s1.safetensors": {"b": b, "a": a}, "s2.safetensors": {"c": c}})
    with MappedCheckpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names() == ["a", "b", "c"]
        assert [file.name for file in checkpoint.files] == ["s1.safetensors", "s2.safetensors"]
        assert checkpoint.nbytes == (6 + 4 + 5) * 4
        assert {meta.name: meta.file.name for meta in checkpoint}["c"] == "s2.safetensors"
        assert torch.equal(checkpoint.get("c"), c)
        assert "a" in checkpoint
        assert "x" not in checkpoint


def test_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"s1.safetensors": {"old": torch.ones(1)}})
    save_file({"new": torch.ones(1)}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).names() == ["new"]


def test_tensors_survive_release_and_close(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "model.safetensors")
    checkpoint = MappedCheckpoint.open(tmp_path)
    first = checkpoint.get("w")
    checkpoint.release()
    second = checkpoint.get("w")
    checkpoint.close()
    assert torch.equal(first, torch.arange(6.0))
    assert torch.equal(second, first)
    with pytest.raises(ValueError, match="closed"):
        checkpoint.get("w")
    assert checkpoint.meta("w").shape == (6,)


def test_unknown_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such tensor") as caught:
        MappedCheckpoint.open(tmp_path).get("v")
    assert caught.value.tensor == "v"


def expect_error(directory: Path, *parts: str) -> CheckpointError:
    """Opening must fail, and the message must contain every one of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    for part in parts:
        assert part in str(caught.value)
    return caught.value


def test_missing_directory(tmp_path: Path) -> None:
    expect_error(tmp_path / "none", "none", "no such checkpoint directory")


def test_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    expect_error(tmp_path / "f", "expected: a directory", "found: a file")


def test_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    expect_error(tmp_path, "no safetensors weights", "found: pytorch_model.bin")


def test_absent_shard(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "s1.safetensors")
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"})
    expect_error(tmp_path, "s2.safetensors", "absent", "expected: a file with 2 tensors")


@pytest.mark.parametrize("kept", [0, 5, 8, 40, 4000, -1])
def test_truncated_file_tells_bytes(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, file)
    whole = file.read_bytes()
    cut = whole[:kept]
    file.write_bytes(cut)
    error = expect_error(tmp_path, str(file), "truncated", f"{len(cut)} bytes")
    if kept in (4000, -1):
        assert (error.expected, error.found) == (f"{len(whole)} bytes", f"{len(cut)} bytes")


def test_trailing_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, file)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"xyz")
    expect_error(tmp_path, "longer", f"expected: {size} bytes", f"found: {size + 3} bytes")


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 3}', b'{"a": {"data_offsets": [0]}}'])
def test_corrupt_header(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    expect_error(tmp_path, str(file), "corrupt header")


def entry(shape: list[int], *offsets: int) -> str:
    return json.dumps({"dtype": "F32", "shape": shape, "data_offsets": offsets})


@pytest.mark.parametrize(
    ("entries", "nbytes"),
    [
        ([("a", entry([1], 0, 4)), ("a", entry([1], 4, 8))], 8),
        ([("a", entry([1], 0, 4)), ("b", entry([1], 2, 6))], 6),
        ([("a", entry([1], 0, 4)), ("b", entry([1], 8, 12))], 12),
        ([("a", entry([2], 0, 4))], 4),
        ([("a", entry([-1], 0, 4))], 4),
        ([("a", entry([1 << 32, 1 << 32], 0, 4))], 4),
        ([("a", entry([1], 4, 0))], 4),
    ],
    ids=["twice", "overlap", "hole", "other shape", "negative", "overflow", "backwards"],
)
def test_contradicting_header(tmp_path: Path, entries: list[tuple[str, str]], nbytes: int) -> None:
    header = ("{" + ",".join(f'"{name}":{value}' for name, value in entries) + "}").encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
    expect_error(tmp_path, str(file), "header")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("srt.checkpoint.headers.safe_open", refuse)
    monkeypatch.setattr("srt.checkpoint.files.os.open", refuse)
    expect_error(tmp_path, "model.safetensors", "cannot read file", "Permission denied")


@pytest.mark.parametrize("change", ["unlink", "truncate"])
def test_file_that_changes_after_it_was_opened(tmp_path: Path, change: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1000)}, file)
    checkpoint = MappedCheckpoint.open(tmp_path)
    file.unlink()
    if change == "truncate":
        file.write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="cannot read tensor") as caught:
        checkpoint.get("w")
    assert (caught.value.file, caught.value.tensor) == (file, "w")


def test_git_lfs_pointer(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / "model.safetensors").write_text(text)
    expect_error(tmp_path, "Git LFS pointer")


def test_unsupported_dtype(tmp_path: Path) -> None:
    save_file({"z": torch.ones(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    expect_error(tmp_path, "tensor: z", "unsupported dtype", "found: C64")


@pytest.mark.parametrize("holder", ["s2.safetensors", None])
def test_tensor_not_where_the_index_says(tmp_path: Path, holder: str | None) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "s1.safetensors")
    save_file(
        {"c": torch.ones(1), **({"b": torch.ones(1)} if holder else {})},
        tmp_path / "s2.safetensors",
    )
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"})
    found = f"found: in {holder or 'no file'}"
    expect_error(tmp_path, "tensor: b", "expected: in s1.safetensors", found)


def test_name_in_two_files(tmp_path: Path) -> None:
    for file in ("s1.safetensors", "s2.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / file)
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s2.safetensors"})
    expect_error(tmp_path, "tensor: a", "in two files", "s1.safetensors", "s2.safetensors")


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_index_without_tensors(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    expect_error(tmp_path, "index lists no tensors", "weight_map")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "", ".."])
def test_index_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, {"a": name})
    expect_error(tmp_path, "outside its directory", repr(name))


def test_index_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    expect_error(tmp_path, "cannot read JSON", "model.safetensors.index.json")


def run_python(code: str, *args: str) -> str:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


FLOOR = ROOT / "srt" / "checkpoint"
# What takes seconds to import.
HEAVY = ("torch", "transformers")


def test_what_a_checkpoint_says_is_told_without_torch(tmp_path: Path) -> None:
    """No module of the folder imports it anywhere, nor does anything that these import."""
    files = sorted(FLOOR.rglob("*.py"))
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {*HEAVY}, f"{file}: {names}"
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files
    ]
    save_file({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    code = f"""
import sys
import {", ".join(modules)}
checkpoint = srt.checkpoint.checkpoint.Checkpoint.open(sys.argv[1])
assert checkpoint.meta("w").shape == (2,)
print(sys.modules.keys() & {{*{HEAVY!r}}})
"""
    assert run_python(code, str(tmp_path)).strip() == "set()"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_release_keeps_memory_near_the_checkpoint_size(tmp_path: Path) -> None:
    """Cloning every tensor and releasing after each costs the clones and one tensor, not twice."""
    layers, mib = 16, 8
    tensors = {f"{i}": torch.ones(mib, 1 << 20, dtype=torch.uint8) for i in range(layers)}
    save_file(tensors, tmp_path / "model.safetensors")
    code = """
import re, sys, torch
from pathlib import Path
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
checkpoint = MappedCheckpoint.open(sys.argv[1])
checkpoint.get("0")
before, kept = peak(), []
for name in checkpoint.names():
    kept.append(checkpoint.get(name).clone())
    if sys.argv[2] == "release":
        checkpoint.release()
print(peak() - before)
"""
    total = layers * mib
    released = int(run_python(code, str(tmp_path), "release"))
    held = int(run_python(code, str(tmp_path), "hold"))
    assert total - mib <= released <= total + 2 * mib + 8
    assert held >= 2 * total - 2 * mib  # what the method is for
