"""Random calls of the ops that work row by row: norms, the gate, the router, the token table."""

from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, random_weight
from srt.test.kernel_fuzz import (
    BF16,
    F16,
    FLOATS,
    SEEDS,
    Family,
    check_margins,
    margins,
    rows_in_nan,
    sizes,
)
from srt.test.kernel_references import U, reference_rmsnorm

NORM, ADD_NORM, FUSED_ADD_NORM = "rmsnorm_cpu", "add_rmsnorm_cpu", "fused_add_rmsnorm_cpu"


@dataclass(frozen=True)
class NormCall:
    """A norm, with an addition before it or without."""

    op: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    residual_dtype: torch.dtype
    out_dtype: torch.dtype | None
    eps: float
    exponent: int
    margin: tuple[int, int]
    transposed: bool
    residual_transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        buffer, x = rows_in_nan(self.sizes, self.dtype, self.margin, self.transposed)
        x.copy_(torch.randn(self.sizes) * 2.0**self.exponent)
        weight = (torch.randn(self.sizes[-1])).to(self.weight_dtype)
        total, before = x.float(), x.clone()
        if self.op == NORM:
            got = sgl_kernel.rmsnorm_cpu(x, weight, self.eps, self.out_dtype)
        else:
            margins = rows_in_nan(
                self.sizes, self.residual_dtype, self.margin[::-1], self.residual_transposed
            )
            residual = margins[1]
            residual.copy_(torch.randn(self.sizes))
            total = total + residual.float()
            if self.op == ADD_NORM:
                got = sgl_kernel.add_rmsnorm_cpu(x, residual, weight, self.eps, self.out_dtype)
            else:
                sgl_kernel.fused_add_rmsnorm_cpu(x, residual, weight, self.eps)
                got = x
            assert torch.equal(residual, total.to(self.residual_dtype)), tier
            check_margins(*margins)
        if self.op != FUSED_ADD_NORM:
            assert torch.equal(x, before) and got.is_contiguous()
            assert got.dtype == (self.out_dtype or self.dtype)
        check_margins(buffer, x)
        check_close(got, *reference_rmsnorm(total, weight, self.eps), tier)


