"""`quant_method: quark`, as AMD's FP8 checkpoints have it.

Source of the keys: amd-quark (`torch/quantization/config/config.py`, `torch/export`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.formats.fp8_checkpoint import Fp8CheckpointConfig
from srt.checkpoint.formats.skip_list import ModulePatterns, read_names
from srt.checkpoint.json_values import get_object
from srt.checkpoint.quantization_keys import E4M3_SPELLINGS, SKIP_LISTS, Key
from srt.errors import UnsupportedConfigError

WEIGHT_DTYPE: Key[bool] = Key("dtype", E4M3_SPELLINGS)
# The elements that share a scale.
QSCHEME: Key[str] = Key("qscheme", {"per_tensor": "tensor", "per_channel": "channel"})

# Where schemes for some of the layers are, by pattern or by class.
_LAYERS = ("layer_quant_config", "layer_type_quant_config")


@dataclass(frozen=True)
class QuarkConfig(Fp8CheckpointConfig):
    """`quant_method: quark` with FP8 weights per tensor or per channel."""

    names = ("quark",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], file: str | Path = CONFIG_FILE) -> QuarkConfig:
        schemes = {"global_quant_config": get_object(config, "global_quant_config", file)}
        for key in _LAYERS:
            layers = get_object(config, key, file)
            schemes |= {f"{key} {name}": get_object(layers, name, file) for name in layers}
        for name, scheme in schemes.items():
            _check_weight(f"Quark {name}", get_object(scheme, "weight", file))
        names = read_names(config, *SKIP_LISTS)
        return cls(ignored=ModulePatterns.parse(names, regex=True, wildcards=True))


def _check_weight(what: str, weight: Mapping[str, Any]) -> None:
    """Raises unless weights so described run; an empty description leaves them unquantized."""
    if not weight:
        return
    WEIGHT_DTYPE.read(weight, f"{what}: a weight")
    QSCHEME.read(weight, f"{what}: a weight")
    if weight.get("is_dynamic") or weight.get("symmetric") is False:
        raise UnsupportedConfigError(
            f"{what}: a weight with is_dynamic {weight.get('is_dynamic')}, symmetric "
            f"{weight.get('symmetric')} is not supported; expected static, symmetric scales"
        )
