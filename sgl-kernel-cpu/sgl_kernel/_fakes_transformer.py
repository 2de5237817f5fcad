"""Fake kernels of the ops between a transformer's products; see _fakes.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _rmsnorm_cpu(
    input: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    return _contiguous_like(input, out_dtype)


def _fused_add_rmsnorm_cpu(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    pass


def _add_rmsnorm_cpu(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return _contiguous_like(input, out_dtype)


def _packed_embedding_cpu(
    indices: Tensor, weight: Tensor, is_vnni: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    shape = (indices.shape[0], weight.shape[1])
    return weight.new_empty(shape, dtype=out_dtype or weight.dtype)


def _silu_and_mul_cpu(input: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    return input.new_empty(shape, dtype=out_dtype or input.dtype)


def _concat_columns_cpu(first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
    columns = first.shape[1] + second.shape[1] + (0 if third is None else third.shape[1])
    return first.new_empty((first.shape[0], columns))


def _topk_softmax_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (gating_output.shape[0], topk)
    return (
        gating_output.new_empty(shape, dtype=torch.float32),
        gating_output.new_empty(shape, dtype=torch.int32),
    )


def _rotary_embedding_cpu(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    return _contiguous_like(query), _contiguous_like(key)


def _fused_qk_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _contiguous_like(q), _contiguous_like(k)


def _store_cache_cpu(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    row_dim: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    pass


def _fused_qk_norm_rope_store_cpu(
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
    pass


TRANSFORMER_FAKES: dict[str, Callable[..., Any]] = {
    "rmsnorm_cpu": _rmsnorm_cpu,
    "fused_add_rmsnorm_cpu": _fused_add_rmsnorm_cpu,
    "add_rmsnorm_cpu": _add_rmsnorm_cpu,
    "packed_embedding_cpu": _packed_embedding_cpu,
    "concat_columns_cpu": _concat_columns_cpu,
    "silu_and_mul_cpu": _silu_and_mul_cpu,
    "topk_softmax_cpu": _topk_softmax_cpu,
    "rotary_embedding_cpu": _rotary_embedding_cpu,
    "fused_qk_rmsnorm_cpu": _fused_qk_rmsnorm_cpu,
    "store_cache_cpu": _store_cache_cpu,
    "fused_qk_norm_rope_store_cpu": _fused_qk_norm_rope_store_cpu,
}
