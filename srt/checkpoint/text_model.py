"""Which text model a configuration describes, and whether it is one that runs here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import get_architecture
from srt.checkpoint.context_length import LONGEST_CONTEXT
from srt.checkpoint.json_values import get_object
from srt.checkpoint.registry import MODEL_REGISTRY
from srt.errors import CheckpointError, UnsupportedConfigError

# Wrapper -> (`model_type` of its text model -> architecture, default model_type, modules that text
# does not need).
_WRAPPERS: Mapping[str, tuple[Mapping[str, str], str, tuple[str, ...]]] = {
    "Mistral3ForConditionalGeneration": (
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        "mistral",
        ("vision_tower", "multi_modal_projector"),
    ),
}

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_ACTIVATIONS = ("silu", "swish")

# Options that change what a model computes and that nothing here computes.
_UNSUPPORTED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_sinks",
    "attention_chunk_size",
)

# Sizes that are taken from the configuration -> the largest that is believed, far above real ones:
# some decide how long a list is, or how many layers are built, before a tensor is looked at.
_LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "num_nextn_predict_layers": 10_000,
    "num_mtp_layers": 10_000,  # transformers' other name of the same
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 26,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 28,
    "max_position_embeddings": LONGEST_CONTEXT,
    "q_lora_rank": 1 << 24,
    "kv_lora_rank": 1 << 24,
    "qk_nope_head_dim": 1 << 16,
    "qk_rope_head_dim": 1 << 16,
    "v_head_dim": 1 << 16,
    "first_k_dense_replace": 1 << 31,
    "sliding_window": 1 << 62,
}
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "llama_4_scaling_beta",
)
# Of the sizes, those of which 0 stands for none.
_MAY_BE_ZERO = (
    "first_k_dense_replace",
    "kv_lora_rank",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "sliding_window",
)


@dataclass(frozen=True)
class TextModel:
    """The text model of a checkpoint.

    Attributes:
        architecture: Name in the model registry.
        config: Its part of config.json.
        skipped_modules: Modules of the wrapper around it, in canonical names, which text does not
            need.
    """

    architecture: str
    config: Mapping[str, Any]
    skipped_modules: tuple[str, ...] = ()


def get_text_model(config: Mapping[str, Any], file: Path) -> TextModel:
    """The text model that `config`, the content of `file`, describes.

    Raises:
        CheckpointError: A key is missing or malformed.
        UnsupportedConfigError: The architecture, or an option of it, is not supported; the message
            names it.
    """
    architecture = get_architecture(config, file)
    if architecture not in _WRAPPERS:
        model = TextModel(architecture, config)
    else:
        architectures, default, skipped = _WRAPPERS[architecture]
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise CheckpointError(
                f"the configuration of {architecture} lacks its text model",
                file=file,
                expected='"text_config": {...}',
                found="nothing" if text is None else text,
            )
        kind = text.get("model_type") or default
        if kind not in architectures:
            raise UnsupportedConfigError(
                f"text model {kind!r} of {architecture} is not supported; "
                f"supported: {', '.join(architectures)}"
            )
        # The wrapper's word on tying, often only its default, counts where the text model is mute.
        tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
        model = TextModel(architectures[kind], {**tied, **text, "model_type": kind}, skipped)
    check_sizes(model.config, file)
    _check_rope(model.config, file)
    _check_experts(architecture, model.config)
    if model.architecture not in MODEL_REGISTRY:
        raise UnsupportedConfigError(
            f"architecture {architecture!r} is not supported; "
            f"supported: {', '.join((*MODEL_REGISTRY, *_WRAPPERS))}"
        )
    _check_options(model.config)
    return model


def check_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Raises CheckpointError if a size in `config`, a part of `file`, is none; null and absent ones
    are left to whoever needs them.
    """
    for key, largest in _LARGEST.items():
        value = config.get(key)
        if value is None:
            continue
        least = 0 if key in _MAY_BE_ZERO else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            expected = "an integer >= 0" if least == 0 else "a positive integer"
        elif value > largest:
            expected = f"at most {largest:,}"
        else:
            continue
        raise CheckpointError(
            f"{file.name} has a bad {key}", file=file, expected=expected, found=value
        )


def _check_rope(config: Mapping[str, Any], file: Path) -> None:
    """Refuses what is no number among the parameters of the rotary embedding."""
    for block_name in ("rope_parameters", "rope_scaling"):
        block = get_object(config, block_name, file)
        for key in _ROPE_NUMBERS:
            value = block.get(key)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is None or (is_number and 0 <= value < math.inf):
                continue
            raise CheckpointError(
                f"{file.name} has a bad {block_name}.{key}",
                file=file,
                expected="a finite number >= 0",
                found=value,
            )


def _check_experts(architecture: str, config: Mapping[str, Any]) -> None:
    """Refuses a mixture of experts in any layer that exists."""
    for key in _EXPERT_KEYS:
        count = config.get(key)
        if not isinstance(count, int) or count < 1:
            continue
        dense = config.get("first_k_dense_replace")
        layers = config.get("num_hidden_layers")
        if isinstance(dense, int) and isinstance(layers, int) and dense >= layers:
            continue
        raise UnsupportedConfigError(
            f"mixture-of-experts layers are not supported yet: {architecture} with {key} {count}; "
            "expected a dense model"
        )


def _check_options(config: Mapping[str, Any]) -> None:
    """Refuses options that change the result and that are not computed here."""
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedConfigError(
            f"hidden_act {activation!r} is not supported; expected {_ACTIVATIONS[0]!r}"
        )
    for key in _UNSUPPORTED:
        if config.get(key):
            raise UnsupportedConfigError(f"{key} {config[key]!r} is not supported; expected none")
    known = ("full_attention", "sliding_attention")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise UnsupportedConfigError(f"layer_types {layer_types!r}: expected a list, or none")
    for kind in layer_types:
        if kind not in known:
            raise UnsupportedConfigError(
                f"layer_types with {kind!r} is not supported; expected {' or '.join(known)}"
            )
