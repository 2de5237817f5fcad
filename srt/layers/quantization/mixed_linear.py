"""Merged layers whose shards are held in different ways: some FP8 and some not, or with scales of
different kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.layers.quantization.linear_method import LinearMethodBase
from srt.layers.quantization.unquant import flatten_rows, restore_rows


class LinearPart(nn.Module):
    """Neighbouring shards of a merged layer that are held alike. The checkpoint has them beside the
    merged layer, as those of a layer that is held one way.

    Args:
        method: How they are held.
        input_size: K.
        shard_sizes: Output rows of each shard by its id, in order.
    """

    def __init__(
        self, method: LinearMethodBase, input_size: int, shard_sizes: Mapping[str, int]
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = sum(shard_sizes.values())
        self.quant_method = method
        method.create_weights(self, input_size, self.output_size, shard_sizes)

    def process_weights_after_loading(self) -> None:
        """Packs the weight; called once all its tensors are loaded."""
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """`[M, K]` to `[M, N]`, of the dtype of `x` or float32."""
        return self.quant_method.apply(self, x, bias, out_dtype)


class MixedLinearMethod(LinearMethodBase):
    """A product for each run of shards that are held alike; their results are put side by side.

    Each product gives the bits that it gives in a layer of its own.

    Args:
        runs: Method and shard ids of each run, in the order of the merged layer.
    """

    def __init__(self, runs: Sequence[tuple[LinearMethodBase, Sequence[str]]]) -> None:
        self.runs = runs

    def create_weights(
        self,
        layer: nn.Module,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
    ) -> None:
        parts = [
            LinearPart(method, input_size, {shard: shard_sizes[shard] for shard in shards})
            for method, shards in self.runs
        ]
        layer.add_module("parts", nn.ModuleList(parts))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """The parts are processed as they are loaded, one by one."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        rows = flatten_rows(x)
        results: list[Tensor] = []
        start = 0
        parts = layer.get_submodule("parts")
        assert isinstance(parts, nn.ModuleList)
        for part in parts:
            assert isinstance(part, LinearPart)
            end = start + part.output_size
            results.append(part(rows, None if bias is None else bias[start:end], out_dtype))
            start = end
        out = results[0]
        for i in range(1, len(results), 2):  # the operator takes up to three
            out = sgl_kernel.concat_columns_cpu(out, *results[i : i + 2])
        return restore_rows(out, x)
