"""Tiny checkpoints of every architecture, and transformers' own model over the same weights.

Sizes divide by no block or vector width. Lengths are tiny too: within 48 tokens windows slide, and
positions pass the original context of every scaled rotary embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Mistral3ForConditionalGeneration

from srt.configs.model_config import ModelConfig
from srt.test.contiguous_runner import ContiguousRunner, DecodeInput, ExtendInput

VOCAB_SIZE = 1007
ORIGINAL_LENGTH = 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
}


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return _COMMON | {"architectures": [architecture], "model_type": model_type} | more


_MINISTRAL3 = _config(
    "Ministral3ForCausalLM",
    "ministral3",
    head_dim=32,
    rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
)
_MLA = {
    "num_key_value_heads": 6,
    "hidden_size": 192,
    "kv_lora_rank": 72,
    "q_lora_rank": 88,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 0,
}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": _config(
        "LlamaForCausalLM", "llama", hidden_size=192, head_dim=32, rope_parameters=_LLAMA3
    ),
    # As SmolLM2.
    "llama-tied": _config(
        "LlamaForCausalLM",
        "llama",
        hidden_size=192,
        head_dim=32,
        rope_parameters=_DEFAULT,
        tie_word_embeddings=True,
    ),
    "llama-bias": _config(
        "LlamaForCausalLM",
        "llama",
        hidden_size=192,
        head_dim=32,
        rope_parameters=_DEFAULT | {"rope_type": "linear", "factor": 4.0},
        attention_bias=True,
        mlp_bias=True,
    ),
    "smollm3": _config(
        "SmolLM3ForCausalLM",
        "smollm3",
        hidden_size=192,
        rope_parameters=_DEFAULT,
        no_rope_layers=[1, 0],
        tie_word_embeddings=True,
    ),
    "mistral": _config(
        "MistralForCausalLM",
        "mistral",
        head_dim=32,
        rope_parameters=_DEFAULT,
        sliding_window=9,
    ),
    "ministral": _config(
        "MinistralForCausalLM",
        "ministral",
        head_dim=32,
        rope_parameters=_DEFAULT,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "ministral3": _MINISTRAL3 | {"sliding_window": 20},
    # As it is published: behind a wrapper with a vision tower.
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": _MINISTRAL3,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 28,
            "patch_size": 14,
        },
    },
    "qwen2": _config("Qwen2ForCausalLM", "qwen2", hidden_size=192, rope_parameters=_DEFAULT),
    "qwen2-window": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        hidden_size=192,
        rope_parameters=_YARN,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    ),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3", head_dim=32, rope_parameters=_DEFAULT),
    "deepseek-v2": _config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **_MLA | {"q_lora_rank": None},
        rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek-v3": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_MLA,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-plain": _config(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_MLA,
        rope_parameters=_DEFAULT,
        rope_interleave=False,
        attention_bias=True,
    ),
}


def _transformers_model(config: Mapping[str, Any]) -> Any:
    """transformers' own model of a configuration, on the device in use."""
    hf_config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    hf_config._attn_implementation = "eager"
    if config["model_type"] == "mistral3":
        return Mistral3ForConditionalGeneration(hf_config)
    return AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")


def make_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random bf16 weights under the names and with the shapes of transformers' model."""
    with torch.device("meta"):
        shapes = {k: v.shape for k, v in _transformers_model(config).state_dict().items()}
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        # Weights of a size that keeps activations near 1, norms near 1, biases small.
        if "norm" in name:
            values = 1 + 0.1 * values
        elif len(shape) > 1:
            values = values * shape[-1] ** -0.5
        else:
            values = 0.1 * values
        tensors[name] = values.to(torch.bfloat16)
    return tensors


def vision_modules(tensors: Iterable[str]) -> list[str]:
    """Modules of a vision tower and its projector among the tensors' names."""
    parts = (".vision_tower.", ".multi_modal_projector.")
    return sorted({n.rpartition(".")[0] for n in tensors if any(p in f".{n}" for p in parts)})


def reference_model(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """transformers' model in float32 over float32 weights."""
    model = _transformers_model(config)
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    model.tie_weights()
    return model.float().eval()


def reference_log_probs(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], token_ids: Sequence[int]
) -> Tensor:
    """`[T, vocab_size]` after every token, by the reference model."""
    with torch.inference_mode():
        logits: Tensor = reference_model(config, weights)(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


class Session:
    """One request on a loaded checkpoint; every result is log-probabilities `[vocab_size]` after
    the last token.

    Args:
        path: The checkpoint.
        dtype: Of activations.
        quantization: Scheme to quantize with while loading.
        options: Of the engine.
    """

    def __init__(
        self, path: Path, dtype: str, *, quantization: str | None = None, **options: Any
    ) -> None:
        config = ModelConfig.from_pretrained(path, dtype=dtype, quantization=quantization)
        options = {"max_total_tokens": 128, "progress": False} | options
        self.runner = ContiguousRunner(config, **options)
        self._length = 0

    def prefill(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """A new request with this prompt, `chunk` tokens a pass."""
        chunk = chunk or len(token_ids)
        for start in range(0, len(token_ids), chunk):
            part = token_ids[start : start + chunk]
            logits = self.runner.extend([ExtendInput(part, start, 1)])
        self._length = len(token_ids)
        return logits[0].log_softmax(-1)

    def decode(self, token_id: int) -> Tensor:
        """The request goes on with one token."""
        logits = self.runner.decode([DecodeInput(token_id, self._length, 1)])
        self._length += 1
        return logits[0].log_softmax(-1)
