"""Storing into the KV cache: what a cache is to all ops, and the op's sample calls, contract and
random calls.
"""

import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from srt.test.kernels.properties import (
    E4M3,
    FLOATS,
    Arguments,
    are_heads,
    are_indices,
    head_count,
    is_dense,
    is_scale,
    ones,
    overlaps_itself,
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

T, KV_HEADS, HEAD_DIM = 3, 2, 6
CACHE_DTYPES = (*FLOATS, E4M3)
SLOTS = 17  # of random calls


def cache_of_ones(dtype: torch.dtype) -> Tensor:
    """A cache of one kind of heads."""
    return ones(7, KV_HEADS, HEAD_DIM, dtype=dtype)


def _is_cache(cache: Tensor | None, *more: torch.dtype) -> bool:
    if cache is None or not is_dense(cache, (*FLOATS, E4M3, *more), 3):
        return False
    return cache.shape[2] >= 1


def is_written_cache(cache: Tensor, heads: int) -> bool:
    """A cache that this many heads can be stored in."""
    return cache.shape[1] == heads and rows_are_dense(cache) and not overlaps_itself(cache)


def are_caches(arguments: Arguments, *more: torch.dtype) -> bool:
    """Both caches, and their scales, as far as they are read."""
    k_cache, v_cache = arguments["k_cache"], arguments["v_cache"]
    return (
        _is_cache(k_cache, *more)
        and _is_cache(v_cache, *more)
        and k_cache.shape[0] == v_cache.shape[0]
        and is_scale(arguments["k_scale"])
        and is_scale(arguments["v_scale"])
    )


def _goes_into(x: Tensor, cache: Tensor, scale: float) -> bool:
    """Numbers into numbers or codes, codes as they are into codes or bytes."""
    codes = (E4M3, torch.uint8)
    if x.dtype in codes:
        return cache.dtype in codes and scale == 1
    return cache.dtype != torch.uint8


def _store_is_allowed(arguments: Arguments) -> bool:
    k, v, k_cache, v_cache = (arguments[name] for name in ("k", "v", "k_cache", "v_cache"))
    dtypes = (*FLOATS, E4M3, torch.uint8)
    if not (
        are_caches(arguments, torch.uint8)
        and are_heads(k, k_cache.shape[2], dtypes, 3)
        and are_heads(v, v_cache.shape[2], dtypes, 3)
    ):
        return False
    k_heads, v_heads = head_count(k, k_cache.shape[2]), head_count(v, v_cache.shape[2])
    return (
        k.shape[0] == v.shape[0]
        and arguments["row_dim"] in (None, k_heads * k_cache.shape[2])
        and are_indices(arguments["indices"], k.shape[0], k_cache.shape[0])
        and is_written_cache(k_cache, k_heads)
        and is_written_cache(v_cache, v_heads)
        and _goes_into(k, k_cache, arguments["k_scale"])
        and _goes_into(v, v_cache, arguments["v_scale"])
    )


def _samples() -> list[tuple[Any, ...]]:
    heads, at = torch.randn(3, 2, 8).half(), torch.tensor([2, 0, 1])
    k, v = heads[:, :1], heads[:, 1:]
    cache, codes = torch.zeros(4, 1, 8).half(), torch.zeros(4, 1, 8).to(E4M3)
    return [
        (k, v, cache, cache.clone(), at),
        (k, v, codes, codes.clone(), at.int(), 8, 0.5, 2.0),
        (k.to(E4M3), v.byte(), codes.view(torch.uint8), codes.clone(), at),
    ]


def _arguments(dtype: torch.dtype, _: torch.dtype) -> Arguments:
    k = ones(T, KV_HEADS, HEAD_DIM, dtype=dtype)
    return {
        "k": k,
        "v": k.clone(),
        "k_cache": cache_of_ones(dtype),
        "v_cache": cache_of_ones(dtype),
        "indices": torch.arange(T),
        "row_dim": KV_HEADS * HEAD_DIM,
        "k_scale": 1.0,
        "v_scale": 1.0,
    }


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


RECORDS: Records = {"store_cache_cpu": OpRecord(_samples, _arguments, _store_is_allowed, stores())}
