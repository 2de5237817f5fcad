"""The contracts of the ops between projections and attention, in Python."""

import torch
from torch import Tensor

from srt.test.kernel_contract_checks import (
    E4M3,
    F32,
    FLOATS,
    Arguments,
    are_indices,
    is_dense,
    is_eps,
    is_scale,
    is_vector,
    ones,
    overlaps_itself,
    rows_are_dense,
)

T, HEADS, KV_HEADS, HEAD_DIM, SLOTS, POSITIONS = 3, 4, 2, 6, 7, 5


def cache_of_ones(dtype: torch.dtype) -> Tensor:
    """A cache of one kind of heads."""
    return ones(SLOTS, KV_HEADS, HEAD_DIM, dtype=dtype)


def fused_arguments(dtype: torch.dtype) -> Arguments:
    """What the two ops on a fused projection share."""
    return {
        "qkv": ones(T, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype),
        "positions": ones(T, dtype=torch.int64),
        "cos_sin_cache": ones(POSITIONS, 4),
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
        "q_scale": ones(POSITIONS),
    }


def head_arguments(op: str, dtype: torch.dtype) -> Arguments:
    """A call that the op accepts."""
    q, k = ones(T, HEADS, HEAD_DIM, dtype=dtype), ones(T, KV_HEADS, HEAD_DIM, dtype=dtype)
    if op == "rotary_embedding_cpu":
        return {
            "positions": ones(T, dtype=torch.int64),
            "query": q,
            "key": k,
            "head_size": HEAD_DIM,
            "cos_sin_cache": ones(POSITIONS, 4),
            "is_neox": True,
        }
    if op == "fused_qk_rmsnorm_cpu":
        return {
            "q": q,
            "k": k,
            "q_weight": ones(HEAD_DIM),
            "k_weight": ones(HEAD_DIM),
            "eps": 1e-6,
        }
    if op == "fused_qk_norm_rope_store_cpu":
        return fused_arguments(dtype)
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


def are_heads(x: Tensor | None, head_dim: int, dtypes: tuple[torch.dtype, ...], most: int) -> bool:
    """[T, heads * head_dim] and so on, of at most that many dimensions."""
    if x is None or not (is_dense(x, dtypes, *range(2, most + 1)) and rows_are_dense(x)):
        return False
    return x.shape[1] % head_dim == 0 if x.dim() == 2 else x.shape[-1] == head_dim


def head_count(x: Tensor, head_dim: int) -> int:
    """Heads of what `are_heads` accepts."""
    return x.shape[1] // head_dim if x.dim() == 2 else x.shape[-2]


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


def _is_table(table: Tensor | None, head_dim: int) -> bool:
    if table is None or not (is_dense(table, FLOATS, 2) and rows_are_dense(table)):
        return False
    return table.shape[1] % 2 == 0 and table.shape[1] <= head_dim


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
        and _is_table(table, head_dim)
        and are_indices(arguments["positions"], tokens, table.shape[0])
        and are_indices(arguments["indices"], tokens, k_cache.shape[0])
        and all(
            arguments[name] is None or is_vector(arguments[name], FLOATS, head_dim)
            for name in ("q_weight", "k_weight")
        )
        and (q_scale is None or is_vector(q_scale, (F32,), table.shape[0]))
    )


def heads_are_allowed(op: str, arguments: Arguments) -> bool:
    """Whether the op takes these arguments."""
    if op == "store_cache_cpu":
        return _store_is_allowed(arguments)
    if op == "fused_qk_norm_rope_store_cpu":
        return fused_is_allowed(arguments)
    if op == "fused_qk_rmsnorm_cpu":
        weights = [arguments["q_weight"], arguments["k_weight"]]
        if not all(
            is_dense(w, FLOATS, 1) and w.shape[0] >= 1 and w.is_contiguous() for w in weights
        ):
            return False
        sizes = [w.shape[0] for w in weights]
        return is_eps(arguments["eps"]) and _are_pairs(
            arguments["q"], sizes[0], arguments["k"], sizes[1]
        )
    query, key, size = arguments["query"], arguments["key"], arguments["head_size"]
    table = arguments["cos_sin_cache"]
    return (
        size >= 1
        and _are_pairs(query, size, key, size)
        and query.dim() == key.dim()
        and (query.dim() == 3 or not (overlaps_itself(query) or overlaps_itself(key)))
        and _is_table(table, size)
        and are_indices(arguments["positions"], _token_sizes(query).numel(), table.shape[0])
    )
