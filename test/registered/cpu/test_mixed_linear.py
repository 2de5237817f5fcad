"""Merged layers whose shards are held in different ways: each shard gives the bits that it gives in
a layer of its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from srt.configs.model_config import ModelConfig
from srt.layers.linear import LinearBase, ReplicatedLinear
from srt.layers.quantization.mixed_linear import MixedLinearMethod
from srt.model_loader.loader import load_model
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS, quantize, write_fp8_checkpoint
from srt.test.model_cases import TOKENS, TOLERANCES, ModelCase, largest_difference
from srt.test.tiny_llama import TINY_CONFIG
from srt.test.tiny_llama import make_tensors as make_llama
from srt.test.tiny_models import ARCHITECTURES, make_tensors, reference_log_probs

register_cpu_ci(est_time=20, suite="per-commit")

FILE = "model.safetensors"
QKV = ("q_proj", "k_proj", "v_proj")
BLOCK = FORMATS["deepseek-small-blocks"]
# How a shard is stored: none is bfloat16. All are called alike, as in one file.
KINDS = {
    "plain": None,
    "tensor": replace(BLOCK, block=(None, None)),
    "channel": replace(BLOCK, block=(1, None)),
    "block": BLOCK,
}
CASES = {
    "q unquantized": ("plain", "tensor", "tensor"),
    "k unquantized": ("tensor", "plain", "tensor"),
    "v unquantized": ("block", "block", "plain"),
    "only q FP8": ("block", "plain", "plain"),
    "three strategies": ("tensor", "channel", "block"),
    "block between channels": ("channel", "block", "channel"),
    "plain between kinds": ("channel", "plain", "block"),
}


def write_mixed(
    path: Path, config: Mapping[str, Any], weights: dict[str, Tensor], kinds: dict[str, str]
) -> dict[str, Tensor]:
    """A checkpoint with blocks, whose modules of these last names are of other kinds; returns the
    float32 weights that it stands for.
    """
    expected = write_fp8_checkpoint(BLOCK, path, config, weights)
    tensors = load_file(path / FILE)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        kind = kinds.get(module.rpartition(".")[2])
        if kind is None or not name.endswith(".weight"):
            continue
        fmt = KINDS[kind]
        tensors.pop(f"{module}.{BLOCK.scale_name}")
        if fmt is None:
            tensors[name] = weight.to(torch.bfloat16)
            expected[name] = tensors[name].float()
            continue
        codes, scale, expected[name] = quantize(weight, fmt, stretch=1.5)
        tensors[name], tensors[f"{module}.{BLOCK.scale_name}"] = codes, scale
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / FILE)
    return expected


def kinds_of(case: str) -> dict[str, str]:
    kinds = dict(zip(QKV, CASES[case], strict=True))
    return kinds | {"gate_proj": kinds["q_proj"], "up_proj": kinds["v_proj"]}


@pytest.mark.parametrize("case", CASES)
def test_each_shard_has_the_bits_of_its_own_layer(case: str, tmp_path: Path) -> None:
    config = ARCHITECTURES["qwen2"]  # with biases
    weights = make_tensors(config)
    write_mixed(tmp_path, config, weights, kinds_of(case))
    loaded = ModelConfig.from_pretrained(tmp_path, dtype="float16")
    model = load_model(loaded, progress=False)
    mixed = model.get_submodule("model.layers.1.self_attn.qkv_proj")
    assert isinstance(mixed, LinearBase)
    assert isinstance(mixed.quant_method, MixedLinearMethod)
    tensors = load_file(tmp_path / FILE)
    assert loaded.quant_config is not None
    x = torch.randn(5, config["hidden_size"], generator=torch.Generator().manual_seed(4)).half()
    for out_dtype in (None, torch.float32):
        out = mixed(x, out_dtype)
        start = 0
        for shard in QKV:
            name = f"model.layers.1.self_attn.{shard}"
            alone = load_alone(tensors, name, config["hidden_size"], loaded, tmp_path)
            end = start + alone.output_size
            assert torch.equal(out[:, start:end], alone(x, out_dtype)), (shard, out_dtype)
            start = end
        assert start == out.shape[1]


def load_alone(
    tensors: dict[str, Tensor], name: str, size: int, config: ModelConfig, path: Path
) -> ReplicatedLinear:
    """The module of this name as a layer that is not merged."""
    assert config.quant_config is not None
    with MappedCheckpoint.open(path) as checkpoint:
        quant = config.quant_config.adapt_to(checkpoint)
        layer = ReplicatedLinear(
            size, tensors[f"{name}.weight"].shape[0], bias=True, quant_config=quant, prefix=name
        )
        for parameter_name, parameter in list(layer.named_parameters()):
            source = {"weight_scale": BLOCK.scale_name}.get(parameter_name, parameter_name)
            meta = checkpoint.meta(f"{name}.{source}")
            parameter.load(checkpoint.get(meta.name), meta, None)  # type: ignore[attr-defined]
    layer.process_weights_after_loading()
    return layer


@pytest.mark.parametrize("case", ["k unquantized", "three strategies"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_models(case: str, dtype: str, tmp_path: Path) -> None:
    """Prefill, chunked prefill and recorded decode against transformers."""
    config = ARCHITECTURES["qwen2"]
    expected = write_mixed(tmp_path, config, make_tensors(config), kinds_of(case))
    model = ModelCase(tmp_path, reference_log_probs(config, expected, TOKENS))
    assert largest_difference(model, dtype) < TOLERANCES[dtype]


def test_the_packed_cache_restores_the_parts(tmp_path: Path) -> None:
    kinds = kinds_of("plain between kinds")
    write_mixed(tmp_path / "model", TINY_CONFIG, make_llama(TINY_CONFIG), kinds)
    config = ModelConfig.from_pretrained(tmp_path / "model", dtype="float16")
    first = load_model(config, progress=False, packed_cache=tmp_path / "cache")
    second = load_model(config, progress=False, packed_cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1
    held = dict(second.named_parameters())
    assert held.keys() == dict(first.named_parameters()).keys()
    assert any(".qkv_proj.parts." in name for name in held)
    for name, parameter in first.named_parameters():
        assert parameter.dtype == held[name].dtype
        assert torch.equal(parameter.view(torch.uint8), held[name].view(torch.uint8)), name


def test_layers_of_one_kind_are_one_product(tmp_path: Path) -> None:
    weights = make_llama(TINY_CONFIG)
    for name, fmt in FORMATS.items():
        path = tmp_path / name
        write_fp8_checkpoint(fmt, path, TINY_CONFIG, weights)
        model = load_model(ModelConfig.from_pretrained(path), progress=False)
        methods = [m.quant_method for m in model.modules() if isinstance(m, LinearBase)]
        assert methods
        assert not any(isinstance(method, MixedLinearMethod) for method in methods), name
