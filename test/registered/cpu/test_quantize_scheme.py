"""Rounding of weights to FP8 E4M3, against the format's definition written out anew."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from srt.checkpoint.formats.schemes import SCHEMES
from srt.layers.quantization import fp8_quantization as scheme_module
from srt.layers.quantization.fp8_quantization import (
    compute_scale,
    expand_scale,
    quantize_weight,
)
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="per-commit")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (3, 1), (1, 7), (16, 31), (64, 96), (130, 257)]


def e4m3_values() -> np.ndarray:
    """All non-negative finite values, from the definition: bias 7, subnormals, no infinity."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array([*subnormal, *normal[:-1]])  # the last code is NaN


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest value, ties to the even code, saturating at 448; by search, in float64."""
    values = e4m3_values()
    distance = np.abs(np.abs(x)[..., None] - values)
    nearest = distance.min(axis=-1, keepdims=True)
    candidates = distance == nearest  # one, or two when it is a tie
    even = candidates & (np.arange(len(values)) % 2 == 0)
    code = np.where(even.any(axis=-1), even.argmax(axis=-1), candidates.argmax(axis=-1))
    return np.copysign(values[code], x)


def random_weight(shape: tuple[int, int], dtype: torch.dtype, spread: float) -> torch.Tensor:
    """Normal values whose magnitudes also vary from element to element by powers of two."""
    generator = torch.Generator().manual_seed(7)
    exponents = torch.rand(shape, generator=generator) * spread - spread
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)


def expand(scale: torch.Tensor, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """The scale of each element of a weight."""
    return expand_scale(SCHEMES[name], scale, slice(0, shape[0]), shape).expand(shape)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [0.0, 20.0])
def test_matches_the_formats_definition(
    name: str, dtype: torch.dtype, shape: tuple[int, int], spread: float
) -> None:
    weight = random_weight(shape, dtype, spread)
    result = quantize_weight(weight, SCHEMES[name])
    assert result.weight.dtype == torch.float8_e4m3fn
    assert result.weight.shape == weight.shape
    assert result.scale.dtype == torch.float32
    assert result.scale.shape == SCHEMES[name].scale_shape(shape)

    original = weight.float().numpy()
    # The scale of each element, from the definition of the scheme.
    rows, columns = {"per-tensor": shape, "per-channel": (1, shape[1]), "block": (128, 128)}[name]
    absmax = np.zeros(shape, np.float32)
    for n in range(0, shape[0], rows):
        for k in range(0, shape[1], columns):
            block = slice(n, n + rows), slice(k, k + columns)
            absmax[block] = np.abs(original[block]).max()
    scale = (absmax / np.float32(448)).astype(np.float32)
    np.testing.assert_array_equal(expand(result.scale, name, shape).numpy(), scale)
    # The division is in f32, as the kernels' multiplication is.
    expected = round_to_e4m3((original / scale).astype(np.float64))
    np.testing.assert_array_equal(result.weight.float().numpy(), expected)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_at_most_half_an_ulp(name: str, dtype: torch.dtype) -> None:
    weight = random_weight((64, 96), dtype, 12.0).double()
    result = quantize_weight(weight.to(dtype), SCHEMES[name])
    scale = expand(result.scale, name, (64, 96)).double()
    restored = result.weight.double() * scale
    # Spacing of E4M3 around w / scale: 2^(exponent - 3), and 2^-9 below the normal range.
    exponent = torch.floor(torch.log2((weight.abs() / scale).clamp(min=2.0**-6)))
    ulp = torch.exp2(exponent - 3)
    assert ((restored - weight).abs() <= 0.5 * ulp * scale * (1 + 1e-6)).all()
    assert result.error.max_abs == pytest.approx(float((restored - weight).abs().max()))
    expected_rms = float((restored - weight).norm() / weight.norm())
    assert result.error.relative_rms == pytest.approx(expected_rms, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-9, 0, 3])
def test_representable_weights_survive_exactly(dtype: torch.dtype, exponent: int) -> None:
    """All 254 finite codes times a power of two: the scale found is that power."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~torch.isnan(codes.float())]
    values = finite.float() * 2.0**exponent
    weight = values.reshape(2, -1).to(dtype)
    assert torch.equal(weight.float(), values.reshape(2, -1))
    result = quantize_weight(weight, SCHEMES["per-tensor"])
    assert float(result.scale) == 2.0**exponent
    assert torch.equal(result.weight.view(torch.uint8), finite.reshape(2, -1).view(torch.uint8))
    assert (result.error.relative_rms, result.error.max_abs) == (0.0, 0.0)
    assert (result.error.saturated, result.error.flushed) == (0, 0.0)


