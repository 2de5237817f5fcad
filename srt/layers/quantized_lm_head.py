"""The output projection in FP8 (`--quantize-lm-head`).

Checkpoints leave `lm_head` in 16 bits. Every token reads it whole, so where the vocabulary is large
next to the model, it is much of what decoding reads.
"""

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.checkpoint.formats.schemes import SCHEMES
from srt.layers.quantization.fp8_quantization import encode_weight
from srt.layers.quantization.unquant import UnquantizedLinearMethod
from srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

# Rows that are quantized at a time.
_ROWS = 4096


class QuantizedLMHead(nn.Module):
    """Output projection in FP8 with a scale for each token of the vocabulary.

    Args:
        packed: Weight `[vocab_size, hidden_size]` bfloat16, packed.
    """

    def __init__(self, packed: Tensor) -> None:
        super().__init__()
        vocab_size, hidden_size = packed.shape
        weight = torch.empty(vocab_size, hidden_size, dtype=torch.float8_e4m3fn)
        scale = torch.empty(vocab_size, dtype=torch.float32)
        for first in range(0, vocab_size, _ROWS):
            rows = torch.arange(first, min(first + _ROWS, vocab_size))
            codes, scales = encode_weight(
                sgl_kernel.unpack_rows(packed, rows), SCHEMES["per-channel"]
            )
            weight[first : first + len(rows)] = codes
            scale[first : first + len(rows)] = scales.flatten()
        self.weight = nn.Parameter(sgl_kernel.convert_weight_packed(weight), requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, hidden_size]` to logits `[B, vocab_size]`, float32."""
        return sgl_kernel.fp8_per_channel_scaled_mm_cpu(
            x, self.weight, self.weight_scale, None, torch.float32, True
        )


def quantize_lm_head(lm_head: nn.Module) -> QuantizedLMHead | None:
    """The FP8 form of a loaded output projection, or of the table that is one, too; None if it is
    not held in packed bfloat16.
    """
    if isinstance(lm_head, VocabParallelEmbedding):
        return QuantizedLMHead(lm_head.weight.data) if lm_head.packed else None
    if isinstance(lm_head, ParallelLMHead) and isinstance(
        lm_head.quant_method, UnquantizedLinearMethod
    ):
        return QuantizedLMHead(lm_head.get_parameter("weight").data)
    return None
