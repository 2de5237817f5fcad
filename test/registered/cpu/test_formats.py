"""Every FP8 checkpoint format: what is loaded is, exactly, what the files stand for.

Layers are compared through products with unit vectors, which give back each weight times its scale
in float32; whole models with transformers over the dequantised weights.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from srt.checkpoint.formats.schemes import QUANTIZATION_CHOICES
from srt.checkpoint.weight_names import canonical_name
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.layers.linear import LinearBase
from srt.layers.quantization.fp8_linear import Fp8LinearMethod
from srt.model_loader.loader import load_model
from srt.quantize.quantizer import quantize_checkpoint
from srt.test.ci_register import register_cpu_ci
from srt.test.contiguous_runner import ContiguousRunner, ExtendInput
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, write_checkpoint
from srt.test.tiny_models import ARCHITECTURES
from srt.test.tiny_models import make_tensors as make_model_tensors

register_cpu_ci(est_time=18, suite="per-commit")

# Blocks in both directions, ragged ones: q, k and v have 160, 32 and 32 rows, gate and up 200 each.
CONFIG = TINY_CONFIG | {"hidden_size": 160, "num_attention_heads": 5}
PROMPT = torch.randint(0, 1007, (23,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return make_tensors(CONFIG)


def load(path: Path, **options: Any) -> nn.Module:
    return load_model(ModelConfig.from_pretrained(path, **options), progress=False)


def held_weight(layer: LinearBase) -> Tensor:
    """The weight `[N, K]` that a layer multiplies by, in float32: the product with unit vectors,
    which is each code times its scale, rounded once.
    """
    eye = torch.eye(layer.input_size, dtype=torch.float16)
    product: Tensor = layer(eye, torch.float32)
    return product.T


def assert_weights(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Every linear layer of the decoder holds its expected weights, bit for bit."""
    merged = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    count = 0
    for name, layer in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if not isinstance(layer, LinearBase) or leaf == "lm_head":
            continue
        wanted = [expected[f"{parent}.{part}.weight"] for part in merged.get(leaf, (leaf,))]
        assert torch.equal(held_weight(layer), torch.cat(wanted)), name
        count += 1
    assert count == 4 * CONFIG["num_hidden_layers"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_exact(name: str, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    skip = ["model.layers.1.mlp.down_proj"]
    expected = write_fp8_checkpoint(FORMATS[name], tmp_path, CONFIG, weights, skip=skip)
    model = load(tmp_path)
    assert_weights(model, expected)
    plain = {
        name
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase) and not isinstance(layer.quant_method, Fp8LinearMethod)
    }
    assert plain == {"lm_head", *skip}


def test_mistrals_own_form_without_quantization(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    linear = [name.removesuffix(".weight") for name in weights if "_proj" in name]
    expected = write_fp8_checkpoint(FORMATS["mistral-own"], tmp_path, CONFIG, weights, skip=linear)
    params = json.loads((tmp_path / "params.json").read_text())
    del params["quantization"]
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert_weights(load(tmp_path), expected)


@pytest.mark.parametrize("name", ["mistral-hf", "compressed-tensors-dynamic", "modelopt"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_wrapped_names(name: str, prefix: str, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """Tensors with a wrapper's prefix, a skip list with another."""
    skip = ["model.layers.1.mlp.down_proj"]
    expected = write_fp8_checkpoint(FORMATS[name], tmp_path, CONFIG, weights, skip=skip)
    file = tmp_path / "model.safetensors"
    tensors = {re.sub(r"^model\.", prefix, n): t for n, t in load_file(file).items()}
    save_file(tensors, file)
    assert_weights(load(tmp_path), expected)


@pytest.mark.parametrize("block", [(128, 128), (1, 64), (7, 5), (64, 1000), (1000, 32)])
def test_blocks_of_any_size(
    block: tuple[int, int], tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    fmt = FORMATS["deepseek"]
    fmt = replace(fmt, block=block, quantization={**fmt.quantization, "weight_block_size": block})
    expected = write_fp8_checkpoint(fmt, tmp_path, CONFIG, weights)
    assert_weights(load(tmp_path), expected)


# Scale of q, k and v stored as one tensor -> stored shape, by the rows of q, k and v.
ROWS = (160, 32, 32)
FUSED_SCALES: dict[str, Tensor] = {
    "scalar": torch.tensor(0.02),
    "one element": torch.tensor([[0.02]]),
    "one for each shard": torch.tensor([0.01, 0.5, 3.0]),
    "per channel": torch.linspace(0.001, 3, sum(ROWS)),
    "grid": torch.rand(2, 2, generator=torch.Generator().manual_seed(1)) + 0.5,
}


@pytest.mark.parametrize("kind", FUSED_SCALES)
def test_tensors_fused_in_the_file(kind: str, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    fmt, scale = FORMATS["deepseek"], FUSED_SCALES[kind]
    expected = write_fp8_checkpoint(fmt, tmp_path, CONFIG, weights)
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(2):
        prefix = f"model.layers.{i}.self_attn"
        names = [f"{prefix}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        fused = torch.cat([tensors.pop(f"{name}.weight").view(torch.uint8) for name in names])
        for name in names:
            del tensors[f"{name}.weight_scale_inv"]
        tensors[f"{prefix}.qkv_proj.weight"] = fused.view(torch.float8_e4m3fn)
        tensors[f"{prefix}.qkv_proj.weight_scale_inv"] = scale.clone()
        if kind == "grid":
            full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: sum(ROWS), :160]
        elif kind == "one for each shard":
            full = scale.repeat_interleave(torch.tensor(ROWS))[:, None]
        else:
            full = scale.reshape(-1, 1)
        values = fused.view(torch.float8_e4m3fn).float() * full
        expected |= {f"{n}.weight": v for n, v in zip(names, values.split(ROWS), strict=True)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_weights(load(tmp_path), expected)


def test_shards_with_scales_of_different_kinds(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """A grid for q, a scale for each channel of k, one scale for v."""
    expected = write_fp8_checkpoint(FORMATS["deepseek"], tmp_path, CONFIG, weights)
    tensors = load_file(tmp_path / "model.safetensors")
    for part, scale in (("k", torch.linspace(0.1, 2, 32)), ("v", torch.tensor(0.3))):
        name = f"model.layers.0.self_attn.{part}_proj"
        tensors[f"{name}.weight_scale_inv"] = scale
        expected[f"{name}.weight"] = tensors[f"{name}.weight"].float() * scale.reshape(-1, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_weights(load(tmp_path), expected)


@pytest.mark.parametrize(
    "name", [name for name, fmt in FORMATS.items() if fmt.input_scale or fmt.cache_scales]
)
def test_activation_scales_change_no_logit(
    name: str, tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    logits = []
    for value in (1e-6, 1.0, 1e6):
        path = tmp_path / str(value)
        write_fp8_checkpoint(FORMATS[name], path, CONFIG, weights, activation_scale=value)
        config = ModelConfig.from_pretrained(path)
        runner = ContiguousRunner(config, max_total_tokens=64)
        logits.append(runner.extend([ExtendInput(PROMPT, 0, 1)]))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[2], logits[1])


@pytest.mark.parametrize("name", ["autofp8-static", "deepseek", "mistral-own"])
def test_logits(name: str, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    """Of a prompt, against transformers in float32 over the dequantised weights."""
    expected = write_fp8_checkpoint(FORMATS[name], tmp_path, CONFIG, weights)
    reference = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().eval()
    reference.load_state_dict(expected)
    runner = ContiguousRunner(ModelConfig.from_pretrained(tmp_path), max_total_tokens=64)
    logits = runner.extend([ExtendInput(PROMPT, 0, 1)])
    with torch.inference_mode():
        wanted = reference(torch.tensor([PROMPT])).logits[0, -1:]
    difference = logits.log_softmax(-1) - wanted.log_softmax(-1)
    assert difference.abs().max() < 0.008  # what float16 activations lose


@pytest.mark.parametrize("choice", QUANTIZATION_CHOICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantizing_while_loading_is_quantizing_before(
    choice: str, dtype: torch.dtype, tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    tensors = {name: value.to(dtype) for name, value in weights.items()}
    write_checkpoint(tmp_path / "plain", CONFIG, tensors)
    scheme = QUANTIZATION_CHOICES[choice]
    quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", scheme)
    online = load(tmp_path / "plain", quantization=choice)
    before = dict(load(tmp_path / "fp8").named_parameters())
    count = 0
    for name, parameter in online.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before.pop(name).view(torch.uint8)), name
        count += parameter.dtype == torch.float8_e4m3fn
    assert not before
    assert count == 4 * CONFIG["num_hidden_layers"]


@pytest.mark.parametrize("choice", QUANTIZATION_CHOICES)
@pytest.mark.parametrize("architecture", ["deepseek-v3", "qwen3", "mistral3"])
def test_quantizing_other_architectures(choice: str, architecture: str, tmp_path: Path) -> None:
    """Latent attention, norms of heads, and a vision tower, which is not quantized."""
    config = ARCHITECTURES[architecture]
    write_checkpoint(tmp_path / "plain", dict(config), make_model_tensors(config))
    scheme = QUANTIZATION_CHOICES[choice]
    reports = quantize_checkpoint(tmp_path / "plain", tmp_path / "fp8", scheme)
    assert reports
    assert all(canonical_name(report.name).startswith("layers.") for report in reports)
    online = load(tmp_path / "plain", quantization=choice)
    before = dict(load(tmp_path / "fp8").named_parameters())
    for name, parameter in online.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before.pop(name).view(torch.uint8)), name
    assert not before


def test_a_packed_cache_tells_schemes_apart(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = write_checkpoint(tmp_path / "plain", CONFIG, weights)
    for choice in (*QUANTIZATION_CHOICES, None, "fp8-block", "fp8-block"):
        config = ModelConfig.from_pretrained(path, quantization=choice)
        expected = dict(load_model(config, progress=False).named_parameters())
        cached = load_model(config, progress=False, packed_cache=tmp_path / "cache")
        for name, parameter in cached.named_parameters():
            assert torch.equal(parameter.view(torch.uint8), expected[name].view(torch.uint8))
        assert cached.state_dict().keys() == expected.keys()


def test_quantizing_while_loading_what_is_quantized(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    write_fp8_checkpoint(FORMATS["deepseek"], tmp_path, CONFIG, weights)
    with pytest.raises(UnsupportedConfigError, match=r"fp8 is for unquantized.*already: 'fp8'"):
        load(tmp_path, quantization="fp8")
    with pytest.raises(UnsupportedConfigError, match=r"'int4'.*fp8, fp8-per-channel, fp8-block"):
        ModelConfig.from_pretrained(
            write_checkpoint(tmp_path / "plain", CONFIG, {}), quantization="int4"
        )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (float("nan"), r"not finite.*up_proj.weight; .*NaN or infinity in row 17"),
        (float("-inf"), r"not finite.*up_proj.weight; .*NaN or infinity in row 17"),
        (None, r"this dtype.*up_proj.weight; expected: bfloat16 or .*; found: float8_e4m3fn"),
    ],
)
def test_weights_that_cannot_be_quantized(
    bad: float | None, message: str, tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = weights[name].clone()
    if bad is None:
        weight = weight.to(torch.float8_e4m3fn)
    else:
        weight[17, 5] = bad
    write_checkpoint(tmp_path, CONFIG, {**weights, name: weight})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, quantization="fp8-block")
