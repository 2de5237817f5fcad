"""Mistral's own form of a checkpoint: `params.json` and `consolidated*.safetensors`.

Its configuration is translated to the keys of transformers' config.json, so that the rest of the
runtime knows one form. Names of tensors are translated by `weight_names`, and rows of the query and
key projections brought into another order when they are loaded (`srt.model_loader.mistral_rows`).

Source of the keys: mistral_inference (`args.py`) and the public params.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.checkpoint.json_values import get_number, get_object
from srt.checkpoint.quantization_keys import E4M3_SPELLINGS, Key
from srt.errors import CheckpointError, UnsupportedConfigError

# Key of params.json -> key of config.json.
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
WEIGHT_FORMAT: Key[bool] = Key("qformat_weight", E4M3_SPELLINGS)
ACTIVATION_SCHEME: Key[str] = Key(
    "qscheme_act", {"tensor": "static", "no_scales": "dynamic"}, default="dynamic"
)
# What transformers' configuration classes take, when params.json says nothing of a length.
_DEFAULT_LENGTH = 128_000
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def to_hf_config(params: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The config.json that says what `params`, the content of params.json, says.

    Raises:
        CheckpointError: A size is missing or not a positive integer.
        UnsupportedConfigError: A mixture of experts, latent attention, audio, or another scheme
            than FP8.
    """
    if params.get("moe"):
        raise UnsupportedConfigError(
            f"{file}: a mixture of experts (moe {params['moe']}) is not supported"
        )
    if params.get("kv_lora_rank"):
        raise UnsupportedConfigError(
            f"{file}: latent attention (kv_lora_rank {params['kv_lora_rank']}) is not supported in "
            "Mistral's own form"
        )
    config: dict[str, Any] = {}
    for key, name in _SIZES.items():
        value = params.get(key)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{file.name} lacks {key}" if value is None else f"{file.name} has a bad {key}",
                file=file,
                expected="a positive integer",
                found="nothing" if value is None else value,
            )
        config[name] = value
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or _DEFAULT_LENGTH
    rope = _rope_parameters(params, length, file)
    is_ministral3 = "llama_4_scaling_beta" in rope
    config |= {
        "architectures": ["Ministral3ForCausalLM" if is_ministral3 else "MistralForCausalLM"],
        "model_type": "ministral3" if is_ministral3 else "mistral",
        "hidden_act": "silu",
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
        "max_position_embeddings": length,
        "sliding_window": params.get("sliding_window"),
        "rope_parameters": rope,
        # The ids of all Mistral tokenizers.
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if _has_vision(params, file):
        config = {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "tie_word_embeddings": config["tie_word_embeddings"],
            "text_config": config,
        }
    quantization = get_object(params, "quantization", file)
    if quantization:
        config["quantization_config"] = _quantization(quantization, file)
    return config


def _has_vision(params: Mapping[str, Any], file: Path) -> bool:
    """Whether a vision tower, which text does without, is beside the language model."""
    others = get_object(params, "multimodal", file)
    if any(key != "vision_encoder_args" for key in others):
        raise UnsupportedConfigError(
            f"{file}: multimodal {', '.join(others)} is not supported; expected vision_encoder_args"
        )
    return bool(others or params.get("vision_encoder"))


def _rope_parameters(params: Mapping[str, Any], length: int, file: Path) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta", 1e4)}
    yarn = get_object(params, "yarn", file)
    if yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": get_number(yarn, "factor", file),
            "original_max_position_embeddings": get_number(yarn, _ORIGINAL_LENGTH, file),
            "beta_fast": yarn.get("beta", 32.0),
            "beta_slow": yarn.get("alpha", 1.0),
            "max_position_embeddings": length,
        }
        if not yarn.get("apply_scale", True):
            # Their quotient is YaRN's factor on attention, which is then 1.
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = get_object(params, "llama_4_scaling", file)
    if scaling:
        rope["llama_4_scaling_beta"] = get_number(scaling, "beta", file)
        rope[_ORIGINAL_LENGTH] = get_number(scaling, _ORIGINAL_LENGTH, file)
    return rope


def _quantization(quantization: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The quantization_config of Mistral's `quantization`."""
    if "quant_method" in quantization:  # newer files hold transformers' own block
        return dict(quantization)
    WEIGHT_FORMAT.read(quantization, f"{file}: quantization")
    scheme = ACTIVATION_SCHEME.read(quantization, f"{file}: quantization")
    return {"quant_method": "fp8", "activation_scheme": scheme}
