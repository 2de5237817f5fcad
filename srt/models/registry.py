"""Architectures by the name that a checkpoint's config.json gives them."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from srt.errors import UnsupportedConfigError

# Architecture -> module that defines the class of that name; imported when a checkpoint asks for
# it.
MODEL_REGISTRY: Mapping[str, str] = {
    "LlamaForCausalLM": "srt.models.llama",
}


def check_architecture(architecture: str) -> None:
    """Raises UnsupportedConfigError unless the architecture is in the registry."""
    if architecture not in MODEL_REGISTRY:
        raise UnsupportedConfigError(
            f"architecture {architecture!r} is not supported; "
            f"supported: {', '.join(MODEL_REGISTRY)}"
        )


def get_model_class(architecture: str) -> Any:
    """The model class of an architecture.

    It is a `torch.nn.Module` built from `(config: ModelConfig, quant: QuantizationConfig | None)`
    whose `forward` takes a ForwardBatch and returns logits, and whose `is_unused_tensor(name)`
    tells which checkpoint tensors it does without.

    Raises:
        UnsupportedConfigError: The architecture is not in the registry.
    """
    check_architecture(architecture)
    return getattr(import_module(MODEL_REGISTRY[architecture]), architecture)
