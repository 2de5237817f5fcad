"""Rotary position embedding (Su et al., 2021) with the frequency scalings in use.

Frequencies come from transformers: linear and dynamic (NTK-aware) scaling, YaRN (Peng et al.,
2023), and that of Llama 3.1. Dynamic scaling stretches frequencies only beyond
`max_position_embeddings`, which no request here exceeds, so it is the plain embedding.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.errors import UnsupportedConfigError
from srt.utils.inference_mode import in_inference_mode

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


# Rows of the table that are computed at first.
_FIRST_ROWS = 1024


class RotaryEmbedding(nn.Module):
    """Rotates pairs of features by the angle `position * inv_freq[i]`: `(x[i], x[i + d/2])` of the
    first d features of a head, or neighbours `(x[2 i], x[2 i + 1])` where it is interleaved.

    Args:
        inv_freq: `[d / 2]` float32, radians per position.
        max_position: Positions that there can be.
        attention_factor: Multiplies the rotated features (YaRN).
        interleaved: Whether pairs are neighbours.
        query_scaling: (beta, length): queries are multiplied by
            `1 + beta * log(1 + floor(position / length))` (Llama 4, Ministral 3); None for none.

    Attributes:
        cos_sin_cache: `[max_position, d]` float32, the factors of each position, cosines before
            sines. Rows are valid, and take memory, up to what :meth:`prepare` has been told.
        query_scale: `[max_position]` float32, by what the queries at a position are multiplied, or
            None; valid like the rows.
    """

    cos_sin_cache: Tensor
    query_scale: Tensor | None

    def __init__(
        self,
        inv_freq: Tensor,
        max_position: int,
        *,
        attention_factor: float = 1.0,
        interleaved: bool = False,
        query_scaling: tuple[float, int] | None = None,
    ) -> None:
        super().__init__()
        table = torch.empty(max_position, 2 * inv_freq.numel(), device="cpu")
        self.register_buffer("cos_sin_cache", table, persistent=False)
        scale = None if query_scaling is None else torch.empty(max_position, device="cpu")
        self.register_buffer("query_scale", scale, persistent=False)
        self._inv_freq = inv_freq
        self._valid = 0
        self.attention_factor = attention_factor
        self.interleaved = interleaved
        self.query_scaling = query_scaling

    @in_inference_mode
    def prepare(self, length: int) -> None:
        """Makes the positions 0 to `length - 1` valid, if they are not yet."""
        if length <= self._valid:
            return
        rows = range(
            self._valid, min(max(length, 2 * self._valid, _FIRST_ROWS), self.cos_sin_cache.shape[0])
        )
        positions = torch.arange(rows.start, rows.stop, dtype=torch.float32)
        angles = positions[:, None] * self._inv_freq
        factors = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.cos_sin_cache[rows.start : rows.stop] = factors * self.attention_factor
        if self.query_scaling is not None and self.query_scale is not None:
            beta, length = self.query_scaling
            scale = 1 + beta * torch.log1p(positions // length)
            self.query_scale[rows.start : rows.stop] = scale
        self._valid = rows.stop

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated copies of `query` and `key`, `[T, heads, head_dim]` each, for positions `[T]`.
        Features beyond the rotary ones stay as they are.
        """
        return sgl_kernel.rotary_embedding_cpu(
            positions, query, key, query.shape[-1], self.cos_sin_cache, not self.interleaved
        )


def get_rope(
    hf_config: Any, head_dim: int, max_position: int | None = None, *, interleaved: bool = False
) -> RotaryEmbedding:
    """The embedding that a configuration asks for.

    Args:
        hf_config: A transformers configuration. Its `rope_parameters` hold `rope_type`,
            `rope_theta` and what that type needs.
        head_dim: Size of a head's rotary part, even after `partial_rotary_factor`.
        max_position: Positions that there can be; None for `max_position_embeddings`.
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
    if not (inv_freq.isfinite().all() and math.isfinite(factor)):
        raise UnsupportedConfigError(
            f"rope_parameters {dict(parameters)!r} give frequencies that are no finite numbers"
        )
    return RotaryEmbedding(
        inv_freq,
        max_position or hf_config.max_position_embeddings,
        attention_factor=factor,
        interleaved=interleaved,
        query_scaling=scaling,
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
