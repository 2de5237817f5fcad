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
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.checkpoint.formats.quark import QuarkConfig
from srt.checkpoint.quantization_keys import Key
from srt.errors import UnsupportedConfigError

# A new format is one module and its class here.
FORMATS: tuple[type[Fp8CheckpointConfig], ...] = (
    Fp8Config,
    CompressedTensorsConfig,
    ModelOptConfig,
    FbgemmFp8Config,
    QuarkConfig,
)
QUANT_METHOD: Key[type[Fp8CheckpointConfig]] = Key(
    "quant_method", {name: config for config in FORMATS for name in config.names}
)


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
    config_class = _find_class(quantization)
    if config_class is None:
        raise UnsupportedConfigError(
            f"quantization scheme {_describe(quantization)} is not supported; "
            f"supported: {', '.join(config.names[0] for config in FORMATS)}, "
            "and checkpoints without quantization"
        )
    return config_class.from_config(quantization, file)


def _find_class(quantization: Mapping[str, Any]) -> type[Fp8CheckpointConfig] | None:
    """The class that reads the format, whose name older compressed-tensors and newer ModelOpt files
    leave out; None if it is none that runs here.
    """
    if quantization.get(QUANT_METHOD.name) is None:
        if "quant_algo" in quantization:
            return ModelOptConfig
        if "config_groups" in quantization:
            return CompressedTensorsConfig
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
