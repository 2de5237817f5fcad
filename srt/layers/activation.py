"""Gated activations."""

from torch import Tensor, nn

import sgl_kernel


class SiluAndMul(nn.Module):
    """SwiGLU (Shazeer, 2020): `silu(gate) * up`, where the last dimension of the input is gate and
    up side by side.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[T, 2 * d]` to `[T, d]`, in float32 with one rounding."""
        return sgl_kernel.silu_and_mul_cpu(x)
