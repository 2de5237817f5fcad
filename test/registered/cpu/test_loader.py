"""What a checkpoint that does not fit its model ends with, and how much memory loading a sound one
takes.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sgl_kernel
from srt.cli.main import main
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, SrtError, UnsupportedConfigError
from srt.layers.weight_utils import pack_weight_
from srt.model_loader.loader import load_model
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_text_model import FP8

register_cpu_ci(est_time=25, suite="per-commit")

UP = "model.layers.1.mlp.up_proj"


def write(directory: Path, **changes: Any) -> Path:
    """A sound FP8 checkpoint with changed tensors (None removes one)."""
    tensors: dict[str, Any] = quantize(make_tensors(TINY_CONFIG)) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write_checkpoint(directory, TINY_CONFIG, kept, FP8)


def nan_weight() -> Tensor:
    weight = torch.zeros(200, 96, dtype=torch.uint8)
    weight[17, 5] = 0x7F
    return weight.view(torch.float8_e4m3fn)


# Name -> (changed tensors, tensor that the message names, rest of the message).
DAMAGES: dict[str, tuple[dict[str, Tensor | None], str, str]] = {
    "missing weight": (
        {f"{UP}.weight": None, f"{UP}.weight_scale": None},
        f"{UP}.weight",
        "no tensor.*[200, 96]",
    ),
    "missing norm": ({"model.norm.weight": None}, "model.norm.weight", "no tensor"),
    "missing scale": ({f"{UP}.weight_scale": None}, f"{UP}.weight", "no scale"),
    "unknown tensor": ({f"{UP}.zeros": torch.zeros(3)}, f"{UP}.zeros", r"no parameter.*F32 \[3\]"),
    "unknown layer": (
        {"model.layers.2.input_layernorm.weight": torch.zeros(96)},
        "model.layers.2.input_layernorm.weight",
        "no parameter",
    ),
    "untied without lm_head": ({"lm_head.weight": None}, "lm_head.weight", "no tensor"),
    "wrong shape": (
        {f"{UP}.weight": torch.zeros(200, 95).to(torch.float8_e4m3fn)},
        f"{UP}.weight",
        r"wrong shape.*expected: \[200, 96\]; found: \[200, 95\]",
    ),
    "wrong dtype": (
        {"model.norm.weight": torch.zeros(96, dtype=torch.int64)},
        "model.norm.weight",
        "wrong dtype.*found: int64",
    ),
    "an embedding table in FP8": (
        {"model.embed_tokens.weight": torch.zeros(1007, 96).to(torch.float8_e4m3fn)},
        "model.embed_tokens.weight",
        "embedding table in FP8",
    ),
    "scale of a bf16 weight": (
        {"lm_head.weight_scale": torch.tensor(1.0)},
        "lm_head.weight_scale",
        "not FP8.*lm_head.weight is bfloat16",
    ),
    "NaN in a weight": ({f"{UP}.weight": nan_weight()}, f"{UP}.weight", "NaN in row 17"),
    "NaN scale": (
        {f"{UP}.weight_scale": torch.tensor(float("nan"))},
        f"{UP}.weight_scale",
        "positive finite",
    ),
    "zero scale": ({f"{UP}.weight_scale": torch.tensor(0.0)}, f"{UP}.weight_scale", "found: 0.0"),
    "two spellings of a scale": (
        {f"{UP}.weight_scale_inv": torch.tensor(1.0)},
        f"{UP}.weight_scale",
        "two tensors.*weight_scale_inv|weight_scale_inv.*two tensors",
    ),
    "two spellings of a tensor": (
        {"language_model.model.norm.weight": torch.ones(96, dtype=torch.bfloat16)},
        "model.norm.weight",
        "two tensors fill the same parameter.*found: also",
    ),
    "missing embedding": ({"model.embed_tokens.weight": None}, "embed_tokens.weight", "no tensor"),
    "block scales": (
        {f"{UP}.weight_scale": torch.ones(2, 1)},
        f"{UP}.weight_scale",
        r"one element, \[200\], \[200, 1\]; found: \[2, 1\]",
    ),
    "merged and apart": (
        {
            "model.layers.0.mlp.gate_up_proj.weight": torch.zeros(400, 96).to(torch.float8_e4m3fn),
            "model.layers.0.mlp.gate_up_proj.weight_scale": torch.tensor(1.0),
        },
        "model.layers.0.mlp.gate_up_proj.weight",
        "both present.*gate_proj.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, tensor, message = DAMAGES[damage]
    path = write(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message.replace("[200, 96]", r"\[200, 96\]")) as info:
        load_model(ModelConfig.from_pretrained(path), progress=False)
    assert tensor in str(info.value)
    assert info.value.file is not None
    assert info.value.file.name in ("model.safetensors", path.name)
    assert info.value.expected is not None
    assert info.value.found is not None
    assert_cli_error(path, str(info.value), capsys)


def assert_cli_error(path: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line ends with status 2 and one line on stderr."""
    capsys.readouterr()
    assert main(["generate", "--model", str(path), "--raw", "--prompt", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"srt: error: {message}\n"


def change_config(**changes: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return apply


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lose_a_shard(path: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_modelopt(path: Path) -> None:
    change_config(quantization_config=None)(path)
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')


def to_mistral_form(path: Path) -> None:
    (path / "config.json").rename(path / "params.json")


# Name -> (what is done to the directory, error's class, message).
DIRECTORIES: dict[str, tuple[Callable[[Path], object], type[SrtError], str]] = {
    "no config.json": (lambda p: (p / "config.json").unlink(), CheckpointError, "config.json"),
    "config.json is no JSON": (
        lambda p: (p / "config.json").write_text("{"),
        CheckpointError,
        "config.json",
    ),
    "config.json is a list": (
        lambda p: (p / "config.json").write_text("[]"),
        CheckpointError,
        "found: list",
    ),
    "no architecture": (change_config(architectures=None), CheckpointError, "architecture"),
    "unknown architecture": (
        change_config(architectures=["MixtralForCausalLM"]),
        UnsupportedConfigError,
        "'MixtralForCausalLM' is not supported; supported: LlamaForCausalLM",
    ),
    "missing key": (change_config(hidden_size=None), CheckpointError, "lacks hidden_size"),
    "bad key": (change_config(vocab_size="many"), CheckpointError, "vocab_size.*found: many"),
    "unknown model type": (change_config(model_type="nosuch"), CheckpointError, "nosuch"),
    "uneven heads": (
        change_config(num_attention_heads=4, num_key_value_heads=3),
        UnsupportedConfigError,
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    "other activation": (change_config(hidden_act="gelu"), UnsupportedConfigError, "'gelu'"),
    "unknown rope": (
        change_config(rope_scaling={"rope_type": "proportional", "factor": 2.0}),
        UnsupportedConfigError,
        "'proportional'",
    ),
    "unsupported scheme": (
        change_config(quantization_config={"quant_method": "awq", "bits": 4}),
        UnsupportedConfigError,
        "'awq'",
    ),
    "modelopt": (write_modelopt, UnsupportedConfigError, "NVFP4"),
    "Mistral's own form": (to_mistral_form, CheckpointError, "params.json lacks dim"),
    "bad eos": (change_config(eos_token_id="</s>"), CheckpointError, "eos_token_id"),
    "truncated file": (truncate, CheckpointError, "model.safetensors.*expected.*found"),
    "lost shard": (lose_a_shard, CheckpointError, "model-00002-of-00002.safetensors"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), CheckpointError, "no safetensors"),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_unusable_directory(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, kind, message = DIRECTORIES[case]
    path = write(tmp_path)
    change(path)
    with pytest.raises(kind, match=message) as info:
        load_model(ModelConfig.from_pretrained(path), progress=False)
    assert "\n" not in str(info.value)
    assert_cli_error(path, str(info.value), capsys)


def test_unsupported_schemes_are_refused_before_weights_are_opened(tmp_path: Path) -> None:
    path = write(tmp_path)
    change_config(quantization_config={"quant_method": "fp8", "fmt": "e5m2"})(path)
    (path / "model.safetensors").write_bytes(b"not a weight file")
    with pytest.raises(UnsupportedConfigError, match="e5m2"):
        load_model(ModelConfig.from_pretrained(path), progress=False)


def test_structure_is_checked_before_any_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, **{"model.norm.weight": None})

    def fail(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("srt.model_loader.mapped_checkpoint.MappedCheckpoint.get", fail)
    with pytest.raises(CheckpointError, match="no tensor"):
        load_model(ModelConfig.from_pretrained(path), progress=False)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_wrapped_names(tmp_path: Path, prefix: str) -> None:
    plain = quantize(make_tensors(TINY_CONFIG))
    wrapped = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in plain.items()}
    models = [
        load_model(
            ModelConfig.from_pretrained(
                write_checkpoint(tmp_path / name, TINY_CONFIG, tensors, FP8)
            ),
            progress=False,
        )
        for name, tensors in (("plain", plain), ("wrapped", wrapped))
    ]
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def lm_head(tensors: dict[str, Tensor], **changes: Tensor) -> dict[str, Tensor]:
    """`tensors` with another lm_head."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
    return kept | {f"lm_head.{name}": tensor for name, tensor in changes.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["none", "bf16", "fp8"])
def test_lm_head(tied: bool, head: str, tmp_path: Path) -> None:
    """A tied head in the file is ignored, whatever it is; an untied one is needed."""
    config = TINY_CONFIG | {"tie_word_embeddings": tied}
    tensors = quantize(make_tensors(config))
    weight = torch.full((1007, 96), 0.5)
    heads: dict[str, dict[str, Tensor]] = {
        "none": {},
        "bf16": {"weight": weight.bfloat16()},
        "fp8": {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.tensor(2.0)},
    }
    path = write_checkpoint(tmp_path, config, lm_head(tensors, **heads[head]), FP8)
    if head == "none" and not tied:
        with pytest.raises(CheckpointError, match=r"no tensor.*tensor: lm_head\.weight"):
            load_model(ModelConfig.from_pretrained(path), progress=False)
        return
    model: Any = load_model(ModelConfig.from_pretrained(path), progress=False)
    logits = model.compute_logits(torch.eye(96, dtype=torch.float16)).T
    table = tensors["model.embed_tokens.weight"].float()
    assert torch.equal(logits, table if tied else weight * (2 if head == "fp8" else 1))


def test_tensors_that_are_not_needed(tmp_path: Path) -> None:
    """A tied checkpoint may hold lm_head.weight, and an old one the rotation's frequencies."""
    config = TINY_CONFIG | {"tie_word_embeddings": True}
    tensors = make_tensors(config) | {
        "lm_head.weight": torch.full((1007, 96), torch.nan).bfloat16(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
    }
    model = load_model(
        ModelConfig.from_pretrained(write_checkpoint(tmp_path, config, tensors)), progress=False
    )
    assert not any(parameter.isnan().any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config.json": 2}, {2}),
        ({"config.json": [2, 5]}, {2, 5}),
        ({"config.json": 2, "generation_config.json": [7, 8]}, {2, 7, 8}),
        ({"config.json": 2, "generation_config.json": None}, {2}),
        ({"config.json": None}, set()),
    ],
)
def test_eos_token_ids(tmp_path: Path, files: dict[str, Any], ids: set[int]) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG, {})
    for name, value in files.items():
        base = TINY_CONFIG if name == "config.json" else {}
        (tmp_path / name).write_text(json.dumps(base | {"eos_token_id": value}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == ids


def test_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG, {})
    for name, dtype in (
        ("auto", torch.float16),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
    ):
        assert ModelConfig.from_pretrained(tmp_path, name).dtype == dtype
    with pytest.raises(UnsupportedConfigError, match=r"'int8'.*auto, bfloat16, float16"):
        ModelConfig.from_pretrained(tmp_path, "int8")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 7), (33, 64), (1007, 95), (70, 70_000)])
def test_packing_in_place(n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    expected = sgl_kernel.convert_weight_packed(weight)
    memory = weight.data_ptr()
    packed = pack_weight_(weight)
    assert packed.data_ptr() == memory
    assert torch.equal(packed.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_stays_near_the_size_of_the_checkpoint(tmp_path: Path) -> None:
    config = TINY_CONFIG | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    path = write_checkpoint(tmp_path, config, quantize(make_tensors(config)), FP8)
    size = (path / "model.safetensors").stat().st_size
    assert size > 120e6
    program = """
import sys
from srt.configs.model_config import ModelConfig
from srt.model_loader.loader import load_model
def status(key):
    line = next(l for l in open("/proc/self/status") if l.startswith(key))
    return int(line.split()[1]) * 1024
config = ModelConfig.from_pretrained(sys.argv[1])
before = status("VmRSS")
model = load_model(config, progress=False)
print(status("VmHWM") - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    # One release interval of source pages and one module in two forms come on top.
    assert int(result.stdout) < 1.1 * size + 100e6
