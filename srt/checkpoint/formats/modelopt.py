"""`quant_method: modelopt`, as NVIDIA's FP8 checkpoints have it, in `hf_quant_config.json` or, in
newer ones, in config.json.

Source of the keys: nvidia-modelopt (`export/quant_utils.py`, `export/convert_hf_config.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.formats.fp8_checkpoint import (
    DEFAULT_BLOCK,
    Fp8CheckpointConfig,
    read_block_size,
)
from srt.checkpoint.formats.skip_list import ModulePatterns, read_names
from srt.checkpoint.json_values import get_object
from srt.checkpoint.quantization_keys import SKIP_LISTS, Key
from srt.errors import UnsupportedConfigError


class Block(Enum):
    """What an algorithm's name says of blocks."""

    NONE = "no blocks"
    DEFAULT = "blocks of 128 x 128 where the configuration gives no size"


# ModelOpt writes its own names of the block formats as they are, in lower case.
QUANT_ALGO: Key[Block] = Key(
    "quant_algo",
    {
        "fp8": Block.NONE,
        "fp8_per_channel_per_token": Block.NONE,
        "fp8_pc_pt": Block.NONE,
        "fp8_pb": Block.DEFAULT,
        "fp8_pb_wo": Block.DEFAULT,
        "fp8_pb_real": Block.DEFAULT,
    },
)
_MIXED_PRECISION = "mixed_precision"


@dataclass(frozen=True)
class ModelOptConfig(Fp8CheckpointConfig):
    """`quant_method: modelopt`."""

    names = ("modelopt", "modelopt_fp8")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], file: str | Path = CONFIG_FILE
    ) -> ModelOptConfig:
        # Some writers nest the content of hf_quant_config.json as it is.
        config = get_object(config, "quantization", file) or config
        algorithms = {QUANT_ALGO.read(part, what) for what, part in _parts(config, file).items()}
        block = None
        if Block.DEFAULT in algorithms:
            block = read_block_size(config.get("weight_block_size")) or DEFAULT_BLOCK
        names = read_names(config, *SKIP_LISTS)
        return cls(ignored=ModulePatterns.parse(names, wildcards=True), weight_block_size=block)


def _parts(config: Mapping[str, Any], file: str | Path) -> Mapping[str, Mapping[str, Any]]:
    """What has an algorithm, by what a message calls it: the checkpoint, or each of its layers."""
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.lower() != _MIXED_PRECISION:
        return {"a ModelOpt checkpoint": config}
    layers = get_object(config, "quantized_layers", file)
    if not layers:
        raise UnsupportedConfigError(
            f"a ModelOpt checkpoint with quant_algo {algorithm!r} is not supported without "
            "quantized_layers"
        )
    return {f"ModelOpt layer {name}": get_object(layers, name, file) for name in layers}
