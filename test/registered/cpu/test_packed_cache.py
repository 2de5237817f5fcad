"""Packed weights on disk: a second start maps what the first one wrote, and only if nothing has
changed.
"""

import ast
import errno
import fcntl
import json
import os
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sgl_kernel
from srt import Engine, SamplingParams
from srt.checkpoint import fingerprint
from srt.checkpoint.formats.schemes import QUANTIZATION_CHOICES
from srt.checkpoint.writer import CheckpointWriter
from srt.cli.main import main
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, SrtError
from srt.model_loader import loader, mapped_checkpoint, packed_layout
from srt.model_loader.loader import load_model
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import write_fp8_checkpoint
from srt.test.fp8_formats import FORMATS
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_models import ARCHITECTURES
from srt.test.tiny_models import make_tensors as make_model_tensors
from srt.test.tiny_text_model import FP8
from srt.utils.process_memory import mapped_rss

register_cpu_ci(est_time=9, suite="per-commit")

WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def settled_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once: the test's are younger than the clock's tick."""
    monkeypatch.setattr(fingerprint, "_RACY_NS", 0)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modules that were loaded the long way."""
    names: list[str] = []
    load_module = loader._load_module

    def spy(plan: Any, *args: Any) -> int:
        names.append(plan.name)
        return load_module(plan, *args)

    monkeypatch.setattr(loader, "_load_module", spy)
    return names


def write(directory: Path, seed: int = 0) -> Path:
    tensors = quantize(make_tensors(TINY_CONFIG, seed))
    return write_checkpoint(directory / "model", TINY_CONFIG, tensors, FP8)


