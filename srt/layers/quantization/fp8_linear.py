"""Multiplies by FP8 weights (W8A16), whatever format they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.checkpoint.dtypes import FP8_DTYPE
from srt.layers.parameter import Fp8WeightParameter, WeightScaleParameter
from srt.layers.quantization.linear_method import LinearMethodBase
from srt.layers.quantization.unquant import flatten_rows, restore_rows
from srt.layers.weight_utils import pack_weight_


class Fp8LinearMethod(LinearMethodBase):
    """FP8 weight `[N, K]`, 16-bit activations, scales per tensor, per channel or per block.

    Every shard of a merged layer keeps its own scales, exactly. Per-tensor scales that differ
    become one scale a channel. Grids are stacked; where a shard does not begin at a whole block,
    rows of the common grid stand for fewer rows of the weight: as many as divide the block and the
    places where shards begin.

    Args:
        block: (block_n, block_k) of the grids in the checkpoint, or None if it has none for this
            layer.
    """

    def __init__(self, block: tuple[int, int] | None = None) -> None:
        self.block = block
        self.row_block = 1

    def create_weights(
        self,
        layer: nn.Module,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
    ) -> None:
        weight = torch.empty(output_size, input_size, dtype=torch.float8_e4m3fn)
        layer.register_parameter("weight", Fp8WeightParameter(weight, shard_sizes, (FP8_DTYPE,)))
        self.row_block = self.common_row_block(shard_sizes)
        scale = WeightScaleParameter(
            (output_size, input_size), shard_sizes, self.block, self.row_block
        )
        layer.register_parameter("weight_scale", scale)

    def common_row_block(self, shard_sizes: Mapping[str, int]) -> int:
        """Rows of the weight that a row of the common grid stands for: the most that rows of a
        block and the places where shards begin are multiples of.
        """
        if self.block is None:
            return 1
        starts = list(accumulate(shard_sizes.values()))[:-1]
        return math.gcd(self.block[0], *starts)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight").data
        scale = layer.get_parameter("weight_scale").data
        layer.weight = nn.Parameter(pack_weight_(weight), requires_grad=False)
        if (scale == scale[0, 0]).all():
            scale = scale[0, :1].clone()
        elif scale.shape[1] == 1:  # the same for all of K
            scale = scale.repeat_interleave(self.row_block, 0)[: weight.shape[0], 0].clone()
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def element_scales(self, layer: nn.Module) -> Tensor:
        """Scales of a processed layer spread over the weight's rows, `[N, 1]` where they are the
        same for all of K, else `[N, K]`.
        """
        n, k = layer.get_parameter("weight").shape
        scale = layer.get_parameter("weight_scale").data
        if scale.dim() == 1:
            return scale.view(-1, 1).expand(n, 1)
        assert self.block is not None
        rows = scale.repeat_interleave(self.row_block, dim=0)[:n]
        return rows.repeat_interleave(self.block[1], dim=1)[:, :k]

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        rows = flatten_rows(x)
        weight, scale = cast(Tensor, layer.weight), cast(Tensor, layer.weight_scale)
        dtype = out_dtype or x.dtype
        if scale.dim() == 2:
            assert self.block is not None
            block = [self.row_block, self.block[1]]
            out = sgl_kernel.fp8_scaled_mm_cpu(rows, weight, scale, block, bias, dtype, True)
        else:
            scaled_mm = (
                sgl_kernel.fp8_per_tensor_scaled_mm_cpu
                if scale.numel() == 1
                else sgl_kernel.fp8_per_channel_scaled_mm_cpu
            )
            out = scaled_mm(rows, weight, scale, bias, dtype, True)
        return restore_rows(out, x)
