"""Typed wrappers of the ops between a transformer's products.

Names, argument order and meaning are those of SGLang's CPU backend where it has the op; optional
arguments behind them are ours. T tokens; slots are the rows of the KV cache; `float` means float32,
bfloat16 or float16. Last dimensions have unit stride, all others may be strided, so slices of a
fused projection are taken as they are. Every op raises ``RuntimeError`` for a bad argument, before
anything is computed or written; the message names the op, the argument, what was expected and what
came. T = 0 does nothing.

Numerics: float32 inside, one rounding at the end. See docs/numerics.md.
"""

import torch
from torch import Tensor


def packed_embedding_cpu(
    indices: Tensor, weight: Tensor, is_vnni: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Rows of a token table: ``weight[indices]`` of the unpacked weight.

    With tied embeddings the packed lm_head is the only copy of the table; this is its lookup.

    Args:
        indices: [T] int64 or int32.
        weight: [N, K] bfloat16 or float16.
        is_vnni: packed by :func:`sgl_kernel.convert_weight_packed`, else row-major.
        out_dtype: float; weight's dtype when None.

    Returns:
        [T, K].
    """
    return torch.ops.sgl_kernel.packed_embedding_cpu(indices, weight, is_vnni, out_dtype)


def rmsnorm_cpu(
    input: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``input / sqrt(mean(input^2) + eps) * weight`` over the last dimension.

    Args:
        input: [..., N] float.
        weight: [N] float.
        eps: added to the mean square.
        out_dtype: float; input's dtype when None.

    Returns:
        A contiguous tensor of input's shape.
    """
    return torch.ops.sgl_kernel.rmsnorm_cpu(input, weight, eps, out_dtype)


def fused_add_rmsnorm_cpu(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += input``, then ``input = rmsnorm(residual)``, both in place.

    The norm is that of the float32 sum, before its rounding to residual's dtype.

    Args:
        input: [..., N] float.
        residual: of input's shape, of any of the dtypes.
        weight: [N] float.
        eps: added to the mean square.
    """
    torch.ops.sgl_kernel.fused_add_rmsnorm_cpu(input, residual, weight, eps)


def add_rmsnorm_cpu(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`fused_add_rmsnorm_cpu` that leaves input as it is.

    Args:
        input, residual, weight, eps: as there; only residual is written.
        out_dtype: float; input's dtype when None.

    Returns:
        The norm, contiguous, of input's shape.
    """
    return torch.ops.sgl_kernel.add_rmsnorm_cpu(input, residual, weight, eps, out_dtype)


def silu_and_mul_cpu(input: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``silu(input[..., :N]) * input[..., N:]``.

    Args:
        input: [..., 2 N] float.
        out_dtype: float; input's dtype when None.

    Returns:
        [..., N], contiguous.
    """
    return torch.ops.sgl_kernel.silu_and_mul_cpu(input, out_dtype)


def concat_columns_cpu(first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
    """The columns of several results side by side, copied. Unlike ``torch.cat`` it is recorded.

    Args:
        first: [M, N1] float; rows may be strided, in all of them.
        second: [M, N2] of the same dtype.
        third: [M, N3] of the same dtype, or None.

    Returns:
        [M, N1 + N2 + N3] of that dtype.
    """
    return torch.ops.sgl_kernel.concat_columns_cpu(first, second, third)


def topk_softmax_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The router of a mixture of experts: softmax over the experts, then the largest of them.

    Args:
        hidden_states: [M, K]; only M is looked at.
        gating_output: [M, experts] float.
        topk: 1 to experts.
        renormalize: divide the chosen weights by their sum.
        correction_bias: [experts] float, or None. Experts are chosen, and ordered, by probability
            plus bias; their weights are the probabilities without it.

    Returns:
        Weights [M, topk] float32 and expert indices [M, topk] int32, largest first; of equal
        ones the lower index first.
    """
    return torch.ops.sgl_kernel.topk_softmax_cpu(
        hidden_states, gating_output, topk, renormalize, correction_bias
    )


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
    return torch.ops.sgl_kernel.rotary_embedding_cpu(
        positions, query, key, head_size, cos_sin_cache, is_neox
    )


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
    return torch.ops.sgl_kernel.fused_qk_rmsnorm_cpu(q, k, q_weight, k_weight, eps)


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
    torch.ops.sgl_kernel.store_cache_cpu(k, v, k_cache, v_cache, indices, row_dim, k_scale, v_scale)


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
    torch.ops.sgl_kernel.fused_qk_norm_rope_store_cpu(
        qkv,
        positions,
        cos_sin_cache,
        is_neox,
        num_heads,
        num_kv_heads,
        q_weight,
        k_weight,
        eps,
        k_cache,
        v_cache,
        indices,
        k_scale,
        v_scale,
        q_scale,
    )
