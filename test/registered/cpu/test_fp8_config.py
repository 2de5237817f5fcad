"""Which quantization configurations are run, which layers they leave alone, and what else is
refused.
"""

from pathlib import Path
from typing import Any

import pytest

from srt.checkpoint.config_files import read_config
from srt.checkpoint.formats.compressed_tensors import CompressedTensorsConfig
from srt.checkpoint.formats.fp8 import Fp8Config
from srt.checkpoint.formats.fp8_checkpoint import Fp8CheckpointConfig
from srt.checkpoint.formats.registry import QUANT_METHOD, get_quantization_config
from srt.checkpoint.formats.weight_format import Fp8Weight
from srt.checkpoint.kv_scales import KVScales, find_kv_scales
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.unused_tensors import UnusedTensors
from srt.checkpoint.weight_names import canonical_name
from srt.checkpoint.weight_scales import Layout
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.layers.quantization.fp8_linear import Fp8LinearMethod
from srt.layers.quantization.mixed_linear import MixedLinearMethod
from srt.layers.quantization.select_method import get_linear_method
from srt.layers.quantization.unquant import UnquantizedLinearMethod
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.tiny_llama import TINY_CONFIG

register_cpu_ci(est_time=4, suite="per-commit")


def make_meta(name: str, dtype: str, shape: tuple[int, ...] = (8, 4)) -> TensorMeta:
    return TensorMeta(name, dtype, shape, Path("model.safetensors"), 0)


