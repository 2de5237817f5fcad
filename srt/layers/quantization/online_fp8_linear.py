"""Linear layers that are loaded in 16 or 32 bits and held in FP8."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.schemes import Scheme
from srt.checkpoint.tensor_meta import TensorMeta
from srt.errors import CheckpointError
from srt.layers.dtypes import TORCH_DTYPES
from srt.layers.parameter import ModelParameter, ShardId, WeightScaleParameter
from srt.layers.quantization.fp8_linear import Fp8LinearMethod
from srt.layers.quantization.fp8_quantization import encode_weight


class FiniteParameter(ModelParameter):
    """A weight without NaN and infinity, which have no place in FP8 with scales."""

    def load(self, source: Tensor, meta: TensorMeta, shard_id: ShardId) -> None:
        # The sum of finite values may overflow; then each row tells.
        if not source.sum(dtype=torch.float64).isfinite():
            for i, row in enumerate(source):
                if not row.isfinite().all():
                    raise CheckpointError(
                        "cannot quantize a weight that is not finite",
                        file=meta.file,
                        tensor=meta.name,
                        expected="finite values",
                        found=f"NaN or infinity in row {i}",
                    )
        super().load(source, meta, shard_id)


class OnlineFp8LinearMethod(Fp8LinearMethod):
    """An FP8 weight `[N, K]` that is made from the checkpoint's weight of another dtype.

    Shards of a merged layer are quantized one by one, as if they were layers of their own.

    Args:
        scheme: Which elements share a scale.
        dtype: Code of the dtype to load the weight in.
    """

    def __init__(self, scheme: Scheme, dtype: str) -> None:
        super().__init__(scheme.block_size)
        self.scheme = scheme
        self.dtype = TORCH_DTYPES[dtype]
        self.shard_sizes: dict[str, int] = {}

    def create_weights(
        self,
        layer: nn.Module,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
    ) -> None:
        self.shard_sizes = dict(shard_sizes)
        self.row_block = self.common_row_block(shard_sizes)
        weight = torch.empty(output_size, input_size, dtype=self.dtype)
        layer.register_parameter("weight", FiniteParameter(weight, shard_sizes))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight").data
        scales = WeightScaleParameter(
            (weight.shape[0], weight.shape[1]), self.shard_sizes, self.block, self.row_block
        )
        parts = []
        shard_ids: list[ShardId] = [*self.shard_sizes] or [None]
        for shard_id in shard_ids:
            rows = slice(None) if shard_id is None else scales.shards[shard_id]
            part, scale = encode_weight(weight[rows], self.scheme)
            scales.place(scale, shard_id)
            parts.append(part)
        quantized = parts[0] if len(parts) == 1 else torch.cat(parts)
        layer.weight = nn.Parameter(quantized, requires_grad=False)
        layer.weight_scale = nn.Parameter(scales.data, requires_grad=False)
        super().process_weights_after_loading(layer)
