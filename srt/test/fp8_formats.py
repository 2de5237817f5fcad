"""How each family of FP8 checkpoints in use spells itself, for `srt.test.fp8_checkpoints`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Fp8Format:
    """How a family of checkpoints spells its FP8 weights.

    Attributes:
        block: Rows and columns of a weight that share a scale; None stands for all of them, so that
            `(None, None)` is per tensor and `(1, None)` per channel.
        scale_name: Parameter name of the weight's scale.
        scale_rank: Rank that the scale is stored with. A per-tensor scale has as many sizes of 1; a
            per-channel one is `[N]` or `[N, 1]`; a grid `[n, k]`, or `[n, 1, k, 1]`.
        scale_dtype: Dtype that the scale is stored in.
        input_scale: Name of the activation scale that every FP8 layer has, or None.
        cache_scales: Names of the KV cache's scales, in every attention module.
        skip_key: Key of the list of modules that stay unquantized; None if the format has none.
        skip_always: What the family's files name in that list.
        quantization: The rest of the configuration's quantization block.
        config_key: Where config.json holds that block; None puts it into hf_quant_config.json.
        mistral_form: Whether the files are Mistral's own params.json and consolidated.safetensors.
    """

    block: tuple[int | None, int | None] = (None, None)
    scale_name: str = "weight_scale"
    scale_rank: int = 0
    scale_dtype: torch.dtype = torch.float32
    input_scale: str | None = None
    cache_scales: tuple[str, ...] = ()
    skip_key: str | None = None
    skip_always: tuple[str, ...] = ("lm_head",)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    config_key: str | None = "quantization_config"
    mistral_form: bool = False


def _compressed(
    strategy: str, dynamic: bool, block: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The quantization block that llm-compressor writes."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": strategy,
        "group_size": None,
        "block_structure": list(block) if block else None,
        "observer": "minmax",
    }
    activations = weights | {
        "strategy": ("group" if block else "token") if dynamic else "tensor",
        "group_size": block[1] if block else None,
        "block_structure": None,
        "dynamic": dynamic,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "kv_cache_scheme": None,
    }


def _fp8(activation_scheme: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": activation_scheme, **more}


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_algo": algorithm, "kv_cache_quant_algo": None, **more}


_BLOCK = (128, 128)
_MODELOPT_GROUP = {
    "weights": {"num_bits": 8, "type": "float", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "dynamic": False},
    "targets": ["Linear"],
}

FORMATS: Mapping[str, Fp8Format] = {
    "mistral-hf": Fp8Format(
        scale_name="weight_scale_inv",
        input_scale="activation_scale",
        skip_key="modules_to_not_convert",
        skip_always=("model.vision_tower", "model.multi_modal_projector", "lm_head"),
        quantization=_fp8("static", weight_block_size=None),
    ),
    "mistral-hf-channel": Fp8Format(
        block=(1, None),
        scale_name="weight_scale_inv",
        scale_rank=1,
        scale_dtype=torch.bfloat16,
        skip_key="modules_to_not_convert",
        quantization=_fp8("dynamic", weight_block_size=None),
    ),
    "mistral-own": Fp8Format(
        scale_name="qscale_weight",
        input_scale="qscale_act",
        quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
        mistral_form=True,
    ),
    "autofp8-static": Fp8Format(
        input_scale="input_scale", skip_key="ignored_layers", quantization=_fp8("static")
    ),
    "autofp8-dynamic": Fp8Format(scale_rank=1, quantization=_fp8("dynamic")),
    "autofp8-kv": Fp8Format(
        scale_rank=2,
        scale_dtype=torch.float16,
        input_scale="input_scale",
        cache_scales=("kv_scale",),
        skip_key="ignored_layers",
        quantization=_fp8("static", kv_cache_scheme="static"),
    ),
    "deepseek": Fp8Format(
        block=_BLOCK,
        scale_name="weight_scale_inv",
        scale_rank=2,
        quantization=_fp8("dynamic", fmt="e4m3", weight_block_size=list(_BLOCK)),
    ),
    # Blocks small enough that a tiny weight has many of them, and ragged ones.
    "deepseek-small-blocks": Fp8Format(
        block=(40, 64),
        scale_name="weight_scale_inv",
        scale_rank=2,
        quantization=_fp8("dynamic", fmt="e4m3", weight_block_size=[40, 64]),
    ),
    "qwen3": Fp8Format(
        block=_BLOCK,
        scale_name="weight_scale_inv",
        scale_rank=2,
        scale_dtype=torch.bfloat16,
        skip_key="modules_to_not_convert",
        quantization=_fp8("dynamic", weight_block_size=list(_BLOCK)),
    ),
    "compressed-tensors-static": Fp8Format(
        scale_rank=1,
        input_scale="input_scale",
        skip_key="ignore",
        quantization=_compressed("tensor", dynamic=False),
    ),
    "compressed-tensors-dynamic": Fp8Format(
        block=(1, None),
        scale_rank=2,
        scale_dtype=torch.bfloat16,
        cache_scales=("k_scale", "v_scale"),
        skip_key="ignore",
        skip_always=("re:.*lm_head",),
        quantization=_compressed("channel", dynamic=True),
    ),
    "compressed-tensors-block": Fp8Format(
        block=_BLOCK,
        scale_rank=2,
        scale_dtype=torch.bfloat16,
        skip_key="ignore",
        quantization=_compressed("block", dynamic=True, block=_BLOCK),
    ),
    "compression-config": Fp8Format(
        block=(1, None),
        scale_rank=1,
        skip_key="ignore",
        quantization=_compressed("channel", dynamic=True),
        config_key="compression_config",
    ),
    "modelopt": Fp8Format(
        input_scale="input_scale",
        cache_scales=("k_scale", "v_scale"),
        skip_key="exclude_modules",
        quantization=_modelopt("FP8", kv_cache_quant_algo="FP8"),
        config_key=None,
    ),
    "modelopt-channel": Fp8Format(
        block=(1, None),
        scale_rank=1,
        quantization=_modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        config_key=None,
    ),
    "modelopt-block": Fp8Format(
        block=_BLOCK,
        scale_rank=4,
        skip_key="exclude_modules",
        quantization=_modelopt("FP8_PB_WO"),
        config_key=None,
    ),
    "modelopt-in-config": Fp8Format(
        input_scale="input_scale",
        skip_key="ignore",
        skip_always=("lm_head*",),
        quantization={
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "config_groups": {"group_0": _MODELOPT_GROUP},
            "producer": {"name": "modelopt", "version": "0.33.0"},
        },
    ),
    "fbgemm": Fp8Format(
        block=(1, None),
        scale_rank=2,
        skip_key="modules_to_not_convert",
        quantization={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
}
