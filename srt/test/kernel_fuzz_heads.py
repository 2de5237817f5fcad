"""Random calls of the ops between projections and attention: head norms, rotation, the KV cache."""

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import UNIT_ROUNDOFF, check_close
from srt.test.kernel_fuzz import (
    E4M3,
    FLOATS,
    SEEDS,
    Family,
    check_margins,
    margins,
    rows_in_nan,
    sizes,
)
from srt.test.kernel_references import U, cos_sin, reference_rmsnorm, reference_rope

ROPE, QK_NORM, STORE, FUSED = (
    "rotary_embedding_cpu",
    "fused_qk_rmsnorm_cpu",
    "store_cache_cpu",
    "fused_qk_norm_rope_store_cpu",
)
POSITIONS, SLOTS = 13, 17
CACHE_DTYPES = (*FLOATS, E4M3)
INDEX_DTYPES = st.sampled_from((torch.int32, torch.int64))


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


@dataclass(frozen=True)
class StoreCall:
    """Numbers, or what is FP8 already, into caches of one kind each."""

    tokens: int
    heads: int
    head_dims: tuple[int, int]  # of keys and of values
    dtypes: tuple[torch.dtype, torch.dtype]
    cache_dtypes: tuple[torch.dtype, torch.dtype]
    scales: tuple[float, float]
    as_rows: bool  # [T, heads * head_dim]
    index_dtype: torch.dtype
    margin: tuple[int, int]
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        slots = torch.randperm(SLOTS)[: self.tokens]
        given, caches, expected = [], [], []
        for head_dim, dtype, cache_dtype, scale in zip(
            self.head_dims, self.dtypes, self.cache_dtypes, self.scales, strict=True
        ):
            size = (self.tokens, self.heads, head_dim)
            source, cached = self._source(size, dtype, cache_dtype, scale)
            given.append(source)
            caches.append(self._cache(head_dim, cache_dtype))
            after = caches[-1].clone()
            after[slots] = cached.view(size)
            expected.append(after)
        row_dim = self.heads * self.head_dims[0] if self.as_rows else None
        sgl_kernel.store_cache_cpu(
            given[0], given[1], caches[0], caches[1], slots.to(self.index_dtype), row_dim,
            *self.scales,
        )  # fmt: skip
        for cache, after in zip(caches, expected, strict=True):
            numbers = cache.dtype in FLOATS
            bits = cache.float() if numbers else cache.view(torch.uint8)
            wanted = after.float() if numbers else after.view(torch.uint8)
            torch.testing.assert_close(bits, wanted, rtol=0, atol=0, equal_nan=True)

    def _cache(self, head_dim: int, dtype: torch.dtype) -> Tensor:
        size = (SLOTS, self.heads, head_dim)
        if dtype == torch.uint8:
            return torch.randint(0, 256, size, dtype=torch.uint8)
        return torch.full(size, math.nan).to(dtype)

    def _source(
        self, size: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype, scale: float
    ) -> tuple[Tensor, Tensor]:
        """What is stored, and what the cache then holds."""
        if self.as_rows:
            size = (size[0], size[1] * size[2])
        if dtype not in FLOATS:
            codes = torch.randint(0, 256, size, dtype=torch.uint8)
            return codes.view(dtype), codes.view(cache_dtype)
        _, rows = rows_in_nan(size, dtype, self.margin)
        rows.copy_(torch.randn(size) * 100)
        limit = 448.0 if cache_dtype == E4M3 else math.inf
        return rows, (rows.float() / scale).clamp(-limit, limit).to(cache_dtype)