def config_of(name: str, tmp_path: Path) -> Fp8CheckpointConfig:
    """What is made of the configuration of one of FORMATS."""
    write_fp8_checkpoint(FORMATS[name], tmp_path, TINY_CONFIG, {})
    config = get_quantization_config(read_config(tmp_path))
    assert isinstance(config, Fp8CheckpointConfig)
    return config


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognised(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    fmt = FORMATS[name]
    method = fmt.quantization.get("quant_method", "fp8" if fmt.mistral_form else "modelopt")
    assert type(config) is QUANT_METHOD.values[method]
    assert config.weight_block_size == (fmt.block if None not in fmt.block else None)
    assert not config.is_ignored("model.layers.0.mlp.up_proj")
    assert config.is_ignored("lm_head") == (fmt.skip_key is not None)


def test_no_quantization() -> None:
    assert get_quantization_config({}) is None


@pytest.mark.parametrize("holder", ["", "text_config"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_places_of_the_quantization_block(key: str, holder: str) -> None:
    block = {key: {"quant_method": "fp8"}}
    config = get_quantization_config({holder: block} if holder else block)
    assert isinstance(config, Fp8Config)


def compressed(**changes: Any) -> dict[str, Any]:
    """A compressed-tensors block with changes to the block, to its group or to the group's weights
    or activations, whichever has the key.
    """
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    activations: dict[str, Any] = {}
    group: dict[str, Any] = {"targets": ["Linear"]}
    block: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    for key, value in changes.items():
        if key.startswith("act_"):
            activations[key.removeprefix("act_")] = value
        elif key in ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric"):
            weights[key] = value
        else:
            block[key] = value
    if activations:
        group["input_activations"] = activations
    return {"config_groups": {"group_0": group | {"weights": weights}}, **block}


def two_groups() -> dict[str, Any]:
    """Groups with blocks of two sizes."""
    groups = {
        f"group_{i}": compressed(strategy="block", block_structure=[size, 128])["config_groups"][
            "group_0"
        ]
        for i, size in enumerate((128, 64))
    }
    return compressed(config_groups=groups)


def modelopt(algorithm: str | None) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


# Name -> (quantization block, what the message names).
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    "odd scales": ({"quant_method": "fp8", "scale_fmt": "odd"}, "odd"),
    "odd activations": ({"quant_method": "fp8", "activation_scheme": "odd"}, "odd"),
    "bad skip list": ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers"),
    "bad block": (
        {"quant_method": "fp8", "weight_block_size": 128},
        r"weight_block_size 128.*\[block_n, block_k\]",
    ),
    "MXFP4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "MXFP8": ({"quant_method": "mxfp8"}, "mxfp8"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, "'gptq' .*bits 4"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, "'awq' .*bits 4"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    "unnamed": ({"bits": 4}, "None"),
    "ModelOpt NVFP4": (modelopt("NVFP4"), "NVFP4.*expected one of 'fp8'"),
    "ModelOpt MXFP8": (modelopt("MXFP8"), "MXFP8"),
    "ModelOpt W4A16": (modelopt("W4A16_AWQ"), "W4A16_AWQ"),
    "ModelOpt mixed": (modelopt("MIXED_PRECISION"), "MIXED_PRECISION"),
    "ModelOpt without algorithm": (modelopt(None), "quant_algo None"),
    "CT int8": (compressed(format="int-quantized", type="int"), "int-quantized, 8-bit int"),
    "CT int8 in a float format": (compressed(type="int"), "8-bit int weights"),
    "CT int4": (compressed(format="pack-quantized", type="int", num_bits=4), "4-bit int"),
    "CT NVFP4": (
        compressed(format="nvfp4-pack-quantized", num_bits=4, strategy="tensor_group"),
        "nvfp4-pack-quantized, 4-bit float",
    ),
    "CT MXFP8": (compressed(strategy="group", group_size=32), "strategy group, group_size 32"),
    "CT asymmetric": (compressed(symmetric=False), "symmetric"),
    "CT FP4 activations": (compressed(act_num_bits=4, act_type="float"), "4-bit float activations"),
    "CT int8 activations": (compressed(act_num_bits=8, act_type="int"), "8-bit int activations"),
    "CT sparsity": (compressed(sparsity_config={"format": "sparse-24"}), "sparsity_config.*sparse"),
    "CT transforms": (
        compressed(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
        "transform_config.*hadamard",
    ),
    "CT without groups": (compressed(config_groups={}), "config_groups"),
    "CT bad block": (compressed(strategy="block", block_structure="128"), "weight_block_size"),
    "CT block without structure": (compressed(strategy="block"), "lacks block_structure"),
    "CT groups that differ": (two_groups(), r"sizes.*\[128, 128\] and \[64, 128\]"),
    "CT bad expression": (compressed(ignore=["re:("]), "no regular expression"),
    "CT mixed with int4": (
        compressed(
            config_groups={
                **compressed()["config_groups"],
                "group_1": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}},
            }
        ),
        "group_1.*4-bit int",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_schemes_are_named(name: str) -> None:
    config, named = UNSUPPORTED[name]
    with pytest.raises(UnsupportedConfigError, match=named) as info:
        get_quantization_config({"quantization_config": config})
    message = str(info.value)
    assert "supported" in message or "expected" in message or "no regular expression" in message


def test_the_block_must_be_an_object() -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config is not an object.*found: fp8"):
        get_quantization_config({"quantization_config": "fp8"})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quantization_config": 7}, "quantization_config"),
        ({"text_config": {"quantization_config": ["fp8"]}}, "quantization_config"),
        ({"quantization_config": compressed(config_groups=3)}, "config_groups"),
        ({"quantization_config": compressed(sparsity_config="x")}, "sparsity_config"),
        (
            {"quantization_config": compressed(config_groups={"group_0": {"weights": 1}})},
            "weights",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt",
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": 1,
                }
            },
            "quantized_layers",
        ),
        (
            {"quantization_config": {"quant_method": "quark", "global_quant_config": 1}},
            "global_quant_config",
        ),
    ],
    ids=str,
)
def test_what_is_no_object_is_named_with_its_file(config: dict[str, Any], key: str) -> None:
    file = Path("somewhere/config.json")
    with pytest.raises(CheckpointError, match=f"^{key} is not an object") as info:
        get_quantization_config(config, file=file)
    assert info.value.file == file


def test_method_of_a_layer() -> None:
    config = Fp8Config.from_config({"ignored_layers": ["model.layers.0.self_attn.q_proj"]})
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    assert config.weight_formats(k, ()) == (Fp8Weight(Layout.CHANNEL),)
    assert isinstance(get_linear_method(config, k), Fp8LinearMethod)
    assert isinstance(get_linear_method(config, q), UnquantizedLinearMethod)
    merged = get_linear_method(config, "model.layers.0.self_attn.qkv_proj", ["q_proj", "k_proj"])
    assert isinstance(merged, MixedLinearMethod)
    assert [shards for _, shards in merged.runs] == [["q_proj"], ["k_proj"]]


