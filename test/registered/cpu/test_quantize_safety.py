"""`srt quantize` loses nothing: not its source, not other files, not the old result."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from srt.checkpoint import hub
from srt.checkpoint.formats.schemes import SCHEMES
from srt.checkpoint.writer import CheckpointWriter, TensorSpec
from srt.cli.main import main
from srt.errors import CheckpointError, SrtError
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.quantize.quantizer import quantize_checkpoint
from srt.test.ci_register import register_cpu_ci
from srt.utils.directory_replacement import MANIFEST_FILE

register_cpu_ci(est_time=15, suite="per-commit")

SCHEME = SCHEMES["per-tensor"]
WEIGHT = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "models" / "source"
    directory.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    write_weights(directory / "model.safetensors", 1.0)
    return directory


def write_weights(file: Path, value: float) -> None:
    tensors = {
        WEIGHT.format(i): torch.full((64, 64), value, dtype=torch.bfloat16) for i in range(4)
    }
    save_file(tensors, file)


def content(directory: Path) -> dict[str, bytes]:
    """All files below, by their paths; what a link leads to is not followed."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def values(directory: Path) -> set[float]:
    """Of a quantized checkpoint: the dequantized elements of all layers."""
    with MappedCheckpoint.open(directory) as checkpoint:
        return {
            round(float(code * checkpoint.get(f"{WEIGHT.format(i)}_scale")), 3)
            for i in range(4)
            for code in checkpoint.get(WEIGHT.format(i)).float().flatten().unique()
        }


@pytest.mark.parametrize("destination", ["models", "models/.", "models/source/..", "link", "."])
def test_the_source_survives(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    destination: str,
) -> None:
    """`srt quantize P/sub P --overwrite`, however P is spelled and whatever it looks like."""
    (source.parent / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to("models")
    monkeypatch.chdir(source.parent if destination == "." else tmp_path)
    before = content(tmp_path)
    assert main(["quantize", str(source), destination, "--overwrite"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "holds the source" in error
    assert content(tmp_path) == before


def test_unrelated_files_of_the_destination_survive(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(source), str(out), "--json"]) == 0
    assert main(["quantize", str(source), str(out), "--json", "--overwrite"]) == 0
    (out / "notes.txt").write_text("dear")
    before = content(tmp_path)
    assert main(["quantize", str(source), str(out), "--overwrite"]) == 2
    assert "does not delete, since no earlier run wrote it: notes.txt" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_the_destination_is_checked_before_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "resolve_model", lambda *args, **options: pytest.fail("downloads"))
    assert main(["quantize", "org/name", str(tmp_path / "no" / "out")]) == 2
    assert "its parent directory does not exist" in capsys.readouterr().err


def test_manifest_names_every_file_and_is_not_copied(source: Path, tmp_path: Path) -> None:
    (source / MANIFEST_FILE).write_text("of something else")
    quantize_checkpoint(source, tmp_path / "out", SCHEME)
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    assert sizes == {
        file.name: file.stat().st_size
        for file in (tmp_path / "out").iterdir()
        if file.name != MANIFEST_FILE
    }
    assert sizes.keys() == {"config.json", "tokenizer.json", "model.safetensors"}


def rewritten(source: Path) -> None:
    write_weights(source / "model.safetensors", 2.0)


def replaced(source: Path) -> None:
    write_weights(source / "new", 2.0)
    (source / "new").replace(source / "model.safetensors")


def reconfigured(source: Path) -> None:
    (source / "config.json").write_text("{}")


def retokenized(source: Path) -> None:
    (source / "tokenizer.json").write_text("[]")


def extended(source: Path) -> None:
    (source / "chat_template.jinja").write_text("")


def emptied(source: Path) -> None:
    for file in source.iterdir():
        file.unlink()


def reshaped(source: Path) -> None:
    new = {WEIGHT.format(i): torch.ones(32, 128, dtype=torch.bfloat16) for i in range(4)}
    save_file(new, source / "new")
    (source / "new").replace(source / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rewritten, "model.safetensors"),
        (replaced, "model.safetensors"),
        (reshaped, "model.safetensors"),
        (reconfigured, "config.json"),
        (retokenized, "tokenizer.json"),
        (extended, "chat_template.jinja"),
        (emptied, "model.safetensors"),
    ],
)
@pytest.mark.parametrize("overwrites", [False, True])
def test_a_source_that_changes_while_it_is_read_gives_no_result(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    named: str,
    overwrites: bool,
) -> None:
    out = tmp_path / "out"
    if overwrites:
        quantize_checkpoint(source, out, SCHEME)
    before = content(out)
    write = CheckpointWriter.write
    written: list[str] = []

    def write_and_change(self: CheckpointWriter, spec: TensorSpec, data: memoryview) -> None:
        write(self, spec, data)
        written.append(spec.name)
        if len(written) == 4:
            change(source)

    monkeypatch.setattr(CheckpointWriter, "write", write_and_change)
    with pytest.raises(CheckpointError, match=f"changed while it was read .*{named}"):
        quantize_checkpoint(source, out, SCHEME, overwrite=True)
    assert content(out) == before
    assert out.exists() == overwrites
    assert {path.name for path in tmp_path.iterdir()} <= {"models", "out"}


