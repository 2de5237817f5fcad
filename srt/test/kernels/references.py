"""What the ops between the products compute, in float64, with bounds on float32's error.

Each returns the values and a bound that a result may differ from them by before it is rounded to
its dtype; docs/numerics.md has the reasons.
"""

import math

import torch
from torch import Tensor

from sgl_kernel.testing import UNIT_ROUNDOFF

U = UNIT_ROUNDOFF[torch.float32]


def rows_as_given(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype, with its strides."""
    strides = x.stride()
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    copy = torch.full((extent,), math.nan).to(dtype).as_strided(x.shape, strides)
    return copy.copy_(x)


def cos_sin(rows: int, rotary_dim: int) -> Tensor:
    """A table `[rows, rotary_dim]` of cosines, then sines, of random angles."""
    angles = torch.rand(rows, rotary_dim // 2) * 6
    return torch.cat([angles.cos(), angles.sin()], 1)


def reference_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm over the last dimension.

    The squares are summed in accumulators of at most n / 16 + 8 additions, the root halves that
    relative error, and the mean, eps, root, reciprocal and two products round once each.
    """
    x = x.double()
    n = x.shape[-1]
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return out, ((n / 16 + 8) / 2 + 6) * U * out.abs()


def reference_rope(
    x: Tensor, positions: Tensor, cache: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Rotation of `[T, heads, head_dim]`: two products and a sum."""
    x = x.double()
    half = cache.shape[1] // 2
    angles = cache.double()[positions.long()].unsqueeze(1)
    cos, sin = angles[..., :half], angles[..., half:]
    out, magnitude = x.clone(), torch.zeros_like(x)
    first = slice(0, half) if is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if is_neox else slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    magnitude[..., first] = (a * cos).abs() + (b * sin).abs()
    magnitude[..., second] = (b * cos).abs() + (a * sin).abs()
    return out, 2 * U * magnitude


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    logit_cap: float = 0.0,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a sequence's last tokens.

    A score sums head_dim products; an error e of the scores changes weights by a factor of at most
    e^2e. Weighted values are summed over up to 64 keys a block, and merging a block takes
    two exponentials of relative error 3 u and a few roundings.

    Args:
        q: `[tokens, heads, head_dim]` queries of the last tokens.
        k, v: `[length, kv_heads, head_dim or v_head_dim]` of the whole sequence, with their scales.
        scale, logit_cap, sliding_window, sinks: As the ops take them.
    """
    tokens, heads, head_dim = q.shape
    length = k.shape[0]
    group = heads // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    magnitude = torch.einsum("qhd,khd->hqk", q.double().abs(), k.abs()) * abs(scale)
    error = (head_dim + 4) * U * magnitude.amax(-1, keepdim=True)
    if logit_cap:
        scores = logit_cap * (scores / logit_cap).tanh()
        error = error + 16 * U * logit_cap
    position = torch.arange(length - tokens, length).unsqueeze(1)
    key = torch.arange(length).unsqueeze(0)
    hidden = key > position
    if sliding_window:
        hidden |= key <= position - sliding_window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        columns = sinks.double().view(heads, 1, 1).expand(heads, tokens, 1)
        weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    blocks = length / 64 + 2
    relative = (2 * error).expm1() + (64 + 16 * blocks) * U
    bound = relative * torch.einsum("hqk,khd->hqd", weights, v.abs())
    return torch.einsum("hqk,khd->qhd", weights, v), bound.transpose(0, 1)
