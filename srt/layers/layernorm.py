"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor, nn

import sgl_kernel
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

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of `x`, or of `residual`, to which `x` is added in place first.

        Args:
            x: `[T, hidden_size]`, or `[T, heads, hidden_size]` without a residual.
            residual: `[T, hidden_size]`.

        Returns:
            The shape of `x`.
        """
        if residual is None:
            return sgl_kernel.rmsnorm_cpu(x, self.weight, self.eps, self.dtype)
        return sgl_kernel.add_rmsnorm_cpu(x, residual, self.weight, self.eps, self.dtype)
