"""Ops on rows beside the norms: the gate, columns side by side, the router, the token table. Each
with its sample calls, its contract and its random calls.
"""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, random_weight
from srt.test.kernels.properties import (
    ACTS,
    BF16,
    F16,
    F32,
    FLOATS,
    INDICES,
    Arguments,
    are_indices,
    is_dense,
    is_vector,
    ones,
    rows_are_dense,
)
from srt.test.kernels.record import (
    INDEX_DTYPES,
    SEEDS,
    OpRecord,
    Records,
    margins,
    rows_in_nan,
    sizes,
)
from srt.test.kernels.references import U

M, N, K = 3, 5, 4


def _gate_samples() -> list[tuple[Any, ...]]:
    x = torch.randn(3, 8).half()
    return [(x,), (x.float(), BF16), (torch.randn(3, 4, 8).half()[:, 1:],)]


def _gate_arguments(dtype: torch.dtype, out_dtype: torch.dtype) -> Arguments:
    return {"input": ones(M, K, dtype=dtype), "out_dtype": out_dtype}


def _gate_is_allowed(arguments: Arguments) -> bool:
    x = arguments["input"]
    return (
        arguments["out_dtype"] in (None, *FLOATS)
        and is_dense(x, FLOATS)
        and x.dim() >= 1
        and rows_are_dense(x)
        and x.shape[-1] % 2 == 0
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


def _concat_samples() -> list[tuple[Any, ...]]:
    x, heads = torch.randn(3, 8).half(), torch.randn(3, 4, 8).half()
    return [(x, x[:, :3]), (heads[:, 0], heads[:, 1], heads[:, 3])]


def _concat_arguments(dtype: torch.dtype, _: torch.dtype) -> Arguments:
    return {
        "first": ones(M, K, dtype=dtype),
        "second": ones(M, N, dtype=dtype),
        "third": ones(M, 1, dtype=dtype),
    }


def _concat_is_allowed(arguments: Arguments) -> bool:
    first, *others = (arguments[name] for name in ("first", "second", "third"))
    return is_dense(first, FLOATS, 2) and all(
        is_dense(part, (first.dtype,), 2)
        and rows_are_dense(part)
        and part.shape[0] == first.shape[0]
        for part in (first, *([others[0]] if others[1] is None else others))
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


def _router_samples() -> list[tuple[Any, ...]]:
    x = torch.randn(3, 8).half()
    return [(x, x, 2, True), (x, x, 2, False, torch.rand(8))]


def _router_arguments(dtype: torch.dtype, _: torch.dtype) -> Arguments:
    return {
        "hidden_states": ones(M, 1, dtype=dtype),
        "gating_output": ones(M, K, dtype=dtype),
        "topk": 2,
        "renormalize": True,
        "correction_bias": ones(K),
    }


def _router_is_allowed(arguments: Arguments) -> bool:
    hidden, gates = arguments["hidden_states"], arguments["gating_output"]
    bias = arguments["correction_bias"]
    return (
        is_dense(gates, FLOATS, 2)
        and rows_are_dense(gates)
        and hidden is not None
        and is_dense(hidden, (hidden.dtype,), 2)
        and hidden.shape[0] == gates.shape[0]
        and 1 <= arguments["topk"] <= gates.shape[1]
        and (bias is None or is_vector(bias, FLOATS, gates.shape[1]))
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


def _table_samples() -> list[tuple[Any, ...]]:
    x, at = torch.randn(3, 8).half(), torch.tensor([2, 0, 1])
    return [(at, x.bfloat16(), False), (at.int(), x.bfloat16(), True, F32), (at, x, True)]


def _table_arguments(_: torch.dtype, out_dtype: torch.dtype) -> Arguments:
    return {
        "indices": ones(M, dtype=torch.int64),
        "weight": ones(N, K, dtype=BF16),
        "is_vnni": True,
        "out_dtype": out_dtype,
    }


def _table_is_allowed(arguments: Arguments) -> bool:
    weight, indices = arguments["weight"], arguments["indices"]
    return (
        arguments["out_dtype"] in (None, *FLOATS)
        and is_dense(weight, ACTS, 2)
        and weight.is_contiguous()
        and is_dense(indices, INDICES, 1)
        and are_indices(indices, indices.shape[0], weight.shape[0])
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
        index_dtype=draw(INDEX_DTYPES),
        seed=draw(SEEDS),
    )


RECORDS: Records = {
    "silu_and_mul_cpu": OpRecord(_gate_samples, _gate_arguments, _gate_is_allowed, gates()),
    "concat_columns_cpu": OpRecord(
        _concat_samples, _concat_arguments, _concat_is_allowed, concats()
    ),
    "topk_softmax_cpu": OpRecord(_router_samples, _router_arguments, _router_is_allowed, routers()),
    "packed_embedding_cpu": OpRecord(_table_samples, _table_arguments, _table_is_allowed, tables()),
}
