"""Fake kernels of the attention ops; see _fakes.py."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor | None,
    attn_logits: Tensor | None,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    pass


def _extend_attention_cpu(
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    pass


def _fused_qkv_attention_cpu(
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
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor | None,
    sm_scale: float,
    logit_cap: float = 0.0,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_scale: Tensor | None = None,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads * v_cache.shape[2]))


ATTENTION_FAKES: dict[str, Callable[..., Any]] = {
    "decode_attention_cpu": _decode_attention_cpu,
    "extend_attention_cpu": _extend_attention_cpu,
    "fused_qkv_attention_cpu": _fused_qkv_attention_cpu,
}
