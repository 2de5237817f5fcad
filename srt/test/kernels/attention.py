"""The attention ops over a paged cache: sample calls and contracts. Their random calls are in
attention_calls.py.
"""

from typing import Any

import torch
from torch import Tensor

from srt.test.kernels.attention_calls import DECODE, EXTEND, FUSED, attentions
from srt.test.kernels.fused_qkv import HEADS, fused_arguments, fused_is_allowed, fused_sample
from srt.test.kernels.kv_cache import (
    HEAD_DIM,
    KV_HEADS,
    T,
    are_caches,
    cache_of_ones,
    is_written_cache,
)
from srt.test.kernels.properties import (
    E4M3,
    FLOATS,
    INDICES,
    Arguments,
    are_heads,
    are_indices,
    head_count,
    is_dense,
    is_eps,
    is_number,
    is_vector,
    ones,
    overlaps_itself,
    rows_are_dense,
)
from srt.test.kernels.record import OpRecord, Records

CONTEXT, REQUESTS = 5, 3


def _requests() -> Arguments:
    """What all three ops have in common; one new token a request."""
    return {
        "req_to_token": ones(REQUESTS, CONTEXT, dtype=torch.int64),
        "req_pool_indices": torch.arange(REQUESTS),
        "seq_lens": ones(REQUESTS, dtype=torch.int64),
        "sm_scale": 0.5,
        "logit_cap": 1.0,
        "sliding_window": 2,
        "sinks": ones(HEADS),
        "k_scale": 1.0,
        "v_scale": 1.0,
    }


def _decode_arguments(dtype: torch.dtype, _: torch.dtype) -> Arguments:
    q = ones(T, HEADS, HEAD_DIM, dtype=dtype)
    k = ones(T, KV_HEADS, HEAD_DIM, dtype=dtype)
    return {
        "query": q,
        "k_cache": cache_of_ones(dtype),
        "v_cache": cache_of_ones(dtype),
        "output": q.clone(),
        "key": k,
        "value": k.clone(),
        "loc": torch.arange(T),
        "attn_logits": None,
        **_requests(),
    }


def _extend_arguments(dtype: torch.dtype, _: torch.dtype) -> Arguments:
    q = ones(T, HEADS, HEAD_DIM, dtype=dtype)
    k = ones(T, KV_HEADS, HEAD_DIM, dtype=dtype)
    return {
        "q_extend": q,
        "k_extend": k,
        "v_extend": k.clone(),
        "o_extend": q.clone(),
        "k_buffer": cache_of_ones(dtype),
        "v_buffer": cache_of_ones(dtype),
        "extend_seq_lens": ones(REQUESTS, dtype=torch.int64),
        "extend_start_loc": torch.arange(REQUESTS),
        "max_len_extend": 2,
        **_requests(),
    }


def _fused_arguments(dtype: torch.dtype, _: torch.dtype) -> Arguments:
    lengths = {"extend_seq_lens": ones(REQUESTS, dtype=torch.int64)}
    return {**fused_arguments(dtype), **_requests(), **lengths}


def _requests_are_allowed(
    arguments: Arguments,
    tokens: int,
    slots: int,
    heads: int,
    kv_heads: int,
    lengths: list[int],
    starts: list[int],
    stored: bool,
) -> bool:
    """All about requests and scores; `lengths` and `starts` are those of their new tokens, whose
    keys are in the cache if they are `stored`.
    """
    table, pool, seq_lens = (
        arguments[name] for name in ("req_to_token", "req_pool_indices", "seq_lens")
    )
    sinks, count = arguments["sinks"], len(lengths)
    if not (
        heads >= 1
        and kv_heads >= 1
        and heads % kv_heads == 0
        and is_eps(arguments["logit_cap"])
        and is_number(arguments["sm_scale"])
        and (sinks is None or is_vector(sinks, FLOATS, heads))
        and is_dense(table, INDICES, 2)
        and rows_are_dense(table)
        and are_indices(pool, count, table.shape[0])
        and are_indices(seq_lens, count, table.shape[1] + 1)
    ):
        return False
    window = arguments["sliding_window"]
    for row, total, new, start in zip(
        pool.tolist(), seq_lens.tolist(), lengths, starts, strict=True
    ):
        if new > max(1, total) or start > tokens - new:
            return False
        if new == 0:
            continue
        end = total - new + 1
        seen = table[
            row, max(0, end - window) if window > 0 else 0 : total if stored else total - new
        ]
        if ((seen < 0) | (seen >= slots)).any():
            return False
    return True


def _are_queries(q: Tensor | None, out: Tensor | None, head_dim: int, v_head_dim: int) -> bool:
    if q is None or out is None or not (is_dense(q, FLOATS, 3) and is_dense(out, FLOATS, 3)):
        return False
    return (
        q.shape[2] == head_dim
        and out.shape == (*q.shape[:2], v_head_dim)
        and rows_are_dense(q)
        and rows_are_dense(out)
        and not overlaps_itself(out)
    )


