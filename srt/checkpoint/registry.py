"""The architectures that run here, by the name that a checkpoint's config.json gives them."""

from collections.abc import Mapping

# Architecture -> module of `srt.models` that defines the class of that name.
MODEL_REGISTRY: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "SmolLM3ForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
}
