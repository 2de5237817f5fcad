"""`quant_method: fp8`, which several families of checkpoints share: Mistral's in Hugging Face form
(`weight_scale_inv`, `modules_to_not_convert`), AutoFP8's (`weight_scale`, `ignored_layers`),
DeepSeek-V3's and Qwen3's with a grid of scales (`weight_block_size`), transformers' own
(`scale_fmt`) and ModelOpt's (`quant_algo`).

The scale multiplies the stored weight in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.formats.fp8_checkpoint import (
    DEFAULT_BLOCK,
    Fp8CheckpointConfig,
    read_block_size,
)
from srt.checkpoint.formats.modelopt import QUANT_ALGO, Block
from srt.checkpoint.formats.skip_list import ModulePatterns, read_names
from srt.checkpoint.quantization_keys import E4M3_SPELLINGS, SKIP_LISTS, Key

# Codes of the weights: DeepSeek ("e4m3"), MiniMax ("float8_e4m3fn").
WEIGHT_FORMAT: Key[bool] = Key("fmt", E4M3_SPELLINGS, default=True)
# Whether scales may be stored as exponents of two, in bytes.
SCALE_FORMAT: Key[bool] = Key(
    "scale_fmt",
    {
        **dict.fromkeys(("float", "float32", "fp32", "torch.float32"), False),
        **dict.fromkeys(("ue8m0", "e8m0", "float8_e8m0fnu", "torch.float8_e8m0fnu"), True),
    },
    default=False,
)
# Activations stay in 16 bits here; the key says only whether there are scales for them.
ACTIVATION_SCHEME: Key[str] = Key(
    "activation_scheme", {"dynamic": "dynamic", "static": "static"}, default="dynamic"
)
# Weights of the experts of a mixture (transformers).
EXPERT_DTYPE: Key[bool] = Key("expert_dtype", {"fp8": True}, default=True)


@dataclass(frozen=True)
class Fp8Config(Fp8CheckpointConfig):
    """`quant_method: fp8`."""

    names = ("fp8",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], file: str | Path = CONFIG_FILE) -> Fp8Config:
        WEIGHT_FORMAT.read(config, "an FP8 checkpoint")
        ACTIVATION_SCHEME.read(config, "an FP8 checkpoint")
        EXPERT_DTYPE.read(config, "an FP8 checkpoint")
        block = read_block_size(config.get("weight_block_size"))
        # ModelOpt announces blocks by the algorithm's name here too.
        if config.get("quant_algo") is not None:
            algorithm = QUANT_ALGO.read(config, "an FP8 checkpoint")
            if algorithm is Block.DEFAULT and block is None:
                block = DEFAULT_BLOCK
        return cls(
            ignored=ModulePatterns.parse(read_names(config, *SKIP_LISTS), wildcards=True),
            weight_block_size=block,
            byte_scales=SCALE_FORMAT.read(config, "an FP8 checkpoint"),
        )
