"""Linear layers whose weight stays in bfloat16."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.layers.parameter import ModelParameter
from srt.layers.quantization.linear_method import LinearMethodBase
from srt.layers.weight_utils import pack_weight_


def flatten_rows(x: Tensor) -> Tensor:
    """`[..., K]` as the 2-D `[M, K]` that the kernels take."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def restore_rows(out: Tensor, x: Tensor) -> Tensor:
    """`[M, N]` with the leading sizes of `x`: the inverse of :func:`flatten_rows`."""
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


class UnquantizedLinearMethod(LinearMethodBase):
    """`weight_packed_linear` over a packed bfloat16 weight `[N, K]`."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
    ) -> None:
        weight = torch.empty(output_size, input_size, dtype=torch.bfloat16)
        layer.register_parameter("weight", ModelParameter(weight, shard_sizes))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed = pack_weight_(layer.get_parameter("weight").data)
        layer.weight = nn.Parameter(packed, requires_grad=False)

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        out = sgl_kernel.weight_packed_linear(
            flatten_rows(x), cast(Tensor, layer.weight), bias, True, out_dtype
        )
        return restore_rows(out, x)
