"""`quant_method: fbgemm_fp8`, as Meta's FP8 checkpoints have it: one scale `[N, 1]` for each output
channel. `activation_scale_ub` bounds the scales of 8-bit activations, which there are none of here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.formats.fp8_checkpoint import Fp8CheckpointConfig
from srt.checkpoint.formats.skip_list import ModulePatterns, read_names
from srt.checkpoint.quantization_keys import SKIP_LISTS


@dataclass(frozen=True)
class FbgemmFp8Config(Fp8CheckpointConfig):
    """`quant_method: fbgemm_fp8`."""

    names = ("fbgemm_fp8", "fbgemm-fp8")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], file: str | Path = CONFIG_FILE
    ) -> FbgemmFp8Config:
        return cls(ignored=ModulePatterns.parse(read_names(config, *SKIP_LISTS)))