@st.composite
def stores(draw: st.DrawFn) -> StoreCall:
    """Calls of store_cache_cpu."""

    def side() -> tuple[torch.dtype, torch.dtype, float]:
        if draw(st.booleans()):
            cache_dtype = draw(st.sampled_from(CACHE_DTYPES))
            return draw(st.sampled_from(FLOATS)), cache_dtype, draw(st.sampled_from((1.0, 0.37)))
        codes = st.sampled_from((E4M3, torch.uint8))
        return draw(codes), draw(codes), 1.0

    k, v = side(), side()
    return StoreCall(
        tokens=draw(st.integers(0, 9)),
        heads=draw(st.integers(0, 4)),
        head_dims=(draw(sizes(1, 140)), draw(sizes(1, 140))),
        dtypes=(k[0], v[0]),
        cache_dtypes=(k[1], v[1]),
        scales=(k[2], v[2]),
        as_rows=draw(st.booleans()),
        index_dtype=draw(INDEX_DTYPES),
        margin=draw(margins()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class FusedCall:
    """A fused projection on its way to attention."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scales: tuple[float, float]
    with_norms: tuple[bool, bool]
    with_q_scale: bool
    is_neox: bool
    index_dtype: torch.dtype
    margin: tuple[int, int]
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        dims = (self.head_dim, self.head_dim, self.v_head_dim)
        widths = [h * d for h, d in zip(heads, dims, strict=True)]
        size = (self.tokens, sum(widths))
        buffer, qkv = rows_in_nan(size, self.dtype, self.margin)
        qkv.copy_(torch.randn(size))
        q, k, v = (
            part.reshape(self.tokens, h, d).clone()
            for part, h, d in zip(qkv.split(widths, 1), heads, dims, strict=True)
        )
        table = cos_sin(POSITIONS, self.rotary_dim)
        positions = torch.randint(0, POSITIONS, (self.tokens,)).to(self.index_dtype)
        slots = torch.randperm(SLOTS)[: self.tokens]
        weights = [torch.rand(self.head_dim) + 0.5 if norm else None for norm in self.with_norms]
        q_scale = torch.rand(POSITIONS) + 0.5 if self.with_q_scale else None
        k_cache, v_cache = (
            torch.full((SLOTS, self.kv_heads, d), math.nan).to(self.cache_dtype) for d in dims[1:]
        )
        sgl_kernel.fused_qk_norm_rope_store_cpu(
            qkv, positions, table, self.is_neox, self.heads, self.kv_heads, weights[0], weights[1],
            1e-6, k_cache, v_cache, slots.to(self.index_dtype), *self.scales, q_scale,
        )  # fmt: skip
        check_margins(buffer, qkv)
        assert torch.equal(qkv[:, widths[0] :], torch.cat([k.flatten(1), v.flatten(1)], 1))

        expected, bound = self._rotated(q, weights[0], positions, table)
        if q_scale is not None:
            factor = q_scale[positions.long()].view(-1, 1, 1).double()
            expected, bound = expected * factor, bound * factor + U * (expected * factor).abs()
        check_close(qkv[:, : widths[0]].reshape(expected.shape), expected, bound, tier)
        expected, bound = self._rotated(k, weights[1], positions, table)
        # Divided, rounded to the cache's dtype, and here multiplied again.
        unit = UNIT_ROUNDOFF.get(self.cache_dtype, 2.0**-4)
        smallest = 2.0**-10 if self.cache_dtype == E4M3 else 2.0**-25
        bound = bound + (unit + U) * (expected.abs() + bound) + self.scales[0] * smallest
        check_close((k_cache[slots].double() * self.scales[0]).float(), expected, bound, tier)
        stored = (v.float() / self.scales[1]).to(self.cache_dtype)
        assert torch.equal(v_cache[slots].float(), stored.float()), tier
        untouched = torch.ones(SLOTS, dtype=torch.bool)
        untouched[slots] = False
        assert k_cache[untouched].float().isnan().all()
        assert v_cache[untouched].float().isnan().all()

    def _rotated(
        self, x: Tensor, weight: Tensor | None, positions: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed, norm_bound = x.double(), torch.zeros(x.shape, dtype=torch.float64)
        if weight is not None:
            normed, norm_bound = reference_rmsnorm(x, weight, 1e-6)
        expected, bound = reference_rope(normed, positions, table, self.is_neox)
        # An error of the norm is turned into both elements of its pair.
        return expected, bound + 2 * norm_bound.amax(-1, keepdim=True)


@st.composite
def fused(draw: st.DrawFn) -> FusedCall:
    """Calls of fused_qk_norm_rope_store_cpu."""
    head_dim = draw(sizes(1, 140))
    cache_dtype = draw(st.sampled_from(CACHE_DTYPES))
    factors = st.sampled_from((0.05, 0.5) if cache_dtype == E4M3 else (1.0, 0.37))
    return FusedCall(
        tokens=draw(st.integers(0, 8)),
        heads=draw(st.integers(0, 4)),
        kv_heads=draw(st.integers(0, 3)),
        head_dim=head_dim,
        v_head_dim=draw(sizes(1, 140)),
        rotary_dim=2 * draw(st.integers(0, head_dim // 2)),
        dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype=cache_dtype,
        scales=(draw(factors), draw(factors)),
        with_norms=(draw(st.booleans()), draw(st.booleans())),
        with_q_scale=draw(st.booleans()),
        is_neox=draw(st.booleans()),
        index_dtype=draw(INDEX_DTYPES),
        margin=draw(margins()),
        seed=draw(SEEDS),
    )


HEADS: Family = {ROPE: pairs(ROPE), QK_NORM: pairs(QK_NORM), STORE: stores(), FUSED: fused()}
