"""Linear layers by their role in tensor parallelism, and merged ones.

Column-parallel layers hold some of the outputs of all ranks together, row-parallel ones some of the
inputs; sizes given are those of all ranks. A layer asks :class:`TensorParallel` for its part and
knows nothing else of ranks, as formats know nothing of them: a quantization method sees the layer
that this rank holds.

A merged layer computes in one multiplication what a checkpoint holds as several modules. Its shards
carry the names of those modules, from which the loader finds their tensors; each shard is shared
out on its own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.layers.parameter import ModelParameter
from srt.layers.quantization.select_method import get_linear_method
from srt.utils.tensor_parallel import TensorParallel


class LinearBase(nn.Module):
    """`y = x W^T + b` with `W` of shape `[N, K]`, held and multiplied by a quantization method.

    Args:
        input_size: K, of this rank.
        output_size: N, of this rank.
        shard_sizes: Output rows by the name of the module that a checkpoint holds them in; empty
            for a plain layer.
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


class ReplicatedLinear(LinearBase):
    """A layer that every rank holds whole."""

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


class ColumnParallelLinear(LinearBase):
    """A layer of which a rank holds rows of the weight, and so outputs."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: TensorParallel,
        bias: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        rows = tp.part(output_size, "outputs", prefix)
        super().__init__(input_size, rows, {}, bias=bias, quant_config=quant_config, prefix=prefix)


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel layers over the same input, such as gate and up, with outputs side by
    side in the order of `shard_sizes`.
    """

    def __init__(
        self,
        input_size: int,
        shard_sizes: Mapping[str, int],
        *,
        tp: TensorParallel,
        bias: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        rows = {
            shard: tp.part(size, f"outputs of {shard}", prefix)
            for shard, size in shard_sizes.items()
        }
        super().__init__(
            input_size,
            sum(rows.values()),
            rows,
            bias=bias,
            quant_config=quant_config,
            prefix=prefix,
        )


class QKVParallelLinear(LinearBase):
    """Query, key and value projections, of which a rank holds query heads with the heads of keys
    and values that they read: `num_heads`, `num_kv_heads` and `num_kv_heads` times `head_dim`
    outputs.

    Attributes:
        num_heads: Query heads of this rank.
        num_kv_heads: Heads of keys and values of this rank.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        tp: TensorParallel,
        bias: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        heads = tp.part(num_heads, "query heads", prefix)
        kv_heads = tp.kv_heads(num_kv_heads, prefix)
        rows = {
            "q_proj": heads * head_dim,
            "k_proj": kv_heads * head_dim,
            "v_proj": kv_heads * head_dim,
        }
        super().__init__(
            hidden_size,
            sum(rows.values()),
            rows,
            bias=bias,
            quant_config=quant_config,
            prefix=prefix,
        )
        self.num_heads = heads
        self.num_kv_heads = kv_heads


class RowParallelLinear(LinearBase):
    """A layer of which a rank holds columns of the weight: its input is the output of a
    column-parallel layer, and outputs are the sum of all ranks' products.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp: TensorParallel,
        bias: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        columns = tp.part(input_size, "inputs", prefix)
        super().__init__(
            columns, output_size, {}, bias=bias, quant_config=quant_config, prefix=prefix
        )
