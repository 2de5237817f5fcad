"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.parameter import ModelParameter


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32 with one rounding to
    the output's dtype.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        dtype: Dtype of the output.
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: nn.Parameter = ModelParameter(torch.empty(hidden_size, dtype=torch.float32))
        self.eps = eps
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden_size]` of any floating-point dtype to the same shape."""
        out = F.rms_norm(x.to(torch.float32), self.weight.shape, self.weight, self.eps)
        return out.to(self.dtype)
