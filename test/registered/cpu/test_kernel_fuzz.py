"""Random calls of the ops against float64, on every tier that this machine has.

The calls are the same in every run, so a failure is never a matter of luck; Hypothesis shrinks it
and prints the `Call` to repeat it with.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, isa, random_weight, reference_mm
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="per-commit")

E4M3, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]
BIAS_DTYPES = (F32, torch.bfloat16, torch.float16)
PER_TENSOR, PER_CHANNEL, BLOCK, LINEAR, BMM = (
    "fp8_per_tensor_scaled_mm_cpu",
    "fp8_per_channel_scaled_mm_cpu",
    "fp8_scaled_mm_cpu",
    "weight_packed_linear",
    "bmm_cpu",
)


@dataclass(frozen=True)
class Call:
    """One call of an op; `seed` fills its tensors."""

    op: str
    shape: tuple[int, int, int, int]  # B, M, N, K; B is 1 but for bmm_cpu
    act_dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype | None
    packed: bool
    bias_dtype: torch.dtype | None
    block: tuple[int, int]  # bn, bk; the whole weight or a row of it unless the op takes blocks
    scale_form: int  # which of the accepted shapes the scale has
    scale_exponent: int
    margin: tuple[int, int]  # elements before and after each row of mat1, and of bmm_cpu's out
    interleaved: bool  # [M, B, *] in memory
    seed: int


@pytest.fixture(scope="module", autouse=True)
def _restore_tier() -> Iterator[None]:
    with isa(TIERS[-1]):
        yield


def sizes(least: int, most: int) -> st.SearchStrategy[int]:
    """Mostly small ones, and those around the multiples of 32 that kernels have blocks of."""
    edges = [s for m in range(32, most, 32) for s in (m - 1, m, m + 1)]
    return st.integers(least, min(most, 20)) | st.sampled_from(edges)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    op = draw(st.sampled_from((PER_TENSOR, PER_CHANNEL, BLOCK, LINEAR, BMM)))
    act_dtype = draw(st.sampled_from((BF16, F16)))
    n, k = draw(sizes(1, 200)), draw(sizes(1, 300))
    block = (1, k) if op == PER_CHANNEL else (n, k)
    if op == BLOCK:
        # It may be larger than the weight, and as large as an int64 holds.
        edges = sizes(1, 260) | st.just(2**63 - 1)
        block = draw(edges), draw(edges)
    weight_dtypes = {LINEAR: (BF16,), BMM: (E4M3, BF16)}.get(op, (E4M3,))
    out_dtypes = (act_dtype, F32, None) if op == LINEAR else (act_dtype, F32)
    return Call(
        op=op,
        shape=(draw(st.integers(1, 3)) if op == BMM else 1, draw(sizes(0, 70)), n, k),
        act_dtype=act_dtype,
        weight_dtype=draw(st.sampled_from(weight_dtypes)),
        out_dtype=draw(st.sampled_from(out_dtypes)),
        packed=draw(st.booleans()),
        bias_dtype=None if op == BMM else draw(st.sampled_from((None, *BIAS_DTYPES))),
        block=block,
        scale_form=draw(st.integers(0, 2)),
        scale_exponent=draw(st.integers(-12, 0)),
        margin=draw(st.tuples(st.integers(0, 9), st.integers(0, 40))),
        interleaved=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def rows_in_nan(call: Call, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A buffer of NaN, and the [B, M, width] part of it that leaves margins around each row."""
    (b, m, _, _), (before, after) = call.shape, call.margin
    outer = (m, b) if call.interleaved else (b, m)
    buffer = torch.full((*outer, before + width + after), torch.nan, dtype=dtype)
    rows = buffer[..., before : before + width]
    return buffer, rows.transpose(0, 1) if call.interleaved else rows


def scales_of(call: Call) -> tuple[Tensor | None, Tensor]:
    """A scale in a shape that the op takes, and each weight's scale as [B, N, K] or less."""
    b, _, n, k = call.shape
    if call.weight_dtype != E4M3:
        return None, torch.ones(())
    block_n, block_k = call.block
    batches = b if call.op == BMM and call.scale_form == 0 else 1
    scales = torch.rand(batches, -(-n // block_n), -(-k // block_k)) + 0.5
    scales *= 2.0**call.scale_exponent
    if call.op == BLOCK:
        accepted: tuple[int, ...] = scales.shape[1:]
    elif call.op == PER_CHANNEL:
        accepted = ((n,), (n, 1), (n, 1))[call.scale_form]
    else:
        accepted = ((batches,), (), (1, 1))[call.scale_form]
    rows, columns = torch.arange(n) // block_n, torch.arange(k) // block_k
    return scales.view(accepted), scales[:, rows][..., columns]


def check(call: Call) -> None:
    """Make the call on every tier and compare with the product of what is stored."""
    torch.manual_seed(call.seed)
    b, m, n, k = call.shape
    _, mat1 = rows_in_nan(call, k, call.act_dtype)
    mat1.copy_(torch.randn(b, m, k))
    weight = random_weight(call.weight_dtype, b, n, k)
    bias = None if call.bias_dtype is None else (torch.randn(n) * 4).to(call.bias_dtype)
    scales, scale_of_weight = scales_of(call)
    expected, bound = reference_mm(mat1, weight.double() * scale_of_weight, None, bias)

    mat2 = weight if call.op == BMM else weight[0]
    stored = sgl_kernel.convert_weight_packed(mat2) if call.packed else mat2
    op: Callable[..., Any] = getattr(sgl_kernel, call.op)
    out_dtype = call.out_dtype or call.act_dtype
    rest = {
        BLOCK: (scales, list(call.block), bias, out_dtype, call.packed),
        LINEAR: (bias, call.packed, call.out_dtype),
        BMM: (call.packed, scales),
    }.get(call.op, (scales, bias, out_dtype, call.packed))
    for tier in TIERS:
        sgl_kernel.set_isa(tier)
        if call.op == BMM:
            buffer, got = rows_in_nan(call, n, out_dtype)
            op(got, mat1, stored, *rest)
        else:
            buffer = got = op(mat1[0], stored, *rest).unsqueeze(0)
        assert got.dtype == out_dtype
        check_close(got, expected, bound, tier)
        assert buffer.isnan().sum() == buffer.numel() - got.numel(), f"{tier}: wrote into a margin"


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,  # nor does a busy machine fail
        suppress_health_check=[HealthCheck.too_slow],
    )


@fuzz(100)
@given(calls())
def test_random_calls_agree_with_float64(call: Call) -> None:
    check(call)


@pytest.mark.slow
@fuzz(2000)
@given(calls())
def test_many_random_calls_agree_with_float64(call: Call) -> None:
    check(call)