def _decode_is_allowed(arguments: Arguments) -> bool:
    q, k_cache, v_cache = (arguments[name] for name in ("query", "k_cache", "v_cache"))
    new = [arguments[name] for name in ("key", "value", "loc")]
    if not (
        are_caches(arguments)
        and rows_are_dense(k_cache)
        and rows_are_dense(v_cache)
        and k_cache.shape[1] == v_cache.shape[1]
        and _are_queries(q, arguments["output"], k_cache.shape[2], v_cache.shape[2])
        and _requests_are_allowed(
            arguments, len(q), k_cache.shape[0], q.shape[1], k_cache.shape[1],
            [1] * len(q), [*range(len(q))], stored=True,
        )
    ):  # fmt: skip
        return False
    if all(x is None for x in new):
        return True
    key, value, loc = new
    return (
        are_heads(key, k_cache.shape[2], FLOATS, 3)
        and are_heads(value, v_cache.shape[2], FLOATS, 3)
        and len(key) == len(value) == len(q)
        and are_indices(loc, len(q), k_cache.shape[0])
        and is_written_cache(k_cache, head_count(key, k_cache.shape[2]))
        and is_written_cache(v_cache, head_count(value, v_cache.shape[2]))
    )


def _extend_is_allowed(arguments: Arguments) -> bool:
    q, k, v = (arguments[name] for name in ("q_extend", "k_extend", "v_extend"))
    k_cache, v_cache = arguments["k_buffer"], arguments["v_buffer"]
    lengths, starts = arguments["extend_seq_lens"], arguments["extend_start_loc"]
    most = max(0, arguments["max_len_extend"])
    if not (
        are_caches({**arguments, "k_cache": k_cache, "v_cache": v_cache})
        and rows_are_dense(k_cache)
        and rows_are_dense(v_cache)
        and k_cache.shape[1] == v_cache.shape[1]
        and _are_queries(q, arguments["o_extend"], k_cache.shape[2], v_cache.shape[2])
        and (k is None) == (v is None)
        and is_dense(lengths, INDICES, 1)
        and are_indices(lengths, len(lengths), most + 1)
        and are_indices(starts, len(lengths), len(q) + 1)
    ):
        return False
    for x, cache in ((k, k_cache), (v, v_cache)):
        if x is not None and not (
            is_dense(x, FLOATS, 3) and x.shape == (len(q), *cache.shape[1:]) and rows_are_dense(x)
        ):
            return False
    rows = [
        start + i
        for start, new in zip(starts.tolist(), lengths.tolist(), strict=True)
        for i in range(new)
    ]
    if len(set(rows)) < len(rows):
        return False
    return _requests_are_allowed(
        arguments, len(q), k_cache.shape[0], q.shape[1], k_cache.shape[1],
        lengths.tolist(), starts.tolist(), stored=k is None,
    )  # fmt: skip


def _fused_is_allowed(arguments: Arguments) -> bool:
    if not fused_is_allowed(arguments):
        return False
    tokens, extend = len(arguments["qkv"]), arguments["extend_seq_lens"]
    lengths = [1] * tokens
    if extend is not None:
        if not (is_dense(extend, INDICES, 1) and are_indices(extend, len(extend), tokens + 1)):
            return False
        lengths = extend.tolist()
        if sum(lengths) != tokens:
            return False
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return _requests_are_allowed(
        arguments, tokens, arguments["k_cache"].shape[0], arguments["num_heads"],
        arguments["num_kv_heads"], lengths, starts, stored=True,
    )  # fmt: skip


def _pool() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the sample calls: slots of three rows; requests of the first two rows and their lengths;
    the first row alone.
    """
    table = torch.tensor([[2, 0, 1, 3], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    return table, torch.tensor([0, 1]), torch.tensor([4, 1]), torch.tensor([0])


def _options() -> tuple[Any, ...]:
    """Every argument behind `sm_scale` that has a default."""
    return 20.0, 3, torch.rand(2).half(), 0.5, 2.0


def _decode_samples() -> list[tuple[Any, ...]]:
    heads, at = torch.randn(2, 4, 8).half(), torch.tensor([2, 0])
    q, k, v = heads[:, :2], heads[:, 2:3], heads[:, 3:]
    table, rows, lengths, _ = _pool()
    cache, codes = torch.zeros(4, 1, 8).half(), torch.zeros(4, 1, 8).to(E4M3)
    requests = (table, rows, lengths, 0.5)
    return [
        (q, cache, cache.clone(), q + 0, None, None, None, None, *requests, 0.0),
        (q, codes, codes.clone(), q + 0, k, v, at, torch.randn(3, 8), *requests, *_options()),
    ]


def _extend_samples() -> list[tuple[Any, ...]]:
    heads = torch.randn(3, 4, 8).half()
    q, k, v = heads[:, :2], heads[:, 2:3], heads[:, 3:]
    table, _, lengths, one = _pool()
    cache, codes = torch.zeros(4, 1, 8).half(), torch.zeros(4, 1, 8).to(E4M3)
    requests = (table, one, lengths[:1], lengths[:1] - 1, one, 3, 0.5)
    return [
        (q, None, None, q + 0, cache, cache.clone(), *requests, 0.0),
        (q, k, v, q + 0, codes, codes.clone(), *requests, *_options()),
    ]


def _fused_samples() -> list[tuple[Any, ...]]:
    table, _, lengths, one = _pool()
    decode = (table, torch.tensor([2, 0, 1]), torch.tensor([4, 0, 1]), None, 0.5)
    extend = (table, one, lengths[:1], lengths[:1] - 1, 0.5)
    return [
        (*fused_sample(quantized=False, normed=False), *decode),
        (*fused_sample(quantized=True, normed=True), *extend, *_options(), torch.rand(5)),
    ]


RECORDS: Records = {
    DECODE: OpRecord(_decode_samples, _decode_arguments, _decode_is_allowed, attentions(DECODE)),
    EXTEND: OpRecord(_extend_samples, _extend_arguments, _extend_is_allowed, attentions(EXTEND)),
    FUSED: OpRecord(_fused_samples, _fused_arguments, _fused_is_allowed, attentions(FUSED)),
}
