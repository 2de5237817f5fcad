"""From a fused projection into the KV cache: what all ops on a fused projection have in common, and
the sample calls, the contract and the random calls of the one that ends there.
"""

import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import UNIT_ROUNDOFF, check_close
from srt.test.kernels.kv_cache import (
    CACHE_DTYPES,
    HEAD_DIM,
    KV_HEADS,
    SLOTS,
    T,
    are_caches,
    cache_of_ones,
    is_written_cache,
)
from srt.test.kernels.properties import (
    E4M3,
    F32,
    FLOATS,
    Arguments,
    are_indices,
    is_dense,
    is_eps,
    is_table,
    is_vector,
    ones,
    overlaps_itself,
    rows_are_dense,
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
from srt.test.kernels.references import U, cos_sin, reference_rmsnorm, reference_rope

HEADS, ROWS = 4, 5
POSITIONS = 13  # of random calls


def fused_arguments(dtype: torch.dtype) -> Arguments:
    """What the two ops on a fused projection have in common."""
    return {
        "qkv": ones(T, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype),
        "positions": ones(T, dtype=torch.int64),
        "cos_sin_cache": ones(ROWS, 4),
        "is_neox": True,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "q_weight": ones(HEAD_DIM),
        "k_weight": ones(HEAD_DIM),
        "eps": 1e-6,
        "k_cache": cache_of_ones(dtype),
        "v_cache": cache_of_ones(dtype),
        "indices": torch.arange(T),
        "k_scale": 1.0,
        "v_scale": 1.0,
        "q_scale": ones(ROWS),
    }


def fused_is_allowed(arguments: Arguments) -> bool:
    """Whether queries, keys and values of a fused projection can be prepared."""
    qkv, table = arguments["qkv"], arguments["cos_sin_cache"]
    heads, kv_heads = arguments["num_heads"], arguments["num_kv_heads"]
    if not (are_caches(arguments) and is_dense(qkv, FLOATS, 2) and rows_are_dense(qkv)):
        return False
    k_cache, v_cache = arguments["k_cache"], arguments["v_cache"]
    head_dim, v_head_dim = k_cache.shape[2], v_cache.shape[2]
    tokens, width = qkv.shape
    q_scale = arguments["q_scale"]
    return (
        not overlaps_itself(qkv)
        and is_eps(arguments["eps"])
        and heads >= 0
        and kv_heads >= 0
        and width == heads * head_dim + kv_heads * (head_dim + v_head_dim)
        and is_written_cache(k_cache, kv_heads)
        and is_written_cache(v_cache, kv_heads)
        and is_table(table, head_dim)
        and are_indices(arguments["positions"], tokens, table.shape[0])
        and are_indices(arguments["indices"], tokens, k_cache.shape[0])
        and all(
            arguments[name] is None or is_vector(arguments[name], FLOATS, head_dim)
            for name in ("q_weight", "k_weight")
        )
        and (q_scale is None or is_vector(q_scale, (F32,), table.shape[0]))
    )


def fused_sample(*, quantized: bool, normed: bool) -> tuple[Any, ...]:
    """Three tokens of two query heads and one head of keys: the arguments of a sample call up to
    `indices`.
    """
    qkv, angles, weight = torch.randn(3, 32).half(), torch.rand(5, 8), torch.rand(8)
    at = torch.tensor([2, 0, 1])
    cache = torch.zeros(4, 1, 8).to(E4M3 if quantized else torch.float16)
    norms = (weight, weight, 1e-6) if normed else (None, None, 0.0)
    return (qkv, at, angles, True, 2, 1, *norms, cache, cache.clone(), at)


def _samples() -> list[tuple[Any, ...]]:
    plain = fused_sample(quantized=False, normed=False)
    return [
        plain,
        (*fused_sample(quantized=True, normed=True), 0.5, 2.0),
        (*plain, 1.0, 1.0, torch.rand(5)),
    ]


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


RECORDS: Records = {
    "fused_qk_norm_rope_store_cpu": OpRecord(
        samples=_samples,
        arguments=lambda dtype, _: fused_arguments(dtype),
        is_allowed=fused_is_allowed,
        calls=fused(),
    )
}
