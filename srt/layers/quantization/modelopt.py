"""`quant_method: modelopt`, as NVIDIA's FP8 checkpoints have it, in `hf_quant_config.json` or, in
newer ones, in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srt.errors import UnsupportedConfigError
from srt.layers.quantization.fp8_checkpoint import Fp8CheckpointConfig, read_block_size
from srt.layers.quantization.skip_list import ModulePatterns, read_names
from srt.model_loader.config_files import CONFIG_FILE
from srt.model_loader.json_values import get_object

# Algorithm -> the block that its scales are for; FP8_PB_WO has 128 x 128 unless it says so.
_ALGORITHMS: Mapping[str, tuple[int, int] | None] = {
    "FP8": None,
    "FP8_PER_CHANNEL_PER_TOKEN": None,
    "FP8_PB_WO": (128, 128),
}


@dataclass(frozen=True)
class ModelOptConfig(Fp8CheckpointConfig):
    """`quant_method: modelopt`."""

    @classmethod
    def get_name(cls) -> str:
        return "modelopt"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelOptConfig:
        # Some writers nest the content of hf_quant_config.json as it is.
        config = get_object(config, "quantization", CONFIG_FILE) or config
        algorithm = config.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            raise UnsupportedConfigError(
                f"ModelOpt quant_algo {algorithm!r} is not supported; "
                f"expected one of {', '.join(_ALGORITHMS)}"
            )
        names = read_names(config, "exclude_modules", "ignore")
        block = _ALGORITHMS[algorithm]
        if block is not None:
            block = read_block_size(config.get("weight_block_size")) or block
        return cls(ignored=ModulePatterns.parse(names, wildcards=True), weight_block_size=block)
