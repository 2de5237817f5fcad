"""How a weight becomes FP8: the scales of a scheme, and the rounding.

The format is OCP FP8 E4M3 (`float8_e4m3fn`): 4 exponent and 3 mantissa bits, largest value 448, no
infinity (Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433).
A scale multiplies the stored weight: `w ~= weight * scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from srt.checkpoint.formats.schemes import Scheme
from srt.checkpoint.weight_scales import Layout

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
# Halfway between 448 and 480, the value that would come next: from here on rounding saturates.
_SATURATES_FROM = 464.0
# The smallest normal f32: a smaller scale would lose mantissa bits, and be 0 under flush-to-zero.
_MIN_SCALE = torch.finfo(torch.float32).tiny
# Elements worked on at once, 4 MiB in f32: bounds the memory that temporaries take.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class QuantizationError:
    """What a weight lost.

    Attributes:
        relative_rms: root of sum((w - q)^2) / sum(w^2); 0 for an all-zero weight.
        max_abs: largest |w - q|.
        saturated: elements beyond the largest value that the format rounds to 448 times the scale.
        flushed: share of the non-zero elements that became zero.
    """

    relative_rms: float
    max_abs: float
    saturated: int
    flushed: float


@dataclass(frozen=True)
class QuantizedWeight:
    """An FP8 weight `[N, K]` with its f32 scale, and what it lost against the original."""

    weight: torch.Tensor
    scale: torch.Tensor
    error: QuantizationError


def compute_absmax(scheme: Scheme, weight: torch.Tensor) -> torch.Tensor:
    """Largest |element| of a weight `[N, K]` for each scale, f32 of the scheme's `scale_shape`; NaN
    where an element is NaN.
    """
    if scheme.block_size is not None:
        return _block_absmax(weight, *scheme.block_size, scheme.scale_shape(tuple(weight.shape)))
    if scheme.layout is Layout.TENSOR:
        low, high = torch.aminmax(weight)
    else:
        low, high = torch.aminmax(weight, dim=1, keepdim=True)
    return torch.maximum(-low, high).float()


def _block_absmax(
    weight: torch.Tensor, block_n: int, block_k: int, shape: tuple[int, ...]
) -> torch.Tensor:
    result = torch.empty(shape)
    for row, rows in zip(result, weight.split(block_n), strict=True):
        low, high = torch.aminmax(rows, dim=0)
        columns = torch.maximum(-low, high).float()
        for i, block in enumerate(columns.split(block_k)):
            row[i] = block.max()
    return result


def expand_scale(
    scheme: Scheme, scale: torch.Tensor, rows: slice, weight_shape: tuple[int, ...]
) -> torch.Tensor:
    """The scale of each element of some rows of a weight `[N, K]`: broadcasts against them."""
    if scheme.block_size is not None:
        block_n, block_k = scheme.block_size
        row_scales = scale[torch.arange(rows.start, rows.stop) // block_n]
        return row_scales.repeat_interleave(block_k, dim=1)[:, : weight_shape[1]]
    return scale if scheme.layout is Layout.TENSOR else scale[rows]


def compute_scale(absmax: torch.Tensor) -> torch.Tensor:
    """Scale under which `absmax` becomes 448, f32; 1 where all elements are zero."""
    scale = (absmax / E4M3_MAX).clamp(min=_MIN_SCALE)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def encode_weight(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 weight `[N, K]`, f32 scale of `scheme`): what :func:`quantize_weight` gives, without
    measuring what was lost.
    """
    scale = _compute_scales(weight, scheme)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for rows in _row_chunks(weight):
        chunk_scale = expand_scale(scheme, scale, rows, tuple(weight.shape))
        quantized[rows] = _round_to_e4m3(weight[rows].float() / chunk_scale)
    return quantized, scale


def quantize_weight(weight: torch.Tensor, scheme: Scheme) -> QuantizedWeight:
    """Quantizes a weight to e4m3, rounding to nearest even with saturation, in f32.

    Args:
        weight: `[N, K]`, N and K >= 1, bf16, fp16 or f32.
        scheme: which elements share a scale.

    Raises:
        ValueError: the weight is not 2-D and floating, is empty, or holds NaN or infinity.
    """
    scale = _compute_scales(weight, scheme)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    error_squares = weight_squares = max_abs = 0.0
    saturated = nonzero = flushed = 0
    for rows in _row_chunks(weight):
        original = weight[rows].float()
        chunk_scale = expand_scale(scheme, scale, rows, tuple(weight.shape))
        scaled = original / chunk_scale
        saturated += int((scaled.abs() >= _SATURATES_FROM).sum())
        quantized[rows] = _round_to_e4m3(scaled)
        restored = quantized[rows].float()
        is_nonzero = original != 0
        nonzero += int(is_nonzero.sum())
        flushed += int((is_nonzero & (restored == 0)).sum())
        difference = restored.mul_(chunk_scale).sub_(original)
        max_abs = max(max_abs, float(difference.abs().max()))
        error_squares += _square_sum(difference)
        weight_squares += _square_sum(original)
    error = QuantizationError(
        relative_rms=(error_squares / weight_squares) ** 0.5 if weight_squares else 0.0,
        max_abs=max_abs,
        saturated=saturated,
        flushed=flushed / nonzero if nonzero else 0.0,
    )
    return QuantizedWeight(quantized, scale, error)


def _compute_scales(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Scales of a weight that is fit for quantization; raises ValueError if it is not."""
    if weight.dim() != 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise ValueError(
            f"expected a floating-point weight [N, K], got {weight.dtype} {list(weight.shape)}"
        )
    absmax = compute_absmax(scheme, weight)
    if not torch.isfinite(absmax).all():
        raise ValueError("the weight holds NaN or infinity")
    return compute_scale(absmax)


def _round_to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    """Rounds in place and converts. Torch's conversion rounds to nearest even, but gives NaN beyond
    the range.
    """
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _square_sum(x: torch.Tensor) -> float:
    """In f64, where the squares of f32 neither overflow nor vanish."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    """Slices of rows, each of about `_CHUNK_ELEMENTS` elements and at least one row."""
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        yield slice(start, min(start + step, weight.shape[0]))
