"""Quantization formats, chosen by the `quant_method` of a checkpoint's configuration."""

from collections.abc import Mapping
from typing import Any

from srt.errors import UnsupportedConfigError
from srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from srt.layers.quantization.fp8 import Fp8Config

__all__ = [
    "QUANTIZATION_METHODS",
    "LinearMethodBase",
    "QuantizationConfig",
    "get_quantization_config",
]

# A new format is one QuantizationConfig class and one line here.
QUANTIZATION_METHODS: Mapping[str, type[QuantizationConfig]] = {
    config.get_name(): config for config in (Fp8Config,)
}


def get_quantization_config(hf_config: Mapping[str, Any]) -> QuantizationConfig | None:
    """The quantization format of a checkpoint, or None if it has none.

    Args:
        hf_config: Content of config.json.

    Raises:
        UnsupportedConfigError: The format is not in the registry, or asks for a variant that is not
            supported.
    """
    quantization = hf_config.get("quantization_config") or hf_config.get("compression_config")
    if not quantization:
        return None
    name = quantization.get("quant_method")
    config = QUANTIZATION_METHODS.get(name)
    if config is None:
        raise UnsupportedConfigError(
            f"quantization scheme {_describe(quantization)} is not supported; "
            f"supported: {', '.join(QUANTIZATION_METHODS)}, and checkpoints without quantization"
        )
    return config.from_config(quantization)


def _describe(quantization: Mapping[str, Any]) -> str:
    """The scheme's name with the keys that tell its variants apart, for an error message."""
    variant = [
        f"{key} {quantization[key]!r}"
        for key in ("format", "quant_algo", "bits", "weight_block_size", "fmt")
        if quantization.get(key) is not None
    ]
    name = repr(quantization.get("quant_method"))
    return f"{name} ({', '.join(variant)})" if variant else name
