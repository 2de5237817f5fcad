"""Which quantization configurations are run, which layers they leave alone, and what else is
refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from srt.errors import CheckpointError, UnsupportedConfigError
from srt.layers.quantization import get_quantization_config
from srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from srt.layers.quantization.unquant import UnquantizedLinearMethod
from srt.model_loader.checkpoint import TensorMeta
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

MISTRAL = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}
AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}


def make_meta(name: str, dtype: str, shape: tuple[int, ...] = (8, 4)) -> TensorMeta:
    return TensorMeta(name, dtype, shape, Path("model.safetensors"), 0)


@pytest.mark.parametrize("config", [MISTRAL, AUTOFP8, {"quant_method": "fp8"}])
def test_fp8_spellings_are_recognised(config: dict[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        assert isinstance(get_quantization_config({key: config}), Fp8Config)


def test_no_quantization() -> None:
    assert get_quantization_config({}) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "block-scaled FP8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "odd"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4}, "bits 4"),
        ({"bits": 4}, "None"),
    ],
)
def test_unsupported_schemes_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=named) as info:
        get_quantization_config({"quantization_config": config})
    assert "supported" in str(info.value) or "expected" in str(info.value)


@pytest.mark.parametrize(
    "entry_prefix", ["", "model.", "language_model.model.", "model.language_model."]
)
@pytest.mark.parametrize(
    "name_prefix", ["", "model.", "language_model.model.", "model.language_model."]
)
def test_skip_lists_match_under_any_wrapper(entry_prefix: str, name_prefix: str) -> None:
    config = Fp8Config.from_config(
        {"modules_to_not_convert": [f"{entry_prefix}layers.1.self_attn", f"{entry_prefix}lm_head"]}
    )
    assert config.is_ignored(f"{name_prefix}layers.1.self_attn.q_proj")
    assert config.is_ignored(f"{name_prefix}lm_head")
    assert not config.is_ignored(f"{name_prefix}layers.11.self_attn.q_proj")
    assert not config.is_ignored(f"{name_prefix}layers.1.mlp.up_proj")


def test_skip_entries_match_whole_components() -> None:
    config = Fp8Config.from_config({"ignored_layers": ["mlp.gate", "down_proj", "lm_head.weight"]})
    assert config.is_ignored("model.layers.0.mlp.gate")
    assert not config.is_ignored("model.layers.0.mlp.gate_proj")
    assert config.is_ignored("model.layers.7.mlp.down_proj")
    assert config.is_ignored("lm_head")


def test_method_of_a_layer() -> None:
    config = Fp8Config.from_config({"ignored_layers": ["model.layers.0.self_attn.q_proj"]})
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    assert isinstance(config.get_linear_method(k, ()), Fp8LinearMethod)
    assert isinstance(config.get_linear_method(q, ()), UnquantizedLinearMethod)
    with pytest.raises(UnsupportedConfigError, match=r"q_proj unquantized.*k_proj FP8"):
        config.get_linear_method("model.layers.0.self_attn.qkv_proj", (q, k))


def test_dtype_decides_where_no_list_names_a_layer() -> None:
    metas = [
        make_meta("model.layers.0.mlp.up_proj.weight", "F8_E4M3"),
        make_meta("model.layers.0.mlp.up_proj.weight_scale", "F32", ()),
        make_meta("lm_head.weight", "BF16"),
    ]
    config = Fp8Config().adapt_to(metas)
    assert config.is_ignored("lm_head")
    assert not config.is_ignored("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        ({"weight": "F8_E4M3"}, "no scale.*up_proj.weight;"),
        ({"weight": "BF16", "weight_scale": "F32"}, "not FP8.*up_proj.weight_scale;"),
        ({"weight": "BF16", "weight_scale_inv": "F32"}, "not FP8.*up_proj.weight_scale_inv;"),
    ],
)
def test_scales_go_with_fp8_weights(dtypes: dict[str, str], named: str) -> None:
    metas = [make_meta(f"model.layers.0.mlp.up_proj.{n}", dtype) for n, dtype in dtypes.items()]
    with pytest.raises(CheckpointError, match=named) as info:
        Fp8Config().adapt_to(metas)
    assert info.value.file == Path("model.safetensors")
    assert info.value.expected is not None
    assert info.value.found is not None


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("weight", "weight"),
        ("weight_scale", "weight_scale"),
        ("weight_scale_inv", "weight_scale"),
        ("bias", "bias"),
        *((n, None) for n in ("activation_scale", "input_scale", "k_scale", "v_scale", "kv_scale")),
    ],
)
def test_tensor_names(name: str, parameter: str | None) -> None:
    assert Fp8Config().parameter_name(name) == parameter


def test_unused_scales_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metas = [make_meta(f"model.layers.{i}.mlp.up_proj.input_scale", "F32", ()) for i in range(5)]
    with caplog.at_level("INFO"):
        Fp8Config().adapt_to(metas)
    assert [record.getMessage()[0] for record in caplog.records] == ["5"]


def test_meta_dtype() -> None:
    assert make_meta("x", "F8_E4M3").torch_dtype == torch.float8_e4m3fn
