"""Linear layers, plain and merged.

A merged layer computes in one multiplication what a checkpoint holds as several modules. Its shards
carry the names of those modules, from which the loader finds their tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.layers.parameter import ModelParameter
from srt.layers.quantization.select_method import get_linear_method


class LinearBase(nn.Module):
    """`y = x W^T + b` with `W` of shape `[N, K]`, held and multiplied by a quantization method.

    Args:
        input_size: K.
        shard_sizes: Output rows by the name of the module that a checkpoint holds them in; empty
            for a plain layer.
        output_size: N.
        bias: Whether there is a bias `[N]`; it is kept in float32, which the kernels add it in.
        quant_config: The checkpoint's format, or None.
        prefix: Full module name, which skip lists refer to.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.quant_method = get_linear_method(quant_config, prefix, list(shard_sizes))
        self.quant_method.create_weights(self, input_size, output_size, shard_sizes)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = ModelParameter(torch.empty(output_size, dtype=torch.float32), shard_sizes)

    def process_weights_after_loading(self) -> None:
        """Packs the weight; called once all its tensors are loaded."""
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """`[..., K]` to `[..., N]`, of the dtype of `x` or float32."""
        return self.quant_method.apply(self, x, self.bias, out_dtype)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}, {type(self.quant_method).__name__}"


class Linear(LinearBase):
    """One linear layer of the checkpoint."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(
            input_size, output_size, {}, bias=bias, quant_config=quant_config, prefix=prefix
        )


class MergedLinear(LinearBase):
    """Several linear layers over the same input, such as gate and up, with outputs side by side in
    the order of `shard_sizes`.
    """

    def __init__(
        self,
        input_size: int,
        shard_sizes: Mapping[str, int],
        *,
        bias: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        output_size = sum(shard_sizes.values())
        super().__init__(
            input_size,
            output_size,
            shard_sizes,
            bias=bias,
            quant_config=quant_config,
            prefix=prefix,
        )


class QKVLinear(MergedLinear):
    """Query, key and value projections: output rows are `num_heads`, `num_kv_heads` and
    `num_kv_heads` times `head_dim`.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        shard_sizes = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        super().__init__(
            hidden_size, shard_sizes, bias=bias, quant_config=quant_config, prefix=prefix
        )