@pytest.mark.parametrize("structure", [[128, 64], (128, 64), "128x64"])
def test_blocks_of_compressed_tensors(structure: object) -> None:
    block = compressed(strategy="block", block_structure=structure)
    assert CompressedTensorsConfig.from_config(block).weight_block_size == (128, 64)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model.layers.7.self_attn.k_scale", "k"),
        ("model.layers.7.self_attn.v_scale", "v"),
        ("language_model.model.layers.7.self_attn.attn.kv_scale", "kv"),
        ("model.layers.7.self_attn.k_proj.k_scale", "k"),
        ("model.layers.7.self_attn.v_proj.output_scale", "v"),
        ("model.layers.7.self_attn.q_proj.output_scale", ""),
        ("model.layers.7.self_attn.k_proj.input_scale", ""),
    ],
)
def test_kv_cache_scales(name: str, parts: str) -> None:
    meta = make_meta(name, "F32", ())
    expected = {7: KVScales(**dict.fromkeys(parts, meta))} if parts else {}
    assert find_kv_scales([meta]) == expected


@pytest.mark.parametrize("listed", [False, True])
def test_the_tensors_decide_whatever_a_list_says(listed: bool) -> None:
    metas = [
        make_meta("model.layers.0.mlp.up_proj.weight", "F8_E4M3"),
        make_meta("model.layers.0.mlp.up_proj.weight_scale", "F32", ()),
        make_meta("lm_head.weight", "BF16"),
    ]
    names = ["model.layers.0"] if listed else []
    config = Fp8Config.from_config({"ignored_layers": names}).adapt_to(metas)
    assert config.is_ignored("lm_head")
    assert not config.is_ignored("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("dtypes", "named"),
    [
        ({"weight": "F8_E4M3"}, "no scale.*up_proj.weight;"),
        ({"weight": "BF16", "weight_scale": "F32"}, "not FP8.*up_proj.weight_scale;"),
        ({"weight": "BF16", "weight_scale_inv": "F32"}, "not FP8.*up_proj.weight_scale_inv;"),
        ({"weight": "F8_E5M2", "weight_scale": "F32"}, "not FP8.*weight is float8_e5m2"),
        ({"weight": "F8_E4M3", "weight_scale": "F32"}, r"wrong shape.*\[8\], \[8, 1\]; found"),
        ({"weight": "F8_E4M3", "weight_scale": "F64"}, "wrong dtype.*found: float64"),
        ({"weight": "F8_E4M3", "weight_scale": "U8"}, "wrong dtype.*found: uint8"),
        ({"weight_scale": "F32"}, "no weight.*up_proj.weight_scale;"),
        (
            {"weight": "F8_E4M3", "weight_scale": "F32", "weight_zero_point": "I8"},
            "^asymmetric weights are not supported.*up_proj.weight_zero_point;",
        ),
        ({"weight": "I8", "weight_zero_point": "I8"}, "^asymmetric weights"),
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
        ("qscale_weight", "weight_scale"),
        ("bias", "bias"),
    ],
)
def test_tensor_names(name: str, parameter: str) -> None:
    assert Fp8Config().parameter_name(name) == parameter
    assert UnusedTensors().reason(f"model.layers.0.mlp.up_proj.{name}") is None


@pytest.mark.parametrize(
    "name", ["qscale_act", "activation_scale", "input_scale", "k_scale", "v_scale", "kv_scale"]
)
def test_scales_that_no_product_needs(name: str) -> None:
    tensor = f"model.layers.0.self_attn.k_proj.{name}"
    assert UnusedTensors().reason(tensor) is not None
    # In a checkpoint that is not quantized it is one too many.
    assert UnusedTensors(has_scales=False).reason(tensor) is None


def test_unused_scales_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metas = [make_meta(f"model.layers.{i}.mlp.up_proj.input_scale", "F32", ()) for i in range(5)]
    with caplog.at_level("INFO"):
        Fp8Config().adapt_to(metas)
    assert [record.getMessage()[0] for record in caplog.records] == ["5"]


def test_canonical_names_of_mistrals_own_form() -> None:
    """Module by module, the names are transformers'."""
    for own, name in {
        "tok_embeddings.weight": "embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "norm.weight": "norm.weight",
        "layers.11.attention.wq.qscale_weight": "layers.11.self_attn.q_proj.qscale_weight",
        "layers.0.attention.wo": "layers.0.self_attn.o_proj",
        "layers.0.feed_forward.w2.weight": "layers.0.mlp.down_proj.weight",
        "layers.0.ffn_norm.weight": "layers.0.post_attention_layernorm.weight",
        "vision_encoder.ln_pre.weight": "vision_tower.ln_pre.weight",
        "layers.0.attention.wqkv.weight": "layers.0.attention.wqkv.weight",
        "output_norm.weight": "output_norm.weight",
    }.items():
        assert canonical_name(own) == name
