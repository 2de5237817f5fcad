"""Random calls of the attention ops over a paged cache."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close
from srt.test.kernels.properties import E4M3, FLOATS
from srt.test.kernels.record import (
    INDEX_DTYPES,
    SEEDS,
    check_margins,
    margins,
    rows_in_nan,
    sizes,
)
from srt.test.kernels.references import cos_sin, reference_attention

DECODE, EXTEND, FUSED = "decode_attention_cpu", "extend_attention_cpu", "fused_qkv_attention_cpu"
CONTEXT, ROWS = 200, 7


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention op; requests lie anywhere in a pool of slots."""

    op: str
    requests: tuple[tuple[int, int], ...]  # tokens of each, and new ones among them
    kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    values_in_keys: bool  # as latent attention has them
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scales: tuple[float, float]
    with_keys: bool  # keys and values come with the call
    sm_scale: float
    logit_cap: float
    sliding_window: int
    sinks_dtype: torch.dtype | None
    index_dtype: torch.dtype
    table_dtype: torch.dtype
    margin: tuple[int, int]
    seed: int

    def check(self, tier: str) -> None:
        """Compare with float64, request by request."""
        torch.manual_seed(self.seed)
        ops: Any = sgl_kernel  # their arguments come in pieces here
        slots = ROWS * CONTEXT
        table = torch.randperm(slots).view(ROWS, CONTEXT)
        rows = torch.randperm(ROWS)[: len(self.requests)]
        k_cache, v_cache = self._caches(slots)
        k_scale, v_scale = self.scales
        heads, tokens = self.kv_heads * self.group, sum(new for _, new in self.requests)
        sinks = None
        if self.sinks_dtype is not None:
            sinks = (torch.randn(heads) * 3).to(self.sinks_dtype)
        options = (
            self.sm_scale,
            self.logit_cap,
            self.sliding_window,
            sinks,
            k_scale,
            v_scale,
        )
        lengths = torch.tensor([length for length, _ in self.requests]).to(self.index_dtype)
        new = torch.tensor([new for _, new in self.requests]).to(self.index_dtype)
        requests = (table.to(self.table_dtype), rows.to(self.index_dtype), lengths)
        q_buffer, q = rows_in_nan((tokens, heads, self.head_dim), self.dtype, self.margin)
        q.copy_(torch.randn(q.shape))
        out_buffer, out = rows_in_nan((tokens, heads, self.v_head_dim), self.dtype, self.margin)
        # Slots of the new tokens; padding has one of its own.
        spare = table[next(row for row in range(ROWS) if row not in rows.tolist())]
        of_tokens = [
            table[row, length - count : length] if length else spare[i : i + count]
            for i, (row, (length, count)) in enumerate(
                zip(rows.tolist(), self.requests, strict=True)
            )
        ]
        places = torch.cat([*of_tokens, torch.empty(0, dtype=torch.int64)]).to(self.index_dtype)
        key, value = (
            torch.randn(tokens, self.kv_heads, d).to(self.dtype)
            for d in (self.head_dim, self.v_head_dim)
        )
        if self.values_in_keys:
            value = key[..., : self.v_head_dim]
        if self.op == DECODE:
            extra: tuple[Any, ...] = (
                (key, value, places, None) if self.with_keys else (None, None, None, None)
            )
            ops.decode_attention_cpu(q, k_cache, v_cache, out, *extra, *requests, *options)
        elif self.op == EXTEND:
            k, v = (key, value) if self.with_keys else (None, None)
            starts = new.cumsum(0).to(self.index_dtype) - new
            ops.extend_attention_cpu(
                q, k, v, out, k_cache, v_cache, *requests, new, starts, CONTEXT, *options
            )
        else:
            qkv = torch.cat([q.flatten(1), key.flatten(1), value.flatten(1)], 1)
            angles, positions = cos_sin(CONTEXT, 2 * (self.head_dim // 2)), torch.arange(tokens)
            prepared = (
                positions,
                angles,
                True,
                heads,
                self.kv_heads,
                None,
                None,
                0.0,
            )
            # The step before attention has a fuzz of its own, and gives attention its inputs here.
            parts, caches = qkv.clone(), [k_cache.clone(), v_cache.clone()]
            ops.fused_qk_norm_rope_store_cpu(
                parts, *prepared, caches[0], caches[1], places, k_scale, v_scale
            )
            decodes = all(count == 1 for _, count in self.requests) and not self.with_keys
            got = ops.fused_qkv_attention_cpu(
                qkv, *prepared, k_cache, v_cache, places, *requests, None if decodes else new,
                *options,
            )  # fmt: skip
            assert torch.equal(qkv, parts)
            for cache, stored in zip((k_cache, v_cache), caches, strict=True):
                assert torch.equal(cache.float().nan_to_num(-1), stored.float().nan_to_num(-1))
            q, out = parts[:, : heads * self.head_dim].view(q.shape), got.view(out.shape)
        if self.op != FUSED:
            check_margins(q_buffer, q)
            check_margins(out_buffer, out)

        begin = 0
        for row, (length, count) in zip(rows.tolist(), self.requests, strict=True):
            mine = slice(begin, begin + count)
            begin += count
            if length == 0:
                assert (out[mine] == 0).all(), tier
                continue
            seen = table[row, :length]
            k, v = k_cache[seen].double() * k_scale, v_cache[seen].double() * v_scale
            if self.op == EXTEND and self.with_keys:
                k[length - count :], v[length - count :] = key[mine].double(), value[mine].double()
            expected, bound = reference_attention(
                q[mine], k, v, self.sm_scale, self.logit_cap, self.sliding_window, sinks
            )
            check_close(out[mine], expected, bound, tier)

    def _caches(self, slots: int) -> tuple[Tensor, Tensor]:
        size = (slots, self.kv_heads, max(self.head_dim, self.v_head_dim))
        k = torch.randn(size)[..., : self.head_dim].to(self.cache_dtype)
        if self.values_in_keys:
            return k, k[..., : self.v_head_dim]
        return k, torch.randn(size)[..., : self.v_head_dim].to(self.cache_dtype)


@st.composite
def attentions(draw: st.DrawFn, op: str) -> AttentionCall:
    """Calls of the op."""
    decodes = op == DECODE or (op == FUSED and draw(st.booleans()))
    requests = []
    for _ in range(draw(st.integers(0, 4))):
        length = draw(sizes(0, CONTEXT))
        if decodes or length == 0:
            requests.append((length, 1))
        else:
            requests.append((length, draw(st.integers(0, min(length, 100)))))
    head_dim = draw(sizes(1, 100))
    # What is stored by the call has its own place for values.
    in_keys = op == EXTEND and draw(st.booleans())
    cache_dtype = draw(st.sampled_from((*FLOATS, E4M3)))
    factors = st.sampled_from((0.3, 1.7) if cache_dtype == E4M3 else (1.0,))
    return AttentionCall(
        op=op,
        requests=tuple(requests),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        head_dim=head_dim,
        v_head_dim=draw(st.integers(1, head_dim)) if in_keys else draw(sizes(1, 100)),
        values_in_keys=in_keys,
        dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype=cache_dtype,
        scales=(draw(factors), draw(factors)),
        with_keys=draw(st.booleans()),
        sm_scale=draw(st.sampled_from((1.0, 0.25, head_dim**-0.5))),
        logit_cap=draw(st.sampled_from((0.0, 5.0, 30.0))),
        sliding_window=draw(st.sampled_from((0, 1, 17, 64, 70))),
        sinks_dtype=draw(st.sampled_from((None, *FLOATS))),
        index_dtype=draw(INDEX_DTYPES),
        table_dtype=draw(INDEX_DTYPES),
        margin=draw(margins()),
        seed=draw(SEEDS),
    )
