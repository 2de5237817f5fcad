"""What the weight of a linear layer, or of a shard of a merged one, is: data, from which
`srt.layers.quantization` makes the method that holds and multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass

from srt.checkpoint.formats.schemes import Scheme
from srt.checkpoint.weight_scales import Layout


@dataclass(frozen=True)
class PlainWeight:
    """Not quantized."""


@dataclass(frozen=True)
class Fp8Weight:
    """FP8 with scales that multiply it.

    Attributes:
        layout: Which elements share a scale; not PLAIN.
        block: (block_n, block_k) of a grid of scales, None for the other layouts.
    """

    layout: Layout
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class OnlineFp8Weight:
    """Of another dtype in the checkpoint, and FP8 once it is loaded.

    Attributes:
        scheme: Which elements are going to share a scale.
        dtype: Dtype code that holds all of the layer's shards exactly.
    """

    scheme: Scheme
    dtype: str


WeightFormat = PlainWeight | Fp8Weight | OnlineFp8Weight
