"""Attention of grouped heads over a paged KV cache.

Names, argument order and meaning are those of SGLang's CPU backend where it has the op; optional
arguments behind ``logit_cap`` are ours. The body of an op is its fake kernel, see
:mod:`sgl_kernel.fakes`. Shapes: T new tokens, B requests; slots are the rows of the
caches; heads is a multiple of kv_heads, and query head h uses head ``h // (heads // kv_heads)`` of
the cache. `float` means float32, bfloat16 or float16. Last dimensions have unit stride, all others
may be strided.

The slot of a request's token j is ``req_to_token[req_pool_indices[request], j]``. Index tensors are
int64 or int32, and every index is checked against what it points into before anything is computed
or written: a bad one raises ``RuntimeError`` like every bad argument.

What a query sees: keys of its request up to its own. ``sliding_window`` > 0 leaves it that many,
its own included. Scores are ``q . k * sm_scale``, with ``logit_cap`` > 0 then
``logit_cap * tanh(score / logit_cap)``. ``sinks`` [heads] float are scores that take their share
of the softmax and add no value. Caches are float or float8_e4m3fn [slots, kv_heads, head_dim], and
what they hold is multiplied by ``k_scale`` and ``v_scale``. The size of a value's head may differ,
and values may lie in the keys (``v_cache = k_cache[..., :512]``, as MLA has it).

Numerics: float32 inside, one rounding at the end. A token's output has the same bits alone and in a
batch, for every number of threads, in decode_attention_cpu and in extend_attention_cpu with
whatever other new tokens. See docs/numerics.md.
"""

from torch import Tensor

from sgl_kernel._op import op

__all__ = [
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fused_qkv_attention_cpu",
]


@op
def decode_attention_cpu(
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
    """Attention of one new token for each of B requests.

    Args:
        query: [B, heads, head_dim] float.
        k_cache, v_cache: see above.
        output: [B, heads, v_head_dim] float; is written.
        key, value, loc: [B, kv_heads, head_dim], [B, kv_heads, v_head_dim] and [B] slots: stored
            in the caches first. All three None: the caches hold them already.
        attn_logits: not used; SGLang's scratch.
        req_to_token: [requests, max_context_len] slots.
        req_pool_indices: [B] rows of req_to_token.
        seq_lens: [B] tokens of each request, the new one included; 0 is padding and gives zeros.
        sm_scale, logit_cap, sliding_window, sinks, k_scale, v_scale: see above.
    """


@op
def extend_attention_cpu(
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
    """Attention of the new tokens of each request, the last ones of its sequence.

    Args:
        q_extend: [T, heads, head_dim] float.
        k_extend, v_extend: [T, kv_heads, head_dim] and [T, kv_heads, v_head_dim] float: keys and
            values of the new tokens; the caches are read for the tokens before them only. Both
            None: the caches hold the new tokens, too.
        o_extend: [T, heads, v_head_dim] float; the rows of new tokens are written.
        k_buffer, v_buffer: the caches, see above.
        req_to_token: [requests, max_context_len] slots.
        req_pool_indices: [B] rows of req_to_token.
        seq_lens: [B] tokens of each request, the new ones included.
        extend_seq_lens: [B] new tokens. One new token of a request of length 0 is padding and gives
            zeros.
        extend_start_loc: [B] row of a request's first new token in q_extend and o_extend.
        max_len_extend: the largest of extend_seq_lens, or more.
        sm_scale, logit_cap, sliding_window, sinks, k_scale, v_scale: see above.
    """


@op
def fused_qkv_attention_cpu(
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
    """A layer's attention from the fused projection on, in one call: head norms, rotation, storing
    keys and values, attention. It decodes where every request has one new token, else it extends.

    Args:
        qkv, positions, cos_sin_cache, is_neox, num_heads, num_kv_heads, q_weight, k_weight, eps,
        k_cache, v_cache, indices: as in :func:`sgl_kernel.fused_qk_norm_rope_store_cpu`; the
            queries in qkv are overwritten.
        req_to_token: [requests, max_context_len] slots.
        req_pool_indices: [B] rows of req_to_token.
        seq_lens: [B] tokens of each request, the new ones included. One new token of a request of
            length 0 is padding and gives zeros; it is stored at its index like any other.
        extend_seq_lens: [B] new tokens, T in all, request after request in qkv. None: one each,
            B = T.
        sm_scale, logit_cap, sliding_window, sinks, k_scale, v_scale: see above.
        q_scale: as in :func:`sgl_kernel.fused_qk_norm_rope_store_cpu`.

    Returns:
        [T, num_heads * v_head_dim] of qkv's dtype.
    """
    return qkv.new_empty((qkv.shape[0], num_heads * v_cache.shape[2]))
