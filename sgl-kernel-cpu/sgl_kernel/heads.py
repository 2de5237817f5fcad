"""Ops on heads of queries, keys and values: rotation, head norms, storing into the KV cache.

T tokens; slots are the rows of the KV cache. All else that the ops have in common is told in
:mod:`sgl_kernel.transformer`.
"""

from torch import Tensor

from sgl_kernel._op import op

__all__ = [
    "fused_qk_norm_rope_store_cpu",
    "fused_qk_rmsnorm_cpu",
    "rotary_embedding_cpu",
    "store_cache_cpu",
]


@op
def rotary_embedding_cpu(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys.

    As in SGLang, a [T, heads, head_size] query and key stay as they are, while those of the other
    forms are rotated in place, too.

    Args:
        positions: [T] int64 or int32, rows of cos_sin_cache; [B * S] for 4-D queries.
        query: [T, heads * head_size], [T, heads, head_size] or [B, S, heads, head_size] float.
        key: as query, of the same rank and dtype.
        head_size: size of a head.
        cos_sin_cache: [max_position, rotary_dim] float: cosines, then sines, of rotary_dim / 2
            angles. rotary_dim is at most head_size; what is behind it in a head stays as it is.
        is_neox: rotate pairs ``(i, i + rotary_dim / 2)``, else ``(2 i, 2 i + 1)``.

    Returns:
        The rotated query and key, contiguous, of their shapes and dtype.
    """
    return query.new_empty(query.shape), key.new_empty(key.shape)


@op
def fused_qk_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Norm of each query and each key head, as Qwen3 has it.

    Args:
        q: [T, heads * N], [T, heads, N] or [B, S, heads, N] float, N the size of q_weight.
        k: as q with k_weight, of the same dtype.
        q_weight, k_weight: [N] float. With N = q.shape[1] the norm is over the whole row.
        eps: added to the mean square.

    Returns:
        The normalised q and k, contiguous, of their shapes and dtype.
    """
    return q.new_empty(q.shape), k.new_empty(k.shape)


@op
def store_cache_cpu(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    row_dim: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """``k_cache[indices] = k / k_scale`` and ``v_cache[indices] = v / v_scale``.

    Into float8_e4m3fn finite numbers beyond 448 saturate, infinities become NaN. Of rows with the
    same index one remains, which one is not specified.

    What is FP8 already is stored as it is, bit for bit: float8_e4m3fn or uint8 (codes of any 8-bit
    format) into a cache of float8_e4m3fn or uint8, with a scale of 1.

    Args:
        k: [T, heads, head_dim] or [T, heads * head_dim] float, float8_e4m3fn or uint8.
        v: the same with v_cache's head_dim.
        k_cache: [slots, heads, head_dim] float or float8_e4m3fn; uint8 for FP8 k.
        v_cache: [slots, heads, v_head_dim], the same.
        indices: [T] int64 or int32, slots.
        row_dim: heads * head_dim, or None.
        k_scale, v_scale: what the cached numbers are multiplied by when they are read.
    """


@op
def fused_qk_norm_rope_store_cpu(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_scale: Tensor | None = None,
) -> None:
    """All that happens between the fused projection and attention, in one call.

    Queries are normalised (with q_weight) and rotated in place in qkv; keys are normalised (with
    k_weight), rotated and stored in k_cache; values are stored in v_cache. Keys and values in qkv
    stay as they are. Each number is rounded once, at its end.

    Args:
        qkv: [T, num_heads * head_dim + num_kv_heads * (head_dim + v_head_dim)] float.
        positions, cos_sin_cache, is_neox: as in :func:`rotary_embedding_cpu`.
        num_heads, num_kv_heads: heads of the queries, and of keys and values.
        q_weight, k_weight, eps: as in :func:`fused_qk_rmsnorm_cpu`, or None: no norm.
        k_cache, v_cache, indices, k_scale, v_scale: as in :func:`store_cache_cpu`.
        q_scale: [max_position] float32, by which the queries at a position are multiplied after
            the rotation (Llama 4, Ministral 3), or None.
    """
