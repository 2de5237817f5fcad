"""Schemes by which weights become FP8 here: which elements share a scale.

`srt quantize` writes them, and OnlineFp8Config applies them while a checkpoint is loaded. The
arithmetic is in `srt.layers.quantization.fp8_quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from srt.checkpoint.weight_scales import Layout
from srt.utils.arithmetic import ceil_div


@dataclass(frozen=True)
class Scheme:
    """Which elements of a weight `[N, K]` share a scale.

    Attributes:
        name: As the command line spells it.
        layout: Which elements these are; not PLAIN.
        scale_name: Name that checkpoints of this scheme give the scale, beside `weight`.
        block_size: (block_n, block_k) of a grid of scales, None for the other schemes.
    """

    name: str
    layout: Layout
    scale_name: str = "weight_scale"
    block_size: tuple[int, int] | None = None

    def scale_shape(self, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale of a weight of shape `[N, K]`: `()` for the whole weight, `[N, 1]` for
        each output channel, or that of a grid, of which blocks at the edges are smaller.
        """
        if self.block_size is not None:
            block_n, block_k = self.block_size
            return (ceil_div(weight_shape[0], block_n), ceil_div(weight_shape[1], block_k))
        return () if self.layout is Layout.TENSOR else (weight_shape[0], 1)


# Blocks are those of DeepSeek-V3 (https://arxiv.org/abs/2412.19437).
SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("per-tensor", Layout.TENSOR),
        Scheme("per-channel", Layout.CHANNEL),
        Scheme("block", Layout.BLOCK, "weight_scale_inv", (128, 128)),
    )
}

# What `--quantization` takes, to quantize a checkpoint while it is loaded.
QUANTIZATION_CHOICES: Mapping[str, Scheme] = {
    "fp8": SCHEMES["per-tensor"],
    "fp8-per-channel": SCHEMES["per-channel"],
    "fp8-block": SCHEMES["block"],
}