def test_a_file_limit_is_met_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "write", lambda *args: pytest.fail("works"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(SrtError, match="out is not written: File too large"):
            quantize_checkpoint(source, tmp_path / "out", SCHEME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("tokenizer_config.json", lambda file: file.symlink_to("blob"), "no such file.*to blob"),
        ("chat_template.jinja", lambda file: file.symlink_to("blob"), "no such file.*to blob"),
        ("LICENSE", os.mkfifo, "not a regular file.*a named pipe"),
    ],
)
def test_nothing_of_the_source_is_left_out_silently(
    source: Path, tmp_path: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    """A Hub cache that has lost a blob would give a model without its tokenizer."""
    make(source / name)
    with pytest.raises(CheckpointError, match=message) as info:
        quantize_checkpoint(source, tmp_path / "out", SCHEME)
    assert info.value.file == source / name
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize("names", [[], ["additional_chat_templates"], ["onnx", "original"]])
def test_directories_of_the_source_are_named(
    source: Path, tmp_path: Path, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in (*names, ".cache"):
        (source / name).mkdir()
    quantize_checkpoint(source, tmp_path / "out", SCHEME)
    found = [record.getMessage() for record in caplog.records]
    expected = f"directories of {source} are not copied: {', '.join(names)}"
    assert found == ([expected] if names else [])


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_source_that_cannot_be_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if os.geteuid() == 0:
        open_file = Path.open

        def refuse(self: Path, *args: object, **options: object) -> object:
            if self.name == name and self.parent == source:
                raise PermissionError(13, "Permission denied", str(self))
            return open_file(self, *args, **options)  # type: ignore[call-overload]

        monkeypatch.setattr(Path, "open", refuse)
    else:
        (source / name).chmod(0)
    with pytest.raises(SrtError, match=f"Permission denied.*{name}|{name}.*Permission denied"):
        quantize_checkpoint(source, tmp_path / "out", SCHEME)
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


INTERRUPTED = """
import os, signal, sys
from srt.__main__ import main
from srt.checkpoint.writer import CheckpointWriter
write, count = CheckpointWriter.write, 0
def interrupted(self, spec, data):
    global count
    count += 1
    if count == 5:
        os.kill(os.getpid(), number)
    write(self, spec, data)
CheckpointWriter.write = interrupted
number = int(sys.argv.pop(1))
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_the_old_and_the_next_one_cleans(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(source, out, SCHEME)
    before = content(out)
    write_weights(source / "model.safetensors", 3.0)
    arguments = [str(int(number)), "quantize", str(source), str(out), "--overwrite"]
    command = [sys.executable, "-c", INTERRUPTED, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert result.returncode == expected, result.stderr
    assert "Traceback" not in result.stderr
    assert content(out) == before
    assert values(out) == {1.0}
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(left) == (number == signal.SIGKILL)
    quantize_checkpoint(source, out, SCHEME, overwrite=True)
    assert values(out) == {3.0}
    assert {path.name for path in tmp_path.iterdir()} == {"models", "out"}
