"""`srt quantize`: what it writes, what it refuses, and that it leaves nothing half done."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from srt.checkpoint.formats.schemes import SCHEMES
from srt.checkpoint.writer import CheckpointWriter, TensorSpec
from srt.cli import quantize as command
from srt.errors import CheckpointError, SrtError, UnsupportedConfigError
from srt.layers.quantization.fp8_quantization import quantize_weight
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.model_loader.tensors import write_tensor
from srt.quantize.quantizer import quantize_checkpoint
from srt.test.ci_register import register_cpu_ci
from srt.test.torch_threads import torch_threads
from srt.utils.directory_replacement import MANIFEST_FILE

register_cpu_ci(est_time=20, suite="per-commit")

HIDDEN, INNER, KV, VOCAB, LAYERS = 96, 160, 32, 107, 11
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
PER_TENSOR = SCHEMES["per-tensor"]


def llama_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a small Llama, in `dtype`."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(dtype)

    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": normal(HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = normal(HIDDEN)
        tensors[f"{prefix}.self_attn.q_proj.bias"] = normal(HIDDEN)
        for name, shape in LINEAR.items():
            tensors[f"{prefix}.{name}.weight"] = normal(*shape)
    return tensors


class Source(NamedTuple):
    """A checkpoint on disk and what is in it."""

    path: Path
    tensors: dict[str, torch.Tensor]

    def rewrite(self, **changes: torch.Tensor) -> None:
        """Writes the weights anew with some tensors replaced or added; `__` stands for a dot."""
        new = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({**self.tensors, **new}, self.path / "model.safetensors")

    def configure(self, **changes: object) -> None:
        (self.path / "config.json").write_text(json.dumps({**CONFIG, **changes}))


@pytest.fixture
def make_source(tmp_path: Path) -> Callable[..., Source]:
    def make(dtype: torch.dtype = torch.bfloat16) -> Source:
        source = Source(tmp_path / "source", llama_tensors(dtype))
        source.path.mkdir()
        source.rewrite()
        source.configure()
        return source

    return make


@pytest.fixture
def source(make_source: Callable[..., Source]) -> Source:
    return make_source()


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_writes_fp8_linear_layers_and_keeps_the_rest(
    make_source: Callable[..., Source], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    source = make_source(dtype)
    reports = quantize_checkpoint(source.path, tmp_path / "out", SCHEMES[name])
    kept_dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    suffix = "_scale_inv" if name == "block" else "_scale"
    expected = set(source.tensors) | {f"{n}{suffix}" for n in source.tensors if is_linear(n)}
    with MappedCheckpoint.open(tmp_path / "out") as result:
        assert set(result.names()) == expected
        for tensor_name, original in source.tensors.items():
            written = result.get(tensor_name)
            if is_linear(tensor_name):
                reference = quantize_weight(original, SCHEMES[name])
                scale = result.get(f"{tensor_name}{suffix}")
                assert written.dtype == torch.float8_e4m3fn
                assert torch.equal(written.view(torch.uint8), reference.weight.view(torch.uint8))
                assert scale.dtype == torch.float32
                assert scale.shape == reference.scale.shape
                assert torch.equal(scale, reference.scale)
            else:
                assert written.dtype == kept_dtype
                assert torch.equal(written, original.to(kept_dtype))
    assert [r.name for r in reports][:2] == [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
    ]
    assert len(reports) == LAYERS * len(LINEAR)
    assert all(0.02 < r.error.relative_rms < 0.035 for r in reports)  # 4 bits of significand


def test_config_says_how_it_is_quantized(source: Source, tmp_path: Path) -> None:
    quantize_checkpoint(source.path, tmp_path / "out", PER_TENSOR)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG
    assert quantization["quant_method"] == "fp8"
    assert quantization["activation_scheme"] == "dynamic"
    assert quantization["weight_block_size"] is None
    assert quantization["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, "float16"), (torch.float32, "bfloat16"), (torch.bfloat16, "bfloat16")],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_dtype_is_that_of_what_stays(
    make_source: Callable[..., Source], tmp_path: Path, dtype: torch.dtype, expected: str, key: str
) -> None:
    source = make_source(dtype)
    config = {k: v for k, v in CONFIG.items() if k != "torch_dtype"}
    config[key] = str(dtype).removeprefix("torch.")
    (source.path / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(source.path, tmp_path / "out", PER_TENSOR)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == expected


def test_copies_what_belongs_to_the_model(source: Source, tmp_path: Path) -> None:
    copied = ["generation_config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"]
    left = ["pytorch_model.bin", "model.safetensors.index.json", "notes.md"]
    for name in copied + left:
        (source.path / name).write_text(f"content of {name}")
    quantize_checkpoint(source.path, tmp_path / "out", PER_TENSOR)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {*copied, "config.json", "model.safetensors", MANIFEST_FILE}
    for name in copied:
        assert (tmp_path / "out" / name).read_text() == f"content of {name}"


def test_result_is_the_same_every_time(source: Source, tmp_path: Path) -> None:
    for number, name in ((1, "a"), (2, "b")):
        with torch_threads(number):
            quantize_checkpoint(source.path, tmp_path / name, PER_TENSOR)
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "ab")
    assert "model.safetensors" in a
    assert a == b


def test_shards_hold_the_same_as_one_file(source: Source, tmp_path: Path) -> None:
    limit = 60_000
    quantize_checkpoint(source.path, tmp_path / "one", PER_TENSOR)
    quantize_checkpoint(source.path, tmp_path / "many", PER_TENSOR, max_shard_size=limit)
    with (
        MappedCheckpoint.open(tmp_path / "one") as one,
        MappedCheckpoint.open(tmp_path / "many") as many,
    ):
        assert len(many.files) > 3
        assert all(
            re.fullmatch(rf"model-\d{{5}}-of-{len(many.files):05d}.safetensors", file.name)
            for file in many.files
        )
        assert one.names() == many.names()
        sizes = dict.fromkeys(many.files, 0)
        for meta in many:
            sizes[meta.file] += meta.nbytes
            a, b = one.get(meta.name), many.get(meta.name)
            assert a.dtype == b.dtype
            assert torch.equal(a.float(), b.float())
        assert max(sizes.values()) <= limit
        index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == many.nbytes
        assert set(index["weight_map"]) == set(many.names())


def test_written_tensors_are_aligned(source: Source, tmp_path: Path) -> None:
    """Also the f32 scales beside FP8 weights of odd sizes."""
    source.rewrite(model__layers__0__mlp__up_proj__weight=torch.ones(3, 5, dtype=torch.bfloat16))
    quantize_checkpoint(source.path, tmp_path / "out", SCHEMES["per-channel"])
    with MappedCheckpoint.open(tmp_path / "out") as result:
        for meta in result:
            tensor = result.get(meta.name)
            assert tensor.data_ptr() % tensor.element_size() == 0
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def expect_refusal(
    source: Source, destination: Path, *parts: str, error: type[SrtError] = SrtError
) -> None:
    """The command fails with all `parts` in its message, and the parent holds what it held."""
    before = sorted(destination.parent.rglob("*"))
    with pytest.raises(error) as caught:
        quantize_checkpoint(source.path, destination, PER_TENSOR)
    for part in parts:
        assert part in str(caught.value)
    assert sorted(destination.parent.rglob("*")) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.7.mlp.down_proj.weight", "lm_head.weight"])
def test_refuses_weights_that_are_not_finite(
    source: Source, tmp_path: Path, name: str, bad: float
) -> None:
    tensor = source.tensors[name].clone()
    tensor[2, 3] = bad
    source.rewrite(**{name.replace(".", "__"): tensor})
    expect_refusal(source, tmp_path / "out", name, "NaN or infinity", error=CheckpointError)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_refuses_a_quantized_config(source: Source, tmp_path: Path, key: str) -> None:
    source.configure(**{key: {"quant_method": "awq"}})
    expect_refusal(source, tmp_path / "out", "quantized already", "awq", error=CheckpointError)


def test_refuses_a_modelopt_checkpoint(source: Source, tmp_path: Path) -> None:
    (source.path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    expect_refusal(source, tmp_path / "out", "quantized already", "modelopt")


def test_refuses_fp8_weights_whatever_the_config_says(source: Source, tmp_path: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    fp8 = source.tensors[name].to(torch.float8_e4m3fn)
    source.rewrite(**{name.replace(".", "__"): fp8})
    expect_refusal(source, tmp_path / "out", "quantized already", name, error=CheckpointError)


def test_refuses_other_architectures(source: Source, tmp_path: Path) -> None:
    source.configure(architectures=["BertModel"])
    expect_refusal(source, tmp_path / "out", "BertModel", "Llama", error=UnsupportedConfigError)


def test_refuses_a_checkpoint_without_linear_layers(source: Source, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, source.path / "model.safetensors")
    expect_refusal(source, tmp_path / "out", "nothing to quantize")


def test_refuses_a_missing_source(source: Source, tmp_path: Path) -> None:
    gone = Source(tmp_path / "gone", {})
    expect_refusal(gone, tmp_path / "out", "gone", error=CheckpointError)


def test_refuses_an_occupied_destination(source: Source, tmp_path: Path) -> None:
    occupied = tmp_path / "out"
    occupied.mkdir()
    (occupied / "config.json").write_text("{}")
    expect_refusal(source, occupied, "not empty", "--overwrite")


def test_refuses_a_destination_that_is_the_source(source: Source) -> None:
    with pytest.raises(SrtError, match="same directory"):
        quantize_checkpoint(source.path, source.path / ".", PER_TENSOR, overwrite=True)


def test_refuses_a_full_disk(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    expect_refusal(source, tmp_path / "out", "disk space", "1,000 are free")


def test_overwrite_replaces_the_whole_checkpoint(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (source.path / "stale.json").write_text("{}")
    quantize_checkpoint(source.path, out, PER_TENSOR, max_shard_size=60_000)
    (source.path / "stale.json").unlink()
    quantize_checkpoint(source.path, out, SCHEMES["block"], overwrite=True)
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "model.safetensors", MANIFEST_FILE}
    assert json.loads((out / "config.json").read_text())["quantization_config"]["weight_block_size"]
    assert {file.name for file in tmp_path.iterdir()} == {"source", "out"}


def test_empty_destination_is_used(source: Source, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize_checkpoint(source.path, tmp_path / "out", PER_TENSOR)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def run_command(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["quantize", *argv])
    status: int = args.func(args)
    return status


def test_command_prints_each_weight(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(str(source.path), str(tmp_path / "out"), "--scheme", "per-channel") == 0
    printed = capsys.readouterr()
    for heading in ("rel. RMS", "max abs", "saturated", "flushed"):
        assert heading in printed.out
    for name in LINEAR:
        assert f"model.layers.10.{name} " in printed.out
    assert "quantizing per-channel: 100%" in printed.err


def test_command_prints_json(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(str(source.path), str(tmp_path / "out"), "--json") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    report = json.loads(printed.out)
    assert report["scheme"] == "per-tensor"
    assert report["source_bytes"] > report["destination_bytes"]
    assert len(report["weights"]) == LAYERS * len(LINEAR)
    assert report["weights"][0].keys() == {
        *("name", "shape", "relative_rms", "max_abs", "saturated", "flushed")
    }


def test_writer_checks_what_it_is_given(tmp_path: Path) -> None:
    spec = TensorSpec("a", "F32", (2, 3))
    with (
        pytest.raises(ValueError, match="not written: \\['a'\\]"),
        CheckpointWriter(tmp_path, [spec]),
    ):
        pass
    with CheckpointWriter(tmp_path, [spec]) as writer:
        for name, tensor, message in (
            ("b", torch.ones(2, 3), "not announced"),
            ("a", torch.ones(3, 2), r"expected float32 \[2, 3\], got float32 \[3, 2\]"),
            ("a", torch.ones(2, 3, dtype=torch.float64), "got float64"),
        ):
            with pytest.raises(ValueError, match=message):
                write_tensor(writer, name, tensor)
        with pytest.raises(ValueError, match="of 20 bytes"):
            writer.write(spec, memoryview(bytes(20)))
        transposed = torch.arange(6.0).view(3, 2).t()
        write_tensor(writer, "a", transposed)
        with pytest.raises(ValueError, match="written before"):
            write_tensor(writer, "a", transposed)
    assert torch.equal(MappedCheckpoint.open(tmp_path).get("a"), transposed)
    for specs, message in (([spec, spec], "announced twice"), ([], "at least one")):
        with pytest.raises(ValueError, match=message):
            CheckpointWriter(tmp_path, specs)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """384 MiB of weights in 48 tensors: the quantizer holds one tensor and its chunk at a time."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    weight = torch.ones(2048, 2048, dtype=torch.bfloat16)
    save_file(
        {f"model.layers.{i}.mlp.up_proj.weight": weight.clone() for i in range(48)},
        source / "model.safetensors",
    )
    code = """
import re, sys
from pathlib import Path
from srt.quantize.quantizer import quantize_checkpoint
from srt.checkpoint.formats.schemes import SCHEMES
from srt.layers.quantization.fp8_quantization import quantize_weight
import torch
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
quantize_weight(torch.ones(2048, 2048, dtype=torch.bfloat16), SCHEMES["per-tensor"])
before = peak()
quantize_checkpoint(sys.argv[1], sys.argv[2], SCHEMES["per-tensor"])
print(peak() - before)
"""
    command_line = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    grown = int(subprocess.run(command_line, check=True, capture_output=True, text=True).stdout)
    # Far below the checkpoint, and above what the allocator keeps for itself (50 to 80 MiB seen).
    assert grown < 150
