"""Tensors of more than 2^31 elements: where 32-bit arithmetic on places would show.

Weights repeat a pattern of a prime length, so that any row of them is known without a second copy.
Each test says how much memory it takes and is skipped where that is not free.
"""

import math

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, random_weight, reference_mm
from srt.test.ci_register import register_cpu_ci
from srt.utils.host_memory import read_host_memory

register_cpu_ci(est_time=150, suite="full")

E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
LIMIT = 2**31
PERIOD = 1_000_003
GIB = 2**30


def need(gib: float) -> None:
    """Skip the test unless that much memory is free."""
    free = (read_host_memory().available or 0) / GIB
    if free < gib:
        pytest.skip(f"needs {gib:.1f} GiB of memory, {free:.1f} GiB is free")


class PatternWeight:
    """[n, k] whose element i is element `i % PERIOD` of a random pattern."""

    def __init__(self, dtype: torch.dtype, n: int, k: int) -> None:
        self.k = k
        self.pattern = random_weight(dtype, PERIOD)
        self.tensor = torch.empty(n, k, dtype=dtype)
        flat = self.tensor.view(-1)
        whole = flat.numel() // PERIOD * PERIOD
        flat[:whole].view(-1, PERIOD).copy_(self.pattern)
        flat[whole:] = self.pattern[: flat.numel() - whole]

    def rows(self, rows: Tensor) -> Tensor:
        places = (rows.unsqueeze(1) * self.k + torch.arange(self.k)) % PERIOD
        return self.pattern[places]


def spots(count: int, stride: int) -> Tensor:
    """The first and last of `count` rows of `stride` elements, those around each multiple of 2^31,
    and some others.
    """
    around = [m * LIMIT // stride + d for m in range(1, 3) for d in range(-2, 3)]
    picked = {0, 1, count // 3, count - 2, count - 1, *around}
    return torch.tensor(sorted(i for i in picked if 0 <= i < count))


def check_columns(out: Tensor, mat1: Tensor, weight: PatternWeight, scale: float) -> None:
    columns = spots(out.shape[1], weight.k)
    expected, bound = reference_mm(mat1, weight.rows(columns), torch.tensor(scale), None)
    check_close(out[:, columns], expected, bound, f"M={len(mat1)}")
    assert out.isfinite().all()


@pytest.mark.slow
def test_fp8_weight_of_more_than_2_31_codes() -> None:
    n, k = 70_000, 40_000
    assert n * k > LIMIT
    need(7)
    weight = PatternWeight(E4M3, n, k)
    scale = torch.tensor(0.01)
    few, many = torch.randn(2, k).to(BF16), torch.randn(7, k).to(BF16)

    def product(mat1: Tensor, stored: Tensor, packed: bool) -> Tensor:
        return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(mat1, stored, scale, None, F32, packed)

    plain = product(few, weight.tensor, False)
    check_columns(plain, few, weight, 0.01)
    stored = sgl_kernel.convert_weight_packed(weight.tensor)
    weight.tensor = torch.empty(0)
    assert torch.equal(product(few, stored, True), plain)
    check_columns(product(many, stored, True), many, weight, 0.01)
    columns = spots(n, k)
    unpacked = sgl_kernel.unpack_rows(stored, columns)
    assert torch.equal(unpacked.view(torch.uint8), weight.rows(columns).view(torch.uint8))


@pytest.mark.slow
def test_bf16_weight_of_more_than_2_31_elements() -> None:
    n, k = 54_000, 40_000
    assert n * k > LIMIT
    need(10)
    weight = PatternWeight(BF16, n, k)
    few, many = torch.randn(1, k).to(BF16), torch.randn(7, k).half()
    stored = sgl_kernel.convert_weight_packed(weight.tensor)
    weight.tensor = torch.empty(0)
    for mat1 in (few, many):
        out = sgl_kernel.weight_packed_linear(mat1, stored, None, True, F32)
        check_columns(out, mat1, weight, 1.0)
    # The same weight as a token table.
    rows = spots(n, k)
    got = sgl_kernel.packed_embedding_cpu(rows, stored, True)
    assert torch.equal(got, weight.rows(rows))


@pytest.mark.slow
def test_result_of_more_than_2_31_elements() -> None:
    m, n, k = 48_000, 46_000, 8
    assert m * n > LIMIT
    need(5)
    mat1, weight = torch.randn(m, k).to(BF16), random_weight(E4M3, n, k)
    out = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
        mat1, weight, torch.tensor(0.5), None, BF16, False
    )
    rows = spots(m, n)
    check_close(out[rows], *reference_mm(mat1[rows], weight, torch.tensor(0.5), None))
    assert all(part.isfinite().all() for part in out.split(1000))


@pytest.mark.slow
def test_rows_of_more_than_2_31_elements() -> None:
    """Of a norm and of the gate, which work through an input row by row."""
    rows, width = 70_000, 32_000
    assert rows * width > LIMIT
    need(11)
    x = PatternWeight(BF16, rows, width)
    picked = spots(rows, width)
    given = x.rows(picked)
    weight = torch.rand(width)
    # A view of three dimensions, whose places are larger still.
    normed = sgl_kernel.rmsnorm_cpu(x.tensor.view(7, -1, width), weight, 1e-5).view(rows, width)
    assert torch.equal(normed[picked], sgl_kernel.rmsnorm_cpu(given, weight, 1e-5))
    del normed
    gated = sgl_kernel.silu_and_mul_cpu(x.tensor)
    assert torch.equal(gated[picked], sgl_kernel.silu_and_mul_cpu(given))


@pytest.mark.slow
def test_cache_of_more_than_2_31_elements() -> None:
    """Whose pages take memory only where they are used."""
    heads, dim = 8, 512
    slots = LIMIT // (heads * dim) + 100
    need(1)
    k_cache, v_cache = (torch.empty(slots, heads, dim, dtype=E4M3) for _ in range(2))
    places = torch.tensor([slots - 1, 0, LIMIT // (heads * dim), slots - 50])
    k, v = torch.randn(4, heads, dim), torch.randn(4, heads, dim)
    sgl_kernel.store_cache_cpu(k, v, k_cache, v_cache, places)
    query, out = torch.randn(1, heads, dim), torch.full((1, heads, dim), math.nan)
    sgl_kernel.decode_attention_cpu(
        query, k_cache, v_cache, out, None, None, None, None, places.view(1, 4), torch.tensor([0]),
        torch.tensor([4]), dim**-0.5, 0.0,
    )  # fmt: skip
    small = torch.arange(4)
    few = [cache[places].clone() for cache in (k_cache, v_cache)]
    assert torch.equal(few[0].float(), k.to(E4M3).float())
    expected = torch.full_like(out, math.nan)
    sgl_kernel.decode_attention_cpu(
        query, few[0], few[1], expected, None, None, None, None, small.view(1, 4),
        torch.tensor([0]), torch.tensor([4]), dim**-0.5, 0.0,
    )  # fmt: skip
    assert torch.equal(out, expected)
