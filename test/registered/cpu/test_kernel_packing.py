"""convert_weight_packed: a permutation of the weight, and how to read it back."""

import pytest
import torch

import sgl_kernel
from sgl_kernel.testing import random_weight
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="per-commit")

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 96, 100])
def test_rows_can_be_read_back(n: int, k: int, dtype: torch.dtype) -> None:
    source = random_weight(dtype, n, k)
    packed = sgl_kernel.convert_weight_packed(source)
    assert packed.shape == source.shape
    assert packed.dtype == dtype
    assert packed.is_contiguous()
    rows = torch.randperm(n)
    bits = torch.uint8 if dtype == E4M3 else torch.int16
    back = sgl_kernel.unpack_rows(packed, rows)
    assert torch.equal(back.view(bits), source[rows].view(bits))


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_full_blocks_are_vnni_pairs(dtype: torch.dtype) -> None:
    source = random_weight(dtype, 96, 64)
    bits = torch.uint8 if dtype == E4M3 else torch.int16
    # For each block of 32 columns [K/2, 32, 2], as SGLang's CPU kernels read it.
    expected = source.view(bits).view(3, 32, 32, 2).transpose(1, 2).reshape(96, 64)
    assert torch.equal(sgl_kernel.convert_weight_packed(source).view(bits), expected)


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_batches_are_packed_one_by_one(dtype: torch.dtype) -> None:
    source = random_weight(dtype, 3, 45, 17)
    bits = torch.uint8 if dtype == E4M3 else torch.int16
    packed = sgl_kernel.convert_weight_packed(source).view(bits)
    for batch in range(3):
        alone = sgl_kernel.convert_weight_packed(source[batch])
        assert torch.equal(packed[batch], alone.view(bits))


def test_a_transposed_view_is_packed_as_what_it_shows() -> None:
    source = random_weight(torch.bfloat16, 40, 64)
    packed = sgl_kernel.convert_weight_packed(source.t())
    assert torch.equal(packed, sgl_kernel.convert_weight_packed(source.t().contiguous()))


def test_source_is_left_alone_and_not_aliased() -> None:
    source = random_weight(torch.bfloat16, 33, 8)
    before = source.clone()
    packed = sgl_kernel.convert_weight_packed(source)
    packed.zero_()
    assert torch.equal(source, before)


def test_row_out_of_range_is_an_index_error() -> None:
    packed = sgl_kernel.convert_weight_packed(random_weight(torch.bfloat16, 64, 8))
    with pytest.raises(IndexError):
        sgl_kernel.unpack_rows(packed, torch.tensor([64]))
