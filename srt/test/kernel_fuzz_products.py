"""Random products, and the packing of weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, random_weight, reference_mm
from srt.test.kernel_fuzz import (
    BF16,
    E4M3,
    F16,
    F32,
    FLOATS,
    SEEDS,
    Family,
    check_margins,
    margins,
    rows_in_nan,
    sizes,
)

PER_TENSOR, PER_CHANNEL, BLOCK, LINEAR, BMM, PACK = (
    "fp8_per_tensor_scaled_mm_cpu",
    "fp8_per_channel_scaled_mm_cpu",
    "fp8_scaled_mm_cpu",
    "weight_packed_linear",
    "bmm_cpu",
    "convert_weight_packed",
)


@dataclass(frozen=True)
class ProductCall:
    """A product with any of the weights, scales and biases that its op takes."""

    op: str
    rows: tuple[int, ...]  # leading sizes of mat1, [B, M] for bmm_cpu
    n: int
    k: int
    act_dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype | None
    packed: bool
    bias_dtype: torch.dtype | None
    block: tuple[int, int]  # bn, bk; the whole weight or a row of it unless the op takes blocks
    scale_form: int  # which of the accepted shapes the scale has
    scale_exponent: int
    margin: tuple[int, int]  # of each row of mat1, and of bmm_cpu's out
    transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        is_bmm = self.op == BMM
        _, mat1 = rows_in_nan((*self.rows, self.k), self.act_dtype, self.margin, self.transposed)
        mat1.copy_(torch.randn(mat1.shape))
        batch = self.rows[:1] if is_bmm else ()
        weight = random_weight(self.weight_dtype, *batch, self.n, self.k)
        bias = None
        if self.bias_dtype is not None:
            bias = (torch.randn(self.n) * 4).to(self.bias_dtype)
        scales, scale_of_weight = self._scales()
        expected, bound = reference_mm(mat1, weight.double() * scale_of_weight, None, bias)

        stored = sgl_kernel.convert_weight_packed(weight) if self.packed else weight
        op: Callable[..., Any] = getattr(sgl_kernel, self.op)
        out_dtype = self.out_dtype or self.act_dtype
        if is_bmm:
            size = (*self.rows, self.n)
            buffer, got = rows_in_nan(size, out_dtype, self.margin, self.transposed)
            op(got, mat1, stored, self.packed, scales)
            check_margins(buffer, got)
        else:
            rest = {
                BLOCK: (scales, list(self.block), bias, out_dtype, self.packed),
                LINEAR: (bias, self.packed, self.out_dtype),
            }.get(self.op, (scales, bias, out_dtype, self.packed))
            got = op(mat1, stored, *rest)
        assert got.dtype == out_dtype
        check_close(got, expected, bound, tier)

    def _scales(self) -> tuple[Tensor | None, Tensor]:
        """A scale in a shape that the op takes, and each weight's scale."""
        if self.weight_dtype != E4M3:
            return None, torch.ones(())
        block_n, block_k = self.block
        batches = self.rows[0] if self.op == BMM and self.scale_form == 0 else 1
        scales = torch.rand(batches, -(-self.n // block_n), -(-self.k // block_k)) + 0.5
        scales *= 2.0**self.scale_exponent
        if self.op == BLOCK:
            accepted: tuple[int, ...] = scales.shape[1:]
        elif self.op == PER_CHANNEL:
            accepted = ((self.n,), (self.n, 1), (self.n, 1))[self.scale_form]
        else:
            accepted = ((batches,), (), (1, 1))[self.scale_form]
        rows, columns = torch.arange(self.n) // block_n, torch.arange(self.k) // block_k
        of_weight = scales[:, rows][..., columns]
        return scales.view(accepted), of_weight if self.op == BMM else of_weight[0]


@st.composite
def products(draw: st.DrawFn, op: str) -> ProductCall:
    """Calls of the op."""
    act_dtype = draw(st.sampled_from((BF16, F16)))
    n, k = draw(sizes(1, 200)), draw(sizes(1, 300))
    block = (1, k) if op == PER_CHANNEL else (n, k)
    if op == BLOCK:
        # It may be larger than the weight, and as large as an int64 holds.
        edges = sizes(1, 260) | st.just(2**63 - 1)
        block = draw(edges), draw(edges)
    weight_dtypes = {LINEAR: (BF16, F16), BMM: (E4M3, BF16, F16)}.get(op, (E4M3,))
    out_dtypes = (act_dtype, F32, None) if op == LINEAR else (act_dtype, F32)
    leading = draw(st.lists(st.integers(1, 3), min_size=op == BMM, max_size=1 if op == BMM else 3))
    return ProductCall(
        op=op,
        rows=(*leading, draw(sizes(0, 70 if len(leading) < 2 else 9))),
        n=n,
        k=k,
        act_dtype=act_dtype,
        weight_dtype=draw(st.sampled_from(weight_dtypes)),
        out_dtype=draw(st.sampled_from(out_dtypes)),
        packed=draw(st.booleans()),
        bias_dtype=None if op == BMM else draw(st.sampled_from((None, *FLOATS))),
        block=block,
        scale_form=draw(st.integers(0, 2)),
        scale_exponent=draw(st.integers(-12, 0)),
        margin=draw(margins()),
        transposed=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class PackCall:
    """A weight that is packed and read back."""

    batch: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        """Rows read back are the weight's, bit for bit; packing is the same on every tier."""
        torch.manual_seed(self.seed)
        weight = random_weight(self.dtype, *self.batch, self.n, self.k)
        if self.transposed:
            weight = weight.mT.contiguous().mT
        packed = sgl_kernel.convert_weight_packed(weight)
        assert packed.shape == weight.shape and packed.dtype == self.dtype
        assert packed.is_contiguous()
        bits = torch.uint8 if self.dtype == E4M3 else torch.int16
        rows = torch.arange(self.n)
        for one, of in zip(
            packed.view(-1, self.n, self.k), weight.reshape(-1, self.n, self.k), strict=True
        ):
            assert torch.equal(sgl_kernel.unpack_rows(one, rows).view(bits), of.view(bits)), tier


def packings() -> st.SearchStrategy[PackCall]:
    """Calls of convert_weight_packed."""
    batch = st.lists(st.integers(0, 3), max_size=1).map(tuple)
    dtypes = st.sampled_from((E4M3, BF16, F16))
    return st.builds(PackCall, batch, sizes(1, 200), sizes(1, 200), dtypes, st.booleans(), SEEDS)


PRODUCTS: Family = {
    **{op: products(op) for op in (PER_TENSOR, PER_CHANNEL, BLOCK, LINEAR, BMM)},
    PACK: packings(),
}
