"""Rotation and norms of heads: sample calls, contracts, random calls."""

import functools
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close
from srt.test.kernels.properties import (
    FLOATS,
    Arguments,
    are_heads,
    are_indices,
    is_dense,
    is_eps,
    is_table,
    ones,
    overlaps_itself,
)
from srt.test.kernels.record import (
    INDEX_DTYPES,
    SEEDS,
    OpRecord,
    Records,
    check_margins,
    margins,
    rows_in_nan,
    sizes,
)
from srt.test.kernels.references import cos_sin, reference_rmsnorm, reference_rope

ROPE, QK_NORM = "rotary_embedding_cpu", "fused_qk_rmsnorm_cpu"
T, HEADS, KV_HEADS, HEAD_DIM, ROWS = 3, 4, 2, 6, 5
POSITIONS = 13  # of random calls


def _samples(op: str) -> list[tuple[Any, ...]]:
    heads, weight = torch.randn(3, 4, 8).half(), torch.rand(8)
    q, k = heads[:, :2], heads[:, 2:3]
    if op == QK_NORM:
        return [
            (q, k, weight, weight.half(), 1e-6),
            (q[None], k[None], weight, weight, 1e-6),
        ]
    x, at, angles = torch.randn(3, 8).half(), torch.tensor([2, 0, 1]), torch.rand(5, 8)
    return [
        (at, q, k, 8, angles, True),
        (at, x, x.clone(), 4, angles[:, :4], False),
        (at, q[None] + 0, k[None] + 0, 8, angles, True),
    ]


def _arguments(op: str, dtype: torch.dtype, _: torch.dtype) -> Arguments:
    q, k = ones(T, HEADS, HEAD_DIM, dtype=dtype), ones(T, KV_HEADS, HEAD_DIM, dtype=dtype)
    if op == QK_NORM:
        weights = {"q_weight": ones(HEAD_DIM), "k_weight": ones(HEAD_DIM)}
        return {"q": q, "k": k, **weights, "eps": 1e-6}
    return {
        "positions": ones(T, dtype=torch.int64),
        "query": q,
        "key": k,
        "head_size": HEAD_DIM,
        "cos_sin_cache": ones(ROWS, 4),
        "is_neox": True,
    }


def _token_sizes(x: Tensor) -> torch.Size:
    return x.shape[: 2 if x.dim() == 4 else 1]


def _are_pairs(q: Tensor | None, q_dim: int, k: Tensor | None, k_dim: int) -> bool:
    if not (are_heads(q, q_dim, FLOATS, 4) and are_heads(k, k_dim, FLOATS, 4)):
        return False
    assert q is not None and k is not None
    return (
        q.dtype == k.dtype
        and (q.dim() == 4) == (k.dim() == 4)
        and _token_sizes(q) == _token_sizes(k)
    )


def _norm_is_allowed(arguments: Arguments) -> bool:
    weights = [arguments["q_weight"], arguments["k_weight"]]
    if not all(is_dense(w, FLOATS, 1) and w.shape[0] >= 1 and w.is_contiguous() for w in weights):
        return False
    sizes = [w.shape[0] for w in weights]
    return is_eps(arguments["eps"]) and _are_pairs(
        arguments["q"], sizes[0], arguments["k"], sizes[1]
    )


def _rotation_is_allowed(arguments: Arguments) -> bool:
    query, key, size = arguments["query"], arguments["key"], arguments["head_size"]
    table = arguments["cos_sin_cache"]
    return (
        size >= 1
        and _are_pairs(query, size, key, size)
        and query.dim() == key.dim()
        and (query.dim() == 3 or not (overlaps_itself(query) or overlaps_itself(key)))
        and is_table(table, size)
        and are_indices(arguments["positions"], _token_sizes(query).numel(), table.shape[0])
    )


@dataclass(frozen=True)
class PairCall:
    """Queries and keys, `[T, heads * head_dim]`, `[T, heads, head_dim]` or `[B, T, heads, ...]`."""

    op: str
    rank: int
    batch: int
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype
    table_dtype: torch.dtype  # of cosines and sines, or of the norms' weights
    index_dtype: torch.dtype
    is_neox: bool
    margin: tuple[int, int]
    transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        (q_buffer, query), (k_buffer, key) = (self._heads(heads) for heads in self.heads)
        before = [self._by_token(x).clone() for x in (query, key)]
        tokens = before[0].shape[0]
        if self.op == ROPE:
            positions = torch.randint(0, POSITIONS, (tokens,)).to(self.index_dtype)
            table = cos_sin(POSITIONS, self.rotary_dim).to(self.table_dtype)
            outs = sgl_kernel.rotary_embedding_cpu(
                positions, query, key, self.head_dim, table, self.is_neox
            )
            expected = [reference_rope(x, positions, table, self.is_neox) for x in before]
        else:
            weights = [torch.randn(self.head_dim).to(self.table_dtype) for _ in range(2)]
            outs = sgl_kernel.fused_qk_rmsnorm_cpu(query, key, weights[0], weights[1], 1e-6)
            expected = [reference_rmsnorm(x, w, 1e-6) for x, w in zip(before, weights, strict=True)]
        in_place = self.op == ROPE and self.rank != 3
        for out, given, was, (value, bound) in zip(
            outs, (query, key), before, expected, strict=True
        ):
            assert out.shape == given.shape and out.dtype == self.dtype and out.is_contiguous()
            check_close(self._by_token(out), value, bound, tier)
            assert torch.equal(self._by_token(given), self._by_token(out) if in_place else was)
        check_margins(q_buffer, query)
        check_margins(k_buffer, key)

    def _heads(self, heads: int) -> tuple[Tensor, Tensor]:
        size: tuple[int, ...] = (self.tokens, heads, self.head_dim)
        if self.rank == 2:
            size = (self.tokens, heads * self.head_dim)
        elif self.rank == 4:
            size = (self.batch, *size)
        buffer, rows = rows_in_nan(size, self.dtype, self.margin, self.transposed)
        rows.copy_(torch.randn(size))
        return buffer, rows

    def _by_token(self, x: Tensor) -> Tensor:
        tokens = x.shape[0] * (x.shape[1] if self.rank == 4 else 1)
        heads = x.shape[-2] if self.rank > 2 else x.shape[1] // self.head_dim
        return x.reshape(tokens, heads, self.head_dim)


@st.composite
def pairs(draw: st.DrawFn, op: str) -> PairCall:
    """Calls of the op."""
    head_dim = draw(sizes(1, 140))
    return PairCall(
        op=op,
        rank=draw(st.integers(2, 4)),
        batch=draw(st.integers(0, 3)),
        tokens=draw(st.integers(0, 6)),
        heads=draw(st.tuples(st.integers(0, 4), st.integers(0, 3))),
        head_dim=head_dim,
        rotary_dim=2 * draw(st.integers(0, head_dim // 2)),
        dtype=draw(st.sampled_from(FLOATS)),
        table_dtype=draw(st.sampled_from(FLOATS)),
        index_dtype=draw(INDEX_DTYPES),
        is_neox=draw(st.booleans()),
        margin=draw(margins()),
        transposed=draw(st.booleans()),
        seed=draw(SEEDS),
    )


RECORDS: Records = {
    op: OpRecord(
        samples=functools.partial(_samples, op),
        arguments=functools.partial(_arguments, op),
        is_allowed=is_allowed,
        calls=pairs(op),
    )
    for op, is_allowed in ((ROPE, _rotation_is_allowed), (QK_NORM, _norm_is_allowed))
}