def start(path: Path, cache: Path | None, **options: Any) -> dict[str, Tensor]:
    """One start; returns the parameters."""
    model: nn.Module = load_model(
        ModelConfig.from_pretrained(path, **options), progress=False, packed_cache=cache
    )
    assert not any(p.is_meta or p.requires_grad for p in model.parameters())
    return {name: parameter.data for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        a, b = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(a, b), name


def entry_of(cache: Path) -> Path:
    """The only entry; nothing else is left behind."""
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    assert list(cache.iterdir()) == [entry]
    return entry


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# Every way in which a layer's parameters differ once they are packed: (format, architecture).
CHECKPOINTS = [
    ("bf16", "llama-bias"),
    ("bf16", "llama-tied"),
    ("autofp8-static", "llama"),
    ("mistral-hf-channel", "ministral3"),
    ("mistral-own", "mistral"),
    ("deepseek-small-blocks", "qwen3"),
    ("autofp8-dynamic", "deepseek-v3"),
    ("deepseek", "deepseek-v2"),
    ("bf16", "deepseek-v3"),
]


def write_model(directory: Path, fmt: str, architecture: str) -> Path:
    config = ARCHITECTURES[architecture]
    tensors = make_model_tensors(config)
    if fmt == "bf16":
        return write_checkpoint(directory, dict(config), tensors)
    write_fp8_checkpoint(FORMATS[fmt], directory, config, tensors)
    return directory


@pytest.mark.parametrize(("fmt", "architecture"), CHECKPOINTS)
def test_second_start(fmt: str, architecture: str, tmp_path: Path, packed: list[str]) -> None:
    path, cache = write_model(tmp_path / "model", fmt, architecture), tmp_path / "cache"
    expected = start(path, None)
    assert_same(start(path, cache), expected)
    packed.clear()
    assert_same(start(path, cache), expected)
    assert packed == []
    outputs = []
    for packed_cache in (None, cache):
        with Engine(path, packed_cache=packed_cache, max_total_tokens=64) as engine:
            params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
            outputs.append(engine.generate(input_ids=[5, 6, 7], sampling_params=params).token_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_weights_are_mapped_and_aligned(tmp_path: Path) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    start(path, cache)
    parameters = start(path, cache)
    file = str(entry_of(cache) / "model.safetensors")
    maps = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(file)
    ]
    assert parameters
    for name, tensor in parameters.items():
        address = tensor.data_ptr()
        assert any(first <= address < last for first, last in maps), name
        if tensor.nbytes % 64 == 0:
            assert (address - maps[0][0]) % 64 == 0, name


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_mapped_weights_are_not_counted_as_free(tmp_path: Path) -> None:
    weights = {"w": torch.ones(1 << 24, dtype=torch.uint8)}
    save_file(weights, tmp_path / "model.safetensors")
    before = mapped_rss()
    with MappedCheckpoint.open(tmp_path) as checkpoint:
        mapped = checkpoint.get("w")
        assert mapped.sum() == 1 << 24
        assert 1 << 24 <= mapped_rss() - before < 1 << 25
    assert mapped_rss(tmp_path / "none") == 0


def change_weight(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another weight in a file of the same size and modification time."""
    file = path / "model.safetensors"
    stat = file.stat()
    tensors = load_file(file)
    tensors[WEIGHT].view(torch.uint8)[3, 4] ^= 1
    with file.open("r+b") as stream:
        scratch = path / "changed"
        save_file(tensors, scratch, metadata={"format": "pt"})
        stream.write(scratch.read_bytes())
        scratch.unlink()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size


def change_config(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))


def change_kernel_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl_kernel, "__version__", "9.9")


def change_kernel_layout(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl_kernel, "convert_weight_packed", Tensor.clone)


def change_layout_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layout, "LAYOUT_VERSION", packed_layout.LAYOUT_VERSION + 1)


def change_source(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """srt whose module of this name has another line."""

    def change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = path.parent / "srt"
        shutil.copytree(packed_layout._PACKAGE, package)
        with (package / name).open("a") as stream:
            stream.write("# another line\n")
        monkeypatch.setattr(packed_layout, "_PACKAGE", package)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_weight, f"model has changed: {WEIGHT}$"),
        (change_config, "other configuration$"),
        (change_kernel_version, "other kernels$"),
        (change_kernel_layout, "other kernels$"),
        (change_layout_version, "other layout$"),
        (change_source("layers/quantization/fp8_linear.py"), "other layout$"),
    ],
)
def test_stale_entry_is_rebuilt(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    tmp_path: Path,
    packed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    start(path, cache)
    change(path, monkeypatch)
    packed.clear()
    assert_same(start(path, cache), start(path, None))
    assert packed
    (message,) = warnings(caplog)
    assert re.search(f"is rebuilt; .*{reason}", message)
    packed.clear()
    start(path, cache)
    assert packed == []
    entry_of(cache)


@pytest.mark.parametrize("name", ["managers/scheduler.py", "layers/attention.py", "version.py"])
def test_work_on_something_else_keeps_the_entry(
    name: str, tmp_path: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    start(path, cache)
    change_source(name)(path, monkeypatch)
    packed.clear()
    start(path, cache)
    assert packed == []


def makes_packed_parameters(file: Path) -> bool:
    """Whether a module loads, converts or packs parameters: it declares some, or has a step of its
    own between a tensor that is read and a packed parameter.
    """
    names = {"process_weights_after_loading", "pack_weight_", "to_hf_rows", "materialize"}
    return any(
        (isinstance(node, ast.FunctionDef) and node.name in names | {"_load_module"})
        or (isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Parameter"))
        for node in ast.walk(ast.parse(file.read_text()))
    )


def test_every_module_that_makes_packed_parameters_is_in_the_key() -> None:
    package = packed_layout._PACKAGE
    listed = {file for pattern in packed_layout.LAYOUT_SOURCES for file in package.glob(pattern)}
    assert all(list(package.glob(pattern)) for pattern in packed_layout.LAYOUT_SOURCES)
    folders = ("layers", "models", "model_loader")
    making = {
        file
        for folder in folders
        for file in (package / folder).rglob("*.py")
        if makes_packed_parameters(file)
    }
    assert making <= listed


def flip_byte(entry: Path) -> None:
    file = entry / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def truncate(entry: Path) -> None:
    os.truncate(entry / "model.safetensors", 5000)


def edit_manifest(**changes: Any) -> Callable[[Path], None]:
    def apply(entry: Path) -> None:
        file = entry / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def forget_a_parameter(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    del manifest["parameters"][WEIGHT]
    edit_manifest(parameters=manifest["parameters"])(entry)


def rename_a_layer(entry: Path) -> None:
    """Consistently: the file and the manifest agree."""
    tensors = load_file(entry / "model.safetensors")
    manifest = json.loads((entry / "manifest.json").read_text())
    for held in (tensors, manifest["parameters"]):
        held["model.layers.7.mlp.down_proj.weight"] = held.pop(WEIGHT)
    save_file(tensors, entry / "model.safetensors")
    edit_manifest(parameters=manifest["parameters"])(entry)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one bit of a weight": flip_byte,
    "truncated": truncate,
    "header": lambda entry: (entry / "model.safetensors").write_bytes(b"\xff" * 5000),
    "no weights": lambda entry: (entry / "model.safetensors").unlink(),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "manifest is no JSON": lambda entry: (entry / "manifest.json").write_text("{"),
    "manifest is a list": lambda entry: (entry / "manifest.json").write_text("[]"),
    "manifest is empty": lambda entry: (entry / "manifest.json").write_text("{}"),
    "odd key": edit_manifest(key=3),
    "odd parameters": edit_manifest(parameters=None),
    "odd source": edit_manifest(source_files=None, source_tensors=[]),
    "a parameter is missing": forget_a_parameter,
    "a layer that the model lacks": rename_a_layer,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_rebuilt(
    damage: str, tmp_path: Path, packed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    expected = start(path, cache)
    DAMAGES[damage](entry_of(cache))
    packed.clear()
    assert_same(start(path, cache), expected)
    assert packed
    (message,) = warnings(caplog)
    assert "is rebuilt; it is damaged: " in message
    packed.clear()
    assert_same(start(path, cache), expected)
    assert packed == []


def copy_files(path: Path) -> None:
    for file in list(path.iterdir()):
        copy = path / "copy"
        shutil.copyfile(file, copy)
        copy.replace(file)


@pytest.mark.parametrize("change", [copy_files, lambda path: os.utime(path / "model.safetensors")])
def test_same_content_in_new_files_is_hashed_once(
    change: Callable[[Path], None],
    tmp_path: Path,
    packed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[str] = []
    digest_tensors = mapped_checkpoint.digest_tensors

    def spy(checkpoint: Any, names: Any) -> dict[str, str]:
        hashed.extend(names)
        return digest_tensors(checkpoint, names)

    monkeypatch.setattr("srt.model_loader.packed_cache.digest_tensors", spy)
    path, cache = write(tmp_path), tmp_path / "cache"
    start(path, cache)
    change(path)
    packed.clear()
    start(path, cache)
    assert WEIGHT in hashed
    hashed.clear()
    start(path, cache)
    assert (hashed, packed) == ([], [])


def test_files_that_changed_just_now_are_hashed_at_the_next_start(
    tmp_path: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the clock's tick would show in no time stamp."""
    monkeypatch.setattr(fingerprint, "_RACY_NS", 3600_000_000_000)
    path, cache = write(tmp_path), tmp_path / "cache"
    start(path, cache)
    assert json.loads((entry_of(cache) / "manifest.json").read_text())["source_files"] is None
    packed.clear()
    start(path, cache)
    assert packed == []
    change_weight(path, monkeypatch)
    start(path, cache)
    assert packed


@pytest.mark.parametrize("option", ["dtype", "quantization"])
def test_options_have_their_own_entries(option: str, tmp_path: Path, packed: list[str]) -> None:
    path, cache = write_model(tmp_path / "model", "bf16", "qwen3"), tmp_path / "cache"
    choices = {
        "dtype": ("float16", "bfloat16", "float32"),
        "quantization": (None, *QUANTIZATION_CHOICES),
    }
    models = [start(path, cache, **{option: choice}) for choice in choices[option]]
    packed.clear()
    for choice, model in zip(choices[option], models, strict=True):
        assert_same(start(path, cache, **{option: choice}), model)
    assert packed == []


def fill_disk_before(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 90, 10))


def fill_disk_while_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointWriter, "write", fail)


