"""packed_embedding_cpu: rows of a token table, packed or not."""

import itertools

import pytest
import torch
from torch import Tensor

import sgl_kernel
from srt.test.ci_register import register_cpu_ci
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=4, suite="per-commit")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("k", [1, 2, 7, 64, 65, 576])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 96, 100])
def test_rows_are_those_of_the_unpacked_table(n: int, k: int, packed: bool) -> None:
    source = (torch.randn(n, k) * 100).to(BF16)
    table = sgl_kernel.convert_weight_packed(source) if packed else source
    for tokens, index, out_dtype in itertools.product(
        (0, 1, n, 3 * n), (torch.int64, torch.int32), (None, F32, BF16, F16)
    ):
        ids = torch.randint(0, n, (tokens,)).to(index)
        got = sgl_kernel.packed_embedding_cpu(ids, table, packed, out_dtype)
        assert got.is_contiguous()
        assert got.dtype == (out_dtype or BF16)
        assert torch.equal(got, source[ids].to(got.dtype)), (tokens, index, out_dtype)


@pytest.mark.parametrize("packed", [False, True])
def test_every_value_is_converted_as_torch_does(packed: bool) -> None:
    source = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).view(256, 256)
    table = sgl_kernel.convert_weight_packed(source) if packed else source
    for out_dtype in (F32, BF16, F16):
        got = sgl_kernel.packed_embedding_cpu(torch.arange(256), table, packed, out_dtype)
        expected = source.to(out_dtype)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit()[got == 0], expected.signbit()[got == 0])


def test_threads_change_nothing() -> None:
    table, ids = torch.randn(500, 576).to(BF16), torch.randint(0, 500, (300,))
    for count in (1, 3):
        with torch_threads(count):
            assert torch.equal(sgl_kernel.packed_embedding_cpu(ids, table, False), table[ids])


TABLE, AT = torch.zeros(5, 4, dtype=BF16), torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("ids", "table", "out_dtype", "message"),
    [
        (
            AT + 1,
            TABLE,
            None,
            r"indices: expected indices in \[0, 5\) \(rows of weight\), got 5 at 1",
        ),
        (AT - 1, TABLE, None, "indices: .*got -1 at 0"),
        (AT, TABLE[:0], None, r"indices: expected indices in \[0, 0\)"),
        (AT.float(), TABLE, None, "indices: expected dtype"),
        (AT.view(1, 2), TABLE, None, r"indices: expected \[T\] \(1-D\)"),
        (AT.to("meta"), TABLE, None, "indices: expected a tensor on cpu"),
        (AT, TABLE.float(), None, "weight: expected dtype bfloat16 or float16, got float32"),
        (AT, TABLE[0], None, r"weight: expected \[N, K\] \(2-D\)"),
        (AT, TABLE.t(), None, "weight: expected a contiguous tensor"),
        (AT, TABLE.to("meta"), None, "weight: expected a tensor on cpu"),
        (AT, TABLE, torch.int8, "out_dtype: expected float32, bfloat16 or float16"),
    ],
)
def test_wrong_arguments(
    ids: Tensor, table: Tensor, out_dtype: torch.dtype | None, message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"sgl_kernel::packed_embedding_cpu: {message}"):
        sgl_kernel.packed_embedding_cpu(ids, table, False, out_dtype)
