"""The contracts of the attention ops, in Python."""

import torch
from torch import Tensor

from srt.test.kernel_contract_checks import (
    FLOATS,
    INDICES,
    Arguments,
    are_indices,
    is_dense,
    is_eps,
    is_number,
    is_vector,
    ones,
    overlaps_itself,
    rows_are_dense,
)
from srt.test.kernel_contracts_heads import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    T,
    are_caches,
    are_heads,
    cache_of_ones,
    fused_arguments,
    fused_is_allowed,
    head_count,
    is_written_cache,
)

CONTEXT, REQUESTS = 5, 3


def attention_arguments(op: str, dtype: torch.dtype) -> Arguments:
    """A call that the op accepts."""
    q = ones(T, HEADS, HEAD_DIM, dtype=dtype)
    k = ones(T, KV_HEADS, HEAD_DIM, dtype=dtype)
    requests: Arguments = {
        "req_to_token": ones(REQUESTS, CONTEXT, dtype=torch.int64),
        "req_pool_indices": torch.arange(REQUESTS),
        "seq_lens": ones(REQUESTS, dtype=torch.int64),
        "sm_scale": 0.5,
        "logit_cap": 1.0,
        "sliding_window": 2,
        "sinks": ones(HEADS),
    }
    if op == "fused_qkv_attention_cpu":
        lengths = {"extend_seq_lens": ones(REQUESTS, dtype=torch.int64)}
        return {**fused_arguments(dtype), **requests, **lengths}
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    if op == "decode_attention_cpu":
        return {
            "query": q,
            "k_cache": cache_of_ones(dtype),
            "v_cache": cache_of_ones(dtype),
            "output": q.clone(),
            "key": k,
            "value": k.clone(),
            "loc": torch.arange(T),
            "attn_logits": None,
            **requests,
            **scales,
        }
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
        **requests,
        **scales,
    }


def _requests_are_allowed(
    arguments: Arguments,
    tokens: int,
    slots: int,
    heads: int,
    kv_heads: int,
    lengths: list[int],
    starts: list[int],
    fresh: bool,
) -> bool:
    """All about requests and scores; `lengths` and `starts` are those of their new tokens."""
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
        seen = table[row, max(0, end - window) if window > 0 else 0 : total - new * fresh]
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
            [1] * len(q), [*range(len(q))], fresh=False,
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
        lengths.tolist(), starts.tolist(), fresh=k is not None,
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
        arguments["num_kv_heads"], lengths, starts, fresh=False,
    )  # fmt: skip


def attention_is_allowed(op: str, arguments: Arguments) -> bool:
    """Whether the op takes these arguments."""
    allowed = {
        "decode_attention_cpu": _decode_is_allowed,
        "extend_attention_cpu": _extend_is_allowed,
        "fused_qkv_attention_cpu": _fused_is_allowed,
    }
    return allowed[op](arguments)
