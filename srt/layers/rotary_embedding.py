"""Rotary position embedding (Su et al., 2021), with the frequency scaling of Llama 3.1."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from srt.errors import UnsupportedConfigError


class RotaryEmbedding(nn.Module):
    """Rotates pairs `(x[i], x[i + head_dim / 2])` by the angle `position * inv_freq[i]`.

    Args:
        inv_freq: `[head_dim / 2]` float32, radians per position.
    """

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.cat([inv_freq, inv_freq]), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles for positions `[T]`, float32 `[T, 1, head_dim]`; the sine
        carries the rotation's signs.
        """
        angles = positions.to(torch.float32).view(-1, 1, 1) * self.inv_freq
        sin = angles.sin()
        sin[..., : sin.shape[-1] // 2].neg_()
        return angles.cos(), sin


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` of shape `[T, heads, head_dim]` by what :class:`RotaryEmbedding` returned;
    computed in float32, returned in the dtype of `x`.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def get_rope(head_dim: int, parameters: Mapping[str, Any]) -> RotaryEmbedding:
    """The embedding that a configuration asks for.

    Args:
        head_dim: Size of a head, even.
        parameters: `rope_parameters` of a transformers configuration: `rope_type`, `rope_theta` and
            what that type needs.

    Raises:
        UnsupportedConfigError: An unknown type, a missing key, or rotation of a part of the head
            only.
    """
    kind = parameters.get("rope_type") or "default"
    scaling = _ROPE_TYPES.get(kind)
    if scaling is None:
        raise UnsupportedConfigError(
            f"rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
        )
    if (parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedConfigError(
            f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported; "
            "expected 1"
        )
    if head_dim % 2:
        raise UnsupportedConfigError(f"rotary embedding needs an even head_dim, found {head_dim}")
    try:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return RotaryEmbedding(scaling(1.0 / parameters["rope_theta"] ** exponents, parameters))
    except KeyError as error:
        raise UnsupportedConfigError(
            f"rope_parameters lack the key {error} that rope_type {kind!r} needs"
        ) from error


def _default(inv_freq: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    return inv_freq


def _llama3(inv_freq: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, with a linear blend between the
    two bounds.
    """
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original_context = parameters["original_max_position_embeddings"]
    turns = original_context * inv_freq / (2 * math.pi)  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / factor * (1 - keep)


_ROPE_TYPES: Mapping[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "default": _default,
    "llama3": _llama3,
}
