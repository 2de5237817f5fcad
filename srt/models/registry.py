"""The classes of the architectures that `srt.checkpoint.registry` lists."""

from importlib import import_module

from srt.checkpoint.registry import MODEL_REGISTRY
from srt.models.decoder import CausalLM


def get_model_class(architecture: str) -> type[CausalLM]:
    """The model class of an architecture; its module is imported when a checkpoint asks for it.

    Whether a checkpoint's architecture is here is checked when its configuration is read
    (:func:`srt.checkpoint.text_model.get_text_model`).
    """
    module = import_module(f"srt.models.{MODEL_REGISTRY[architecture]}")
    model_class = getattr(module, architecture)
    assert issubclass(model_class, CausalLM)
    return model_class
