"""Quantization formats, chosen by the `quant_method` of a checkpoint's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE, find_quantization
from srt.checkpoint.formats.compressed_tensors import CompressedTensorsConfig
from srt.checkpoint.formats.fbgemm_fp8 import FbgemmFp8Config
from srt.checkpoint.formats.fp8 import Fp8Config
from srt.checkpoint.formats.fp8_checkpoint import Fp8CheckpointConfig
from srt.checkpoint.formats.modelopt import ModelOptConfig
from srt.checkpoint.formats.online_fp8 import OnlineFp8Config
from srt.checkpoint.formats.quark import QuarkConfig
from srt.checkpoint.quantization_keys import QUANT_METHOD
from srt.errors import UnsupportedConfigError
from srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig

__all__ = [
    "QUANTIZATION_METHODS",
    "LinearMethodBase",
    "QuantizationConfig",
    "get_quantization_config",
]

# A new format is one QuantizationConfig class and one entry here. Nothing of it imports Torch.
QUANTIZATION_METHODS: Mapping[str, type[Fp8CheckpointConfig]] = {
    config.get_name(): config
    for config in (
        Fp8Config,
        CompressedTensorsConfig,
        ModelOptConfig,
        FbgemmFp8Config,
        QuarkConfig,
    )
}


def get_quantization_config(
    hf_config: Mapping[str, Any], online: str | None = None, file: str | Path = CONFIG_FILE
) -> QuantizationConfig | None:
    """The quantization format of a checkpoint, or None if it has none.

    Args:
        hf_config: Content of config.json.
        online: One of QUANTIZATION_CHOICES, to quantize an unquantized checkpoint while it is
            loaded; None to run it as it is.
        file: Where `hf_config` comes from, for messages.

    Raises:
        UnsupportedConfigError: The format is not in the registry, or asks for a variant that is not
            supported; or `online` is no choice, or is asked for a quantized checkpoint.
        CheckpointError: A value is no object where one should be.
    """
    quantization = find_quantization(hf_config, file)
    if online is not None:
        if quantization is not None:
            raise UnsupportedConfigError(
                f"quantization {online} is for unquantized checkpoints; this one is quantized "
                f"already: {_describe(quantization)}"
            )
        return OnlineFp8Config.from_choice(online)
    if quantization is None:
        return None
    method = _method(quantization)
    if method is None:
        raise UnsupportedConfigError(
            f"quantization scheme {_describe(quantization)} is not supported; "
            f"supported: {', '.join(QUANTIZATION_METHODS)}, and checkpoints without quantization"
        )
    return QUANTIZATION_METHODS[method].from_config(quantization, file)


def _method(quantization: Mapping[str, Any]) -> str | None:
    """The format's name, which older compressed-tensors and newer ModelOpt files leave out; None
    if it is none that runs here.
    """
    if quantization.get(QUANT_METHOD.name) is None:
        if "quant_algo" in quantization:
            return ModelOptConfig.get_name()
        if "config_groups" in quantization:
            return CompressedTensorsConfig.get_name()
    return QUANT_METHOD.find(quantization)


def _describe(quantization: Mapping[str, Any]) -> str:
    """The scheme's name with the keys that tell its variants apart, for an error message."""
    variant = [
        f"{key} {quantization[key]!r}"
        for key in ("format", "quant_algo", "bits", "weight_block_size", "fmt")
        if quantization.get(key) is not None
    ]
    name = repr(quantization.get("quant_method"))
    return f"{name} ({', '.join(variant)})" if variant else name
