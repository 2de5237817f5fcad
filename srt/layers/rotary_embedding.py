"""Rotary position embedding (Su et al., 2021) with the frequency scalings in use.

Frequencies come from transformers: linear and dynamic (NTK-aware) scaling, YaRN (Peng et al.,
2023), and that of Llama 3.1. Dynamic scaling stretches frequencies only beyond
`max_position_embeddings`, which no request here exceeds, so it is the plain embedding.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from srt.errors import UnsupportedConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class Rotation(NamedTuple):
    """What a pass's positions mean for its queries and keys.

    Attributes:
        cos: `[T, 1, rotary_dim]` float32.
        sin: The same; it carries the rotation's signs.
        query_scale: `[T, 1, 1]` float32, by which queries are multiplied, or None.
    """

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None


class RotaryEmbedding(nn.Module):
    """Rotates pairs of features by the angle `position * inv_freq[i]`: `(x[i], x[i + d/2])` of the
    first d features of a head, or neighbours `(x[2 i], x[2 i + 1])` where it is interleaved.

    Args:
        inv_freq: `[d / 2]` float32, radians per position.
        attention_factor: Multiplies the rotated features (YaRN).
        interleaved: Whether pairs are neighbours.
        query_scaling: (beta, length): queries are multiplied by
            `1 + beta * log(1 + floor(position / length))` (Llama 4, Ministral 3); None for none.
    """

    inv_freq: Tensor
    factors: Tensor

    def __init__(
        self,
        inv_freq: Tensor,
        *,
        attention_factor: float = 1.0,
        interleaved: bool = False,
        query_scaling: tuple[float, int] | None = None,
    ) -> None:
        super().__init__()
        factors = torch.full_like(inv_freq, attention_factor)
        if interleaved:
            both = inv_freq.repeat_interleave(2)
            signed = torch.stack([-factors, factors], dim=-1).flatten()
        else:
            both = torch.cat([inv_freq, inv_freq])
            signed = torch.cat([-factors, factors])
        self.register_buffer("inv_freq", both, persistent=False)
        self.register_buffer("factors", signed, persistent=False)
        self.attention_factor = attention_factor
        self.interleaved = interleaved
        self.query_scaling = query_scaling

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of positions `[T]`."""
        angles = positions.to(torch.float32).view(-1, 1, 1) * self.inv_freq
        cos, sin = angles.cos(), angles.sin() * self.factors
        if self.attention_factor != 1.0:
            cos = cos * self.attention_factor
        scale = None
        if self.query_scaling is not None:
            beta, length = self.query_scaling
            scale = 1 + beta * torch.log1p((positions // length).to(torch.float32)).view(-1, 1, 1)
        return Rotation(cos, sin, scale)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotates `x` of shape `[T, heads, head_dim]`; returned in float32. Features beyond the
        rotary ones stay as they are.
        """
        d = rotation.cos.shape[-1]
        part = x[..., :d]
        if self.interleaved:
            swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = part.roll(d // 2, dims=-1)
        rotated = torch.addcmul(part * rotation.cos, swapped, rotation.sin)
        return rotated if d == x.shape[-1] else torch.cat([rotated, x[..., d:]], dim=-1)


def get_rope(hf_config: Any, head_dim: int, *, interleaved: bool = False) -> RotaryEmbedding:
    """The embedding that a configuration asks for.

    Args:
        hf_config: A transformers configuration. Its `rope_parameters` hold `rope_type`,
            `rope_theta` and what that type needs.
        head_dim: Size of a head's rotary part, even after `partial_rotary_factor`.
        interleaved: Whether pairs are neighbours.

    Raises:
        UnsupportedConfigError: An unknown type, a missing key, or an odd size.
    """
    parameters: Mapping[str, Any] = hf_config.rope_parameters or {}
    kind = parameters.get("rope_type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedConfigError(
            f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    share = parameters.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise UnsupportedConfigError(
            f"rotary embedding needs an even number of features, found {rotary_dim} "
            f"(head_dim {head_dim}, partial_rotary_factor {share})"
        )
    try:
        # Models are built on the meta device; frequencies are values, not weights.
        with torch.device("cpu"):
            inv_freq, factor = _frequencies(kind, parameters, rotary_dim, hf_config)
        beta = parameters.get("llama_4_scaling_beta")
        scaling = (
            None if not beta else (float(beta), int(parameters["original_max_position_embeddings"]))
        )
    except KeyError as error:
        raise UnsupportedConfigError(
            f"rope_parameters lack the key {error} that rope_type {kind!r} needs"
        ) from error
    return RotaryEmbedding(
        inv_freq, attention_factor=factor, interleaved=interleaved, query_scaling=scaling
    )


def _frequencies(
    kind: str, parameters: Mapping[str, Any], rotary_dim: int, hf_config: Any
) -> tuple[Tensor, float]:
    """(inverse frequencies `[rotary_dim / 2]`, attention factor)."""
    if kind in ("default", "dynamic"):
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    return inv_freq, float(factor)