@pytest.mark.parametrize(
    ("fill", "message"),
    [(fill_disk_before, r"needs [\d,]+ bytes, 10 are free"), (fill_disk_while_writing, "No space")],
)
def test_full_disk(
    fill: Callable[[pytest.MonkeyPatch], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    expected = start(path, None)
    fill(monkeypatch)
    assert_same(start(path, cache), expected)
    (warning,) = warnings(caplog)
    assert re.search(f"is not written.*{message}", warning)
    assert not any(cache.iterdir())


def test_directory_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    start(write(tmp_path), tmp_path / "file" / "cache")
    (warning,) = warnings(caplog)
    assert "is not written" in warning


def test_file_instead_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = write(tmp_path), tmp_path / "file"
    file.touch()
    with pytest.raises(SrtError, match="file is not a directory"):
        start(path, file)
    argv = ["generate", "--model", str(path), "--packed-cache", str(file), "--raw", "--prompt", "x"]
    assert main(argv) == 2
    assert capsys.readouterr().err == f"srt: error: packed cache {file} is not a directory\n"


def test_checkpoint_that_does_not_load_leaves_no_entry(tmp_path: Path) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight_scale"].fill_(torch.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="positive finite"):
            start(path, cache)
    assert not cache.exists()


def test_checkpoint_that_changes_while_it_is_loaded_leaves_no_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    write_header = CheckpointWriter.__init__

    def change(*args: Any, **kwargs: Any) -> None:
        write_header(*args, **kwargs)
        monkeypatch.undo()
        change_weight(path, monkeypatch)

    monkeypatch.setattr(CheckpointWriter, "__init__", change)
    start(path, cache)
    (warning,) = warnings(caplog)
    assert warning.endswith("model has changed while it was loaded")
    assert not any(cache.iterdir())


def test_starts_at_the_same_time(tmp_path: Path, packed: list[str]) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    expected = start(path, None)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: start(path, cache), range(8)):
            assert_same(found, expected)
    packed.clear()
    assert_same(start(path, cache), expected)
    assert packed == []
    entry_of(cache)


def test_only_one_process_writes(tmp_path: Path, packed: list[str]) -> None:
    path, cache = write(tmp_path), tmp_path / "cache"
    start(path, cache)
    entry = entry_of(cache)
    shutil.rmtree(entry)
    left = cache / ".srt-0123456789abcdef.tmp"
    (left / "new").mkdir(parents=True)
    (left / "new" / "model.safetensors").write_bytes(b"half")
    owner = left / "owner.json"
    owner.write_text(json.dumps({"destination": entry.name}))
    with owner.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        start(path, cache)
        assert not entry.exists()
        assert left.exists()
    # Whoever held the lock is gone: what it left is removed.
    start(path, cache)
    assert entry_of(cache) == entry
    packed.clear()
    start(path, cache)
    assert packed == []


@pytest.mark.parametrize("name", ["x" * 250, "é" * 120], ids=["x", "é"])
def test_any_name_of_a_checkpoint(name: str, tmp_path: Path, packed: list[str]) -> None:
    """A name that is as long as names can be leaves no room for what an entry's adds."""
    cache = tmp_path / "cache"
    path = write(tmp_path).rename(tmp_path / name)
    start(path, cache)
    entry_of(cache)
    packed.clear()
    start(path, cache)
    assert packed == []
