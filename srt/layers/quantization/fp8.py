"""`quant_method: fp8`, which three families of checkpoints share: Mistral's in Hugging Face form
(`weight_scale_inv`, `modules_to_not_convert`), AutoFP8's (`weight_scale`, `ignored_layers`), and
DeepSeek-V3's and Qwen3's with a grid of scales (`weight_block_size`).

The scale multiplies the stored weight in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srt.errors import UnsupportedConfigError
from srt.layers.quantization.fp8_checkpoint import Fp8CheckpointConfig, read_block_size
from srt.layers.quantization.skip_list import ModulePatterns, read_names


@dataclass(frozen=True)
class Fp8Config(Fp8CheckpointConfig):
    """`quant_method: fp8`."""

    @classmethod
    def get_name(cls) -> str:
        return "fp8"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Fp8Config:
        fmt = config.get("fmt") or "e4m3"
        if fmt != "e4m3":
            raise UnsupportedConfigError(
                f"FP8 weights of format {fmt!r} are not supported; expected 'e4m3'"
            )
        scale_fmt = config.get("scale_fmt")
        if scale_fmt not in (None, "ue8m0"):
            raise UnsupportedConfigError(
                f"FP8 scales of format {scale_fmt!r} are not supported; expected none or 'ue8m0'"
            )
        scheme = config.get("activation_scheme") or "dynamic"
        if scheme not in ("dynamic", "static"):
            raise UnsupportedConfigError(
                f"FP8 activation_scheme {scheme!r} is not supported; expected 'dynamic' or 'static'"
            )
        names = read_names(config, "modules_to_not_convert", "ignored_layers")
        return cls(
            ignored=ModulePatterns.parse(names),
            weight_block_size=read_block_size(config.get("weight_block_size")),
        )