@pytest.mark.parametrize("name", SCHEMES)
def test_zero_weight_gets_scale_one(name: str) -> None:
    result = quantize_weight(torch.zeros(3, 4, dtype=torch.bfloat16), SCHEMES[name])
    assert (result.scale == 1).all()
    assert (result.weight.float() == 0).all()
    assert result.error.relative_rms == 0.0


def test_zero_row_beside_others() -> None:
    weight = torch.tensor([[0.0, 0.0], [448.0, -224.0]])
    result = quantize_weight(weight, SCHEMES["per-channel"])
    assert result.scale.flatten().tolist() == [1.0, 1.0]
    assert torch.equal(result.weight.float(), weight)


def test_small_elements_flush_and_are_counted() -> None:
    """Half the smallest subnormal, 2^-10, is a tie and goes to zero; just above it does not."""
    just_above = math.nextafter(2.0**-10, 1.0) * (1 + 2.0**-20)
    weight = torch.tensor([[448.0, 2.0**-10, -(2.0**-10), just_above, 0.0]])
    result = quantize_weight(weight, SCHEMES["per-tensor"])
    assert result.weight.float().tolist() == [[448.0, 0.0, 0.0, 2.0**-9, 0.0]]
    assert result.error.flushed == pytest.approx(2 / 4)


@pytest.mark.parametrize("absmax", [1e-45, 1e-40, 1e-37, 3e38])
def test_scale_is_normal_and_finite_at_the_ends_of_f32(absmax: float) -> None:
    scale = compute_scale(torch.tensor(absmax))
    assert torch.finfo(torch.float32).tiny <= float(scale) < math.inf
    result = quantize_weight(torch.tensor([[absmax, -absmax]]), SCHEMES["per-tensor"])
    assert torch.isfinite(result.weight.float()).all()
    if absmax >= 1e-35:
        assert result.weight.float().tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCHEMES)
def test_rejects_what_is_not_finite(name: str, bad: float) -> None:
    weight = torch.ones(4, 5, dtype=torch.bfloat16)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_weight(weight, SCHEMES[name])


@pytest.mark.parametrize(
    "weight", [torch.ones(3), torch.ones(0, 3), torch.ones(2, 2, dtype=torch.int8)]
)
def test_rejects_what_is_no_weight(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        quantize_weight(weight, SCHEMES["per-tensor"])


@pytest.mark.parametrize("name", SCHEMES)
def test_chunks_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight((37, 19), torch.bfloat16, 8.0)
    whole = quantize_weight(weight, SCHEMES[name])
    monkeypatch.setattr(scheme_module, "_CHUNK_ELEMENTS", 40)
    chunked = quantize_weight(weight.t().contiguous().t(), SCHEMES[name])
    assert torch.equal(whole.weight.view(torch.uint8), chunked.weight.view(torch.uint8))
    assert torch.equal(whole.scale, chunked.scale)
    assert chunked.error.relative_rms == pytest.approx(whole.error.relative_rms)
    assert chunked.error.flushed == whole.error.flushed


def test_per_channel_loses_less_when_channels_differ() -> None:
    weight = random_weight((32, 64), torch.float32, 0.0) * torch.logspace(-6, 0, 32)[:, None]
    per_tensor, per_channel = (
        quantize_weight(weight, SCHEMES[name]) for name in ("per-tensor", "per-channel")
    )
    assert per_channel.error.flushed < per_tensor.error.flushed
    assert (per_channel.weight.float() * per_channel.scale - weight)[0].norm() < 0.1 * (
        per_tensor.weight.float() * per_tensor.scale - weight
    )[0].norm()
