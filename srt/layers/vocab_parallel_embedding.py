"""The token table: embedding lookup and output projection."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sgl_kernel
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.layers.linear import ColumnParallelLinear
from srt.layers.parameter import ModelParameter
from srt.layers.weight_utils import pack_weight_
from srt.utils.tensor_parallel import TensorParallel


class VocabParallelEmbedding(nn.Module):
    """Rows of a table `[vocab_size, hidden_size]`, bfloat16, of which a rank holds some. Where a
    model ties its output projection, the same table is that, too.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Size of an embedding.
        dtype: Dtype of the looked-up rows.
        tp: The ranks that hold the table.
        packed: Hold the table in the kernels' packed layout, so that a tied output projection
            multiplies by the same memory.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        tp: TensorParallel,
        packed: bool = False,
    ) -> None:
        super().__init__()
        rows = tp.part(vocab_size, "tokens", "embed_tokens")
        table = torch.empty(rows, hidden_size, dtype=torch.bfloat16)
        self.weight: nn.Parameter = ModelParameter(table)
        self.dtype = dtype
        self.packed = packed

    def process_weights_after_loading(self) -> None:
        """Packs the table if it is shared with the output projection."""
        if self.packed:
            packed = pack_weight_(self.weight.data)
            self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[T]` int64 to `[T, hidden_size]`."""
        return sgl_kernel.packed_embedding_cpu(input_ids, self.weight, self.packed, self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """`[B, hidden_size]` to logits `[B, vocab_size]`, float32, by the table as a tied output
        projection; it is packed unless activations are float32.
        """
        if x.dtype == torch.float32:
            return F.linear(x, self.weight.to(torch.float32))
        return sgl_kernel.weight_packed_linear(x, self.weight, None, True, torch.float32)


class ParallelLMHead(ColumnParallelLinear):
    """Output projection with a weight of its own, of whose tokens a rank holds some."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tp: TensorParallel,
        quant_config: QuantizationConfig | None,
    ) -> None:
        super().__init__(
            hidden_size, vocab_size, tp=tp, quant_config=quant_config, prefix="lm_head"
        )

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = torch.float32) -> Tensor:
        """`[B, hidden_size]` to logits `[B, vocab_size]`, float32 unless told otherwise."""
        return super().forward(x, out_dtype)
