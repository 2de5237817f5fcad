"""Architectures by the name that a checkpoint's config.json gives them."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

# Architecture -> module that defines the class of that name; imported when a checkpoint asks for
# it.
MODEL_REGISTRY: Mapping[str, str] = {
    "LlamaForCausalLM": "srt.models.llama",
    "SmolLM3ForCausalLM": "srt.models.llama",
    "MistralForCausalLM": "srt.models.mistral",
    "MinistralForCausalLM": "srt.models.mistral",
    "Ministral3ForCausalLM": "srt.models.mistral",
    "Qwen2ForCausalLM": "srt.models.qwen",
    "Qwen3ForCausalLM": "srt.models.qwen",
    "DeepseekV2ForCausalLM": "srt.models.deepseek",
    "DeepseekV3ForCausalLM": "srt.models.deepseek",
}


def get_model_class(architecture: str) -> Any:
    """The model class of an architecture.

    It is a `torch.nn.Module` built from `(config: ModelConfig, quant: QuantizationConfig | None)`
    whose `forward` takes a ForwardBatch and returns logits, and whose `is_unused_tensor(name)`
    tells which checkpoint tensors it does without. Whether a checkpoint's architecture is here is
    checked when its configuration is read (:func:`srt.checkpoint.text_model.get_text_model`).
    """
    return getattr(import_module(MODEL_REGISTRY[architecture]), architecture)
