"""Every spelling that writers emit is accepted, in any case; what does not run is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from srt.checkpoint import mistral_form
from srt.checkpoint.formats import compressed_tensors, fp8
from srt.checkpoint.formats.fp8 import Fp8Config
from srt.checkpoint.formats.fp8_checkpoint import Fp8CheckpointConfig
from srt.checkpoint.formats.modelopt import QUANT_ALGO
from srt.checkpoint.formats.registry import FORMATS, QUANT_METHOD, get_quantization_config
from srt.checkpoint.mistral_form import to_hf_config
from srt.checkpoint.quantization_keys import SKIP_LISTS, Key
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_scales import Layout
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.layers.parameter import WeightScaleParameter
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "targets": ["Linear"]}
QUARK = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}
# A block of each format that runs.
BLOCKS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "compressed-tensors": {"format": "float-quantized", "config_groups": {"group_0": GROUP}},
    "modelopt": {"quant_algo": "FP8"},
    "fbgemm_fp8": {},
    "quark": {"global_quant_config": QUARK},
}


def read(method: str, **block: Any) -> Fp8CheckpointConfig:
    config = get_quantization_config(
        {"quantization_config": {"quant_method": method, **BLOCKS.get(method, {}), **block}}
    )
    assert isinstance(config, Fp8CheckpointConfig)
    return config


def spellings(key: Key[Any]) -> list[str]:
    """As the table has them, and in capitals."""
    return [spelling for known in key.values for spelling in (known, known.upper())]


@pytest.mark.parametrize("method", spellings(QUANT_METHOD))
def test_methods(method: str) -> None:
    known = QUANT_METHOD.values[method.lower()]
    assert type(read(method, **BLOCKS[known.names[0]])) is known


def test_every_format_has_a_block_here() -> None:
    assert [config.names[0] for config in FORMATS] == list(BLOCKS)


@pytest.mark.parametrize(
    "key", [fp8.WEIGHT_FORMAT, fp8.SCALE_FORMAT, fp8.ACTIVATION_SCHEME, fp8.EXPERT_DTYPE]
)
def test_keys_of_fp8(key: Key[Any]) -> None:
    for spelling in [*spellings(key), None]:
        assert type(read("fp8", **{key.name: spelling})) is Fp8Config
    for wrong in ("odd", 8, ["e4m3"]):
        with pytest.raises(UnsupportedConfigError, match=f"{key.name} .*expected one of"):
            read("fp8", **{key.name: wrong})


@pytest.mark.parametrize("fmt", ["e5m2", "float8_e4m3fnuz", "float8_e5m2"])
def test_other_codes_are_refused(fmt: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"fmt '{fmt}'"):
        read("fp8", fmt=fmt)


@pytest.mark.parametrize("algorithm", spellings(QUANT_ALGO))
@pytest.mark.parametrize("method", ["modelopt", "fp8", None])
def test_algorithms_of_modelopt(algorithm: str, method: str | None) -> None:
    """In config.json or hf_quant_config.json, under its own method's name, FP8's or none."""
    block = {"quant_algo": algorithm} | ({} if method is None else {"quant_method": method})
    config = get_quantization_config({"quantization_config": block})
    assert isinstance(config, Fp8CheckpointConfig)
    assert config.weight_block_size == ((128, 128) if "pb" in algorithm.lower() else None)


def test_modelopt_with_an_algorithm_a_layer() -> None:
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.up_proj": {"quant_algo": "fp8_pb_wo"},
    }
    config = read("modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert config.weight_block_size == (128, 128)
    layers["lm_head"] = {"quant_algo": "NVFP4"}
    with pytest.raises(UnsupportedConfigError, match="layer lm_head with quant_algo 'NVFP4'"):
        read("modelopt", quant_algo="mixed_precision", quantized_layers=layers)


@pytest.mark.parametrize("fmt", spellings(compressed_tensors.FORMAT))
@pytest.mark.parametrize("holder", ["block", "group"])
def test_formats_of_compressed_tensors(fmt: str, holder: str) -> None:
    group = GROUP | ({"format": fmt} if holder == "group" else {})
    block = fmt if holder == "block" else "mixed-precision"
    assert read("compressed-tensors", format=block, config_groups={"group_0": group})


@pytest.mark.parametrize("strategy", [*spellings(compressed_tensors.STRATEGY), None])
def test_strategies_of_compressed_tensors(strategy: str | None) -> None:
    weights = {"num_bits": 8, "type": "FLOAT", "strategy": strategy, "block_structure": [64, 32]}
    group = {"weights": weights, "targets": ["Linear"]}
    config = read("compressed-tensors", config_groups={"group_0": group})
    assert config.weight_block_size == ((64, 32) if strategy in ("block", "BLOCK") else None)


def test_groups_of_compressed_tensors() -> None:
    """Whole schemes by name, groups without weights, sizes of blocks by module."""
    presets = {"FP8_BLOCK": ["re:.*q_proj$"], "FP8_dynamic": ["Linear"]}
    assert read("compressed-tensors", config_groups=presets).weight_block_size == (128, 128)
    with pytest.raises(UnsupportedConfigError, match="scheme 'NVFP4' is not supported"):
        read("compressed-tensors", config_groups={"NVFP4": ["Linear"]})
    attention = {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8}}
    blocks = {"num_bits": 8, "type": "float", "strategy": "block"}
    config = read(
        "compressed-tensors",
        config_groups={
            "attention": attention,
            "named": {
                "targets": ["re:.*up_proj$"],
                "weights": blocks | {"block_structure": [8, 4]},
            },
            "rest": {"targets": ["Linear"], "weights": blocks | {"block_structure": [16, 16]}},
        },
    )
    assert config.block_size("model.layers.0.mlp.up_proj") == (8, 4)
    assert config.block_size("model.layers.0.mlp.down_proj") == (16, 16)


def test_quark() -> None:
    config = read("quark", exclude=["lm_head", "*.layers.0.mlp.up_proj", "re:.*o_proj"])
    assert config.is_ignored("lm_head")
    assert config.is_ignored("model.layers.0.mlp.up_proj")
    assert config.is_ignored("model.layers.3.self_attn.o_proj")
    assert not config.is_ignored("model.layers.1.mlp.up_proj")
    for change in ({"dtype": "int4"}, {"qscheme": "per_group"}, {"is_dynamic": True}):
        odd = {"weight": {**QUARK["weight"], **change}}
        with pytest.raises(UnsupportedConfigError, match=next(iter(change))):
            read("quark", global_quant_config=odd)
        with pytest.raises(UnsupportedConfigError, match=r"layer_quant_config \*down_proj"):
            read("quark", layer_quant_config={"*down_proj": odd})


@pytest.mark.parametrize("weights", spellings(mistral_form.WEIGHT_FORMAT))
@pytest.mark.parametrize("activations", [*spellings(mistral_form.ACTIVATION_SCHEME), None])
def test_mistrals_own_form(weights: str, activations: str | None) -> None:
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4}
    quantization = {"qformat_weight": weights, "qscheme_act": activations}
    params = {**sizes, "hidden_dim": 8, "vocab_size": 8, "quantization": quantization}
    config = to_hf_config(params, Path("params.json"))
    assert type(get_quantization_config(config)) is Fp8Config


@pytest.mark.parametrize("method", BLOCKS)
@pytest.mark.parametrize("key", SKIP_LISTS)
def test_skip_lists(method: str, key: str) -> None:
    """Writers do not agree on the key, readers take them all."""
    assert read(method, **{key: ["lm_head"]}).is_ignored("lm_head")


# Scales as exponents of two


def metas(scale_dtype: str, scale: str = "weight_scale_inv") -> list[TensorMeta]:
    file = Path("model.safetensors")
    return [
        TensorMeta("model.layers.0.mlp.up_proj.weight", "F8_E4M3", (8, 4), file, 32),
        TensorMeta(f"model.layers.0.mlp.up_proj.{scale}", scale_dtype, (2, 1), file, 2),
    ]


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize(
    ("dtype", "scale_fmt", "runs"),
    [
        ("F8_E8M0", "ue8m0", True),
        ("F8_E8M0", None, True),  # the dtype says it
        ("F32", "ue8m0", True),  # DeepSeek-V3.1
        ("U8", "UE8M0", True),
        ("U8", "float", False),
        ("U8", None, False),
        ("I8", "ue8m0", False),
    ],
)
def test_dtypes_of_scales(dtype: str, scale_fmt: str | None, runs: bool, scale: str) -> None:
    config = read("fp8", scale_fmt=scale_fmt, weight_block_size=[4, 4])
    if runs:
        adapted = config.adapt_to(metas(dtype, scale))
        assert adapted.layouts == {"layers.0.mlp.up_proj": Layout.BLOCK}
        assert adapted.parameter_name(scale) == "weight_scale"
    else:
        with pytest.raises(CheckpointError, match="wrong dtype"):
            config.adapt_to(metas(dtype, scale))


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e8m0fnu])
def test_exponents_of_two_are_exact(stored: torch.dtype) -> None:
    """All 255 of them; the last code is NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    parameter = WeightScaleParameter((256, 4))
    meta = TensorMeta("w.weight_scale", "U8", (256,), Path("model.safetensors"), 256)
    with pytest.raises(CheckpointError, match=r"found: nan at index \[255\]"):
        parameter.load(codes.view(stored), meta, None)
    codes[255] = 127
    parameter.load(codes.view(stored), meta, None)
    expected = torch.pow(2.0, codes.double() - 127)
    assert torch.equal(parameter.data.flatten().double(), expected)


@pytest.mark.parametrize("name", ["model.embed_tokens", "language_model.model.embed_tokens"])
def test_an_embedding_in_fp8_is_named(name: str) -> None:
    """transformers' `modules_to_convert`, compressed-tensors' class `Embedding`."""
    file = Path("model.safetensors")
    table = TensorMeta(f"{name}.weight", "F8_E4M3", (8, 4), file, 32)
    scale = TensorMeta(f"{name}.weight_scale", "F32", (8, 1), file, 32)
    with pytest.raises(CheckpointError, match=rf"embedding table in FP8.*{name}.weight;"):
        read("fp8", modules_to_convert=[name]).adapt_to([table, scale])
