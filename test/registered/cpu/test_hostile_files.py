"""Files that are no files, that have no end, that are nested without end, or that claim sizes
nobody has: each is one error within seconds, and what lies in a packed cache costs a repack only.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from srt.checkpoint import files
from srt.checkpoint.checkpoint import Checkpoint
from srt.checkpoint.files import blaming, read_bytes, read_json
from srt.checkpoint.formats.skip_list import ModulePatterns
from srt.cli.main import main
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, SrtError, UnsupportedConfigError
from srt.inspection.report import inspect_model
from srt.managers.tokenizer import load_tokenizer
from srt.model_loader.loader import load_model
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_text_model import FP8
from srt.test.tiny_tokenizer import write_tokenizer

register_cpu_ci(est_time=30, suite="per-commit")


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 20


def make_socket(path: Path) -> None:
    # Addresses of sockets are short.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def make_large(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "empty-device": (lambda path: path.symlink_to("/dev/null"), "a device"),
    "socket": (make_socket, "a socket"),
    "directory": (Path.mkdir, "a directory"),
    "dangling": (lambda path: path.symlink_to("../blobs/0123"), "a link to ../blobs/0123"),
    "link-to-itself": (lambda path: path.symlink_to(path.name), "symbolic links"),
    "large": (make_large, "1,099,511,627,776 bytes"),
}
# File of a checkpoint -> another that has to be away so that it is read.
READ = {
    "config.json": None,
    "generation_config.json": None,
    "hf_quant_config.json": None,
    "params.json": "config.json",
    "tokenizer.json": None,
    "tokenizer_config.json": None,
    "special_tokens_map.json": None,
    "added_tokens.json": None,
    "vocab.json": None,
    "merges.txt": None,
    "tokenizer.model": None,
    "chat_template.jinja": None,
    "additional_chat_templates/rag.jinja": None,
    "model.safetensors": None,
    "model.safetensors.index.json": "model.safetensors",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    write_checkpoint(directory, TINY_CONFIG, make_tensors(TINY_CONFIG))
    write_tokenizer(directory)
    return directory


def copy(sound: Path, target: Path) -> Path:
    target.mkdir()
    for file in sound.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READ)
def test_what_lies_in_place_of_a_file(name: str, kind: str, sound: Path, tmp_path: Path) -> None:
    if name == "model.safetensors" and kind == "large":
        pytest.skip("weights have no limit")
    directory = copy(sound, tmp_path / "model")
    away = READ[name]
    for other in (name, away):
        if other is not None:
            (directory / other).unlink(missing_ok=True)
    make, found = KINDS[kind]
    (directory / name).parent.mkdir(exist_ok=True)
    make(directory / name)
    with pytest.raises(SrtError) as caught:
        start(directory)
    assert Path(name).name in str(caught.value)
    assert found in str(caught.value)
    if "config.json" in name or name == "params.json":
        inspect_and_expect_an_end(directory)


def start(directory: Path) -> None:
    load_tokenizer(directory)
    load_model(ModelConfig.from_pretrained(directory), progress=False)


def inspect_and_expect_an_end(directory: Path) -> None:
    with contextlib.suppress(SrtError):
        inspect_model(directory)


def test_command_line_prints_one_line(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy(sound, tmp_path / "model")
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    assert main(["generate", "--model", str(directory), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "not a regular file" in error, error


def test_a_file_that_grows_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"x" * 100)
    monkeypatch.setattr(files, "_check_kind", lambda *_: file.write_bytes(b"x" * 2000))
    monkeypatch.setattr(
        "srt.checkpoint.files.os.fstat", lambda _: os.stat_result((0o100644,) + (0,) * 9)
    )
    with pytest.raises(CheckpointError, match="grows"):
        read_bytes(file, 1000)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        '{"a":' + "[" * 500 + "]" * 500 + "}",
        '{"a":' + "9" * 10_000 + "}",
        '{"a": "\\ud800"',
        "",
        "[1]",
        "NaN",
    ],
)
def test_json_that_is_not(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=r"JSON") as caught:
        read_json(file)
    assert caught.value.file == file
    assert len(str(caught.value)) < 1000


def test_a_huge_value_is_not_quoted_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY_CONFIG, "architectures": ["x" * 10**6]})
    )
    with pytest.raises(SrtError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert len(str(caught.value)) < 2100


class PanicError(BaseException):
    """What a library in Rust raises when it panics."""


@pytest.mark.parametrize("error", [PanicError("p"), Exception("plain"), RecursionError()])
def test_one_boundary(error: BaseException, tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="cannot be read") as caught,
        blaming("cannot be read", tmp_path / "f"),
    ):
        raise error
    assert (caught.value.file, caught.value.__cause__) == (tmp_path / "f", error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), SrtError("own")])
def test_what_passes_the_boundary(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, blaming("cannot be read", tmp_path):
        raise error
    assert caught.value is error


# ---- counts ----


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **changes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "layer 2 of the model has no tensor"),
        ({"num_hidden_layers": 9_999}, "layer 2 of the model has no tensor"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers.*at most 10,000"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers.*at most 10,000"),
        ({"num_hidden_layers": True}, "bad num_hidden_layers"),
        ({"vocab_size": 10**12}, "bad vocab_size"),
        ({"vocab_size": 10**8}, "embed_tokens"),
        ({"intermediate_size": 10**7}, "proj"),
        ({"num_attention_heads": 10**9}, "bad num_attention_heads"),
        ({"head_dim": 1 << 40}, "bad head_dim"),
        ({"max_position_embeddings": 10**15}, "bad max_position_embeddings"),
        ({"num_key_value_heads": 0}, "bad num_key_value_heads"),
        ({"layer_types": 5}, "layer_types 5"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}},
            r"config.json has a bad rope_parameters\.factor",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": [1]}},
            r"rope_parameters\.rope_theta",
        ),
        (rope(rope_theta=1e400), "finite"),
        (rope(rope_type="yarn", factor=2.0, beta_fast={}), r"rope_parameters\.beta_fast"),
        (
            {"rope_scaling": {"type": "linear", "factor": None, "beta_fast": {}}},
            r"rope_scaling\.beta_fast",
        ),
        ({"rms_norm_eps": "a"}, "rms_norm_eps"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
    ],
)
def test_counts_and_values(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**TINY_CONFIG, **changes}, make_tensors(TINY_CONFIG))
    with pytest.raises(SrtError, match=message):
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)
    inspect_and_expect_an_end(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"num_labels": 10**9}, {"id2label": 5}, {"id2label": {"a": [1]}, "label2id": "x"}]
)
def test_labels_of_classifiers_do_not_matter(changes: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**TINY_CONFIG, **changes}, make_tensors(TINY_CONFIG))
    load_model(ModelConfig.from_pretrained(tmp_path), progress=False)


# ---- packed cache ----


def pack(path: Path, cache: Path) -> Any:
    return load_model(ModelConfig.from_pretrained(path), progress=False, packed_cache=cache)


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Path, Path]:
    """(checkpoint, cache, entry)."""
    path, cache = tmp_path / "model", tmp_path / "cache"
    write_checkpoint(path, TINY_CONFIG, quantize(make_tensors(TINY_CONFIG)), FP8)
    pack(path, cache)
    (entry,) = (p for p in cache.iterdir() if p.is_dir())
    return path, cache, entry


def reshape(entry: Path) -> None:
    change_header(entry / "model.safetensors", lambda e: e | {"shape": e["shape"][::-1]})


def retype(entry: Path) -> None:
    to = {"F8_E4M3": "I8", "BF16": "F16", "F32": "I32"}
    change_header(entry / "model.safetensors", lambda e: e | {"dtype": to[e["dtype"]]})


def change_header(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header = {k: v if k == "__metadata__" else change(v) for k, v in header.items()}
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    file.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        (entry / name).unlink()
        make(entry / name)

    return damage


def manifest(**changes: Any) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        file = entry / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        entry.rename(entry.with_name("moved"))
        make(entry)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deep": replace(
        "manifest.json", lambda p: p.write_text('{"key":' + "[" * 100_000 + "]" * 100_000 + "}")
    ),
    "pipe": replace("manifest.json", os.mkfifo),
    "endless": replace("manifest.json", lambda p: p.symlink_to("/dev/zero")),
    "no-manifest": replace("manifest.json", lambda p: None),
    "not-utf8": replace("manifest.json", lambda p: p.write_bytes(b'{"\xff": 1}')),
    "key-is-a-list": manifest(key=[1]),
    "key-is-a-number": manifest(key=1),
    "parameters-are-a-number": manifest(parameters=5),
    "parameters-are-lists": manifest(parameters=[["a"], {}]),
    "tensors-are-null": manifest(source_tensors=None, source_files=7),
    "weights-are-a-pipe": replace("model.safetensors", os.mkfifo),
    "weights-are-a-directory": replace("model.safetensors", Path.mkdir),
    "another-shape": reshape,
    "another-dtype": retype,
    "entry-is-a-file": instead(lambda p: p.write_text("x")),
    "entry-is-a-dangling-link": instead(lambda p: p.symlink_to("nowhere")),
    "entry-is-a-pipe": instead(os.mkfifo),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_costs_one_repack(
    damage: str, packed: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, cache, entry = packed
    expected = {n: p.data.clone() for n, p in pack(path, cache).named_parameters()}
    DAMAGES[damage](entry)
    for start in ("rebuilds", "is fine"):
        caplog.clear()
        found = {n: p.data for n, p in pack(path, cache).named_parameters()}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(
                found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            ), name
        assert not caplog.records or start == "rebuilds", caplog.text
    assert entry.is_dir() and not entry.is_symlink()


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "dangling", "owner-link", "owner-pipe"])
def test_what_lies_beside_an_entry(kind: str, packed: tuple[Path, Path, Path]) -> None:
    """Where the scratch directory of a killed start would be: it is neither waited for nor written
    to, and stays unless it is certainly ours.
    """
    path, cache, entry = packed
    somebodys = cache.parent / "somebodys"
    somebodys.write_text("precious")
    place = cache / ".srt-0123456789abcdef.tmp"
    if kind == "file":
        place.write_text("precious")
    elif kind == "link":
        place.symlink_to(somebodys)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "dangling":
        place.symlink_to(cache.parent / "nowhere")
    else:
        place.mkdir()
        owner = place / "owner.json"
        owner.symlink_to(somebodys) if kind == "owner-link" else os.mkfifo(owner)
    (entry / "manifest.json").write_text("damaged")
    pack(path, cache)
    assert somebodys.read_text() == "precious"
    assert not (cache.parent / "nowhere").exists()
    json.loads((entry / "manifest.json").read_text())
    assert sorted(p.name for p in cache.iterdir()) == [place.name, entry.name]


# ---- programs in other languages ----


@pytest.mark.parametrize("expression", ["re:(a|a)*$", "re:(.|o)*z", r"re:(\w+.?)+!"])
def test_expressions_that_match_for_ever(expression: str, tmp_path: Path) -> None:
    block = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": weights}
    quantization = {**block, "config_groups": {"group_0": group}, "ignore": [expression]}
    tensors = quantize(make_tensors(TINY_CONFIG))
    write_checkpoint(tmp_path, TINY_CONFIG, tensors, quantization)
    started = time.monotonic()
    with contextlib.suppress(UnsupportedConfigError):
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)
    assert time.monotonic() - started < 15


def test_an_expression_that_is_given_up(tmp_path: Path) -> None:
    patterns = ModulePatterns.parse(["re:(a|a)*$"], regex=True)
    with pytest.raises(UnsupportedConfigError, match="takes more than 1 seconds"):
        patterns.matches("a" * 60 + "b")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_doubles_texts(part: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    for steps, fits in ((3, True), (40, False)):
        content[part] = {"type": "Sequence", f"{part}s": [step] * steps}
        file.write_text(json.dumps(content))
        if fits:
            assert load_tokenizer(tmp_path) is not None
        else:
            with pytest.raises(CheckpointError, match=f"its {part} makes a text 1e"):
                load_tokenizer(tmp_path)


def test_a_header_beyond_every_limit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG, {"a": torch.zeros(1)})
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write((1 << 39).to_bytes(8, "little"))
        stream.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="header"):
        Checkpoint.open(tmp_path)


def test_a_shard_that_is_a_pipe(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    os.mkfifo(tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not a regular file.*model-2.*named pipe"):
        Checkpoint.open(tmp_path)