@st.composite
def norms(draw: st.DrawFn, op: str) -> NormCall:
    """Calls of the op."""
    leading = draw(st.lists(st.integers(0, 5), max_size=4))
    return NormCall(
        op=op,
        sizes=(*leading, draw(sizes(1, 600))),
        dtype=draw(st.sampled_from(FLOATS)),
        weight_dtype=draw(st.sampled_from(FLOATS)),
        residual_dtype=draw(st.sampled_from(FLOATS)),
        out_dtype=draw(st.sampled_from((None, *FLOATS))) if op != FUSED_ADD_NORM else None,
        eps=draw(st.sampled_from((1e-5, 1e-6))),
        exponent=draw(st.integers(-6, 6)),
        margin=draw(margins()),
        transposed=draw(st.booleans()),
        residual_transposed=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class GateCall:
    """SwiGLU's gate."""

    sizes: tuple[int, ...]  # of the output
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    margin: tuple[int, int]
    transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        n = self.sizes[-1]
        size = (*self.sizes[:-1], 2 * n)
        _, x = rows_in_nan(size, self.dtype, self.margin, self.transposed)
        x.copy_(torch.randn(size) * 20)
        gate, up = x[..., :n].double(), x[..., n:].double()
        got = sgl_kernel.silu_and_mul_cpu(x, self.out_dtype)
        assert got.dtype == (self.out_dtype or self.dtype) and got.is_contiguous()
        expected = gate * torch.sigmoid(gate) * up
        check_close(got, expected, 10 * U * expected.abs() + 2.0**-119 * up.abs(), tier)


@st.composite
def gates(draw: st.DrawFn) -> GateCall:
    """Calls of silu_and_mul_cpu."""
    leading = draw(st.lists(st.integers(0, 5), max_size=4))
    return GateCall(
        sizes=(*leading, draw(sizes(0, 300))),
        dtype=draw(st.sampled_from(FLOATS)),
        out_dtype=draw(st.sampled_from((None, *FLOATS))),
        margin=draw(margins()),
        transposed=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class ConcatCall:
    """Columns side by side."""

    rows: int
    columns: tuple[int, ...]
    dtype: torch.dtype
    margin: tuple[int, int]
    transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        parts = []
        for n in self.columns:
            _, part = rows_in_nan((self.rows, n), self.dtype, self.margin, self.transposed)
            parts.append(part.copy_(torch.randn(self.rows, n)))
        got = sgl_kernel.concat_columns_cpu(*parts)
        assert torch.equal(got, torch.cat(parts, 1)) and got.is_contiguous(), tier


@st.composite
def concats(draw: st.DrawFn) -> ConcatCall:
    """Calls of concat_columns_cpu."""
    return ConcatCall(
        rows=draw(st.integers(0, 40)),
        columns=tuple(draw(st.lists(sizes(0, 300), min_size=2, max_size=3))),
        dtype=draw(st.sampled_from(FLOATS)),
        margin=draw(margins()),
        transposed=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class RouterCall:
    """The router of a mixture of experts."""

    rows: int
    experts: int
    topk: int
    dtype: torch.dtype
    bias_dtype: torch.dtype | None
    renormalize: bool
    margin: tuple[int, int]
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        size = (self.rows, self.experts)
        _, logits = rows_in_nan(size, self.dtype, self.margin)
        logits.copy_(torch.randn(size) * 3)
        bias = None
        if self.bias_dtype is not None:
            bias = torch.randn(self.experts).to(self.bias_dtype)
        hidden = torch.empty(self.rows, 1)
        weights, ids = sgl_kernel.topk_softmax_cpu(
            hidden, logits, self.topk, self.renormalize, bias
        )
        assert ids.shape == weights.shape == (self.rows, self.topk) and ids.dtype == torch.int32
        probabilities = logits.double().softmax(-1)
        bound = (self.experts + 16) * U
        choice = probabilities if bias is None else probabilities + bias.double()
        taken = choice.gather(1, ids.long())
        # Which of two that round alike comes first is the op's to say.
        best = choice.topk(self.topk).values
        assert ((taken - best).abs() <= 2 * bound * (1 + best.abs())).all(), tier
        assert all(len(set(row)) == self.topk for row in ids.tolist()), tier
        expected = probabilities.gather(1, ids.long())
        if self.renormalize:
            expected = expected / expected.sum(-1, keepdim=True)
        check_close(weights, expected, 2 * bound * expected, tier)


@st.composite
def routers(draw: st.DrawFn) -> RouterCall:
    """Calls of topk_softmax_cpu."""
    experts = draw(sizes(1, 300))
    return RouterCall(
        rows=draw(st.integers(0, 20)),
        experts=experts,
        topk=draw(st.integers(1, min(experts, 12))),
        dtype=draw(st.sampled_from(FLOATS)),
        bias_dtype=draw(st.sampled_from((None, *FLOATS))),
        renormalize=draw(st.booleans()),
        margin=draw(margins()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class TableCall:
    """Rows of a token table."""

    n: int
    k: int
    tokens: int
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    packed: bool
    index_dtype: torch.dtype
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        table: Tensor = random_weight(self.dtype, self.n, self.k)
        stored = sgl_kernel.convert_weight_packed(table) if self.packed else table
        rows = torch.randint(0, self.n, (self.tokens,)).to(self.index_dtype)
        got = sgl_kernel.packed_embedding_cpu(rows, stored, self.packed, self.out_dtype)
        assert torch.equal(got, table[rows.long()].to(self.out_dtype or self.dtype)), tier


@st.composite
def tables(draw: st.DrawFn) -> TableCall:
    """Calls of packed_embedding_cpu."""
    return TableCall(
        n=draw(sizes(1, 200)),
        k=draw(sizes(1, 200)),
        tokens=draw(st.integers(0, 20)),
        dtype=draw(st.sampled_from((BF16, F16))),
        out_dtype=draw(st.sampled_from((None, *FLOATS))),
        packed=draw(st.booleans()),
        index_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        seed=draw(SEEDS),
    )


ROWS: Family = {
    **{op: norms(op) for op in (NORM, ADD_NORM, FUSED_ADD_NORM)},
    "silu_and_mul_cpu": gates(),
    "concat_columns_cpu": concats(),
    "topk_softmax_cpu": routers(),
    "packed_embedding_cpu": tables(),
}
