"""Gated activations."""

import torch.nn.functional as F
from torch import Tensor, nn


class SiluAndMul(nn.Module):
    """SwiGLU (Shazeer, 2020): `silu(gate) * up`, where the last dimension of the input is gate and
    up side by side.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`[..., 2 * d]` to `[..., d]`."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
