"""Grouped-query attention over the KV cache, registered as the operator `srt::attention`.

The operator is opaque to torch.compile: the lengths of the requests change with every step, and
code specialised to them would be compiled anew each time.

Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form is attention with one KV head
whose value is the first part of its key, so a cache without values holds each token once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.model_executor.forward_batch_info import ForwardBatch

# Elements of the scores that one product holds at a time; longer prompts go query block by block.
_MAX_SCORES = 1 << 24

_library = torch.library.Library("srt", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, "
    "Tensor out_cache_loc, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, "
    "float scale, int v_head_dim, int? sliding_window) -> Tensor"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    out_cache_loc: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    scale: float,
    v_head_dim: int,
    sliding_window: int | None,
) -> Tensor:
    """Stores keys and values of the new tokens, then attends causally to all tokens of each
    request.

    Args:
        q: `[T, num_heads, head_dim]`.
        k: `[T, num_kv_heads, head_dim]`.
        v: `[T, num_kv_heads, v_head_dim]`, or None where the values are the first `v_head_dim`
            columns of the keys.
        k_cache: `[slots, num_kv_heads, head_dim]`, written at `out_cache_loc`.
        v_cache: `[slots, num_kv_heads, v_head_dim]`, or None as `v` is.
        out_cache_loc: As the rest, see :class:`ForwardBatch`.
        req_to_token: `[rows, max_context_len]` int32.
        req_pool_indices: `[B]`.
        seq_lens: `[B]`.
        extend_seq_lens: `[B]`.
        scale: Factor of the scores before the softmax.
        v_head_dim: Size of a value.
        sliding_window: Tokens that a token sees, itself included; None for all.

    Returns:
        `[T, num_heads, v_head_dim]`, contiguous.
    """
    k_cache.index_copy_(0, out_cache_loc, k)
    if v is None or v_cache is None:
        v_cache = k_cache.narrow(2, 0, v_head_dim)
    else:
        v_cache.index_copy_(0, out_cache_loc, v)
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    outputs = []
    first = 0
    for row, seq_len, extend_len in rows:
        queries = q.narrow(0, first, extend_len)
        first += extend_len
        # What the pass's first query does not see, none does.
        hidden = 0 if sliding_window is None else max(0, seq_len - extend_len + 1 - sliding_window)
        slots = req_to_token[row, hidden:seq_len]
        # [1, num_kv_heads, seq_len - hidden, head_dim]
        keys = k_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)
        values = v_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0)
        if extend_len == 1:
            outputs.append(_decode(queries, keys, values, scale))
        else:
            outputs.append(_extend(queries, keys, values, scale, sliding_window))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query, which sees every key: the query heads of a group become the rows of one small
    matrix.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = keys.shape[1]
    grouped = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return out.reshape(1, num_heads, values.shape[-1])


def _extend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """Several queries, the sequence's last; each sees the keys up to its own."""
    length, num_heads, head_dim = q.shape
    seq_len = keys.shape[2]
    # Torch has no fused kernel where values and keys differ in size, and would hold all scores.
    block = length
    if values.shape[-1] != head_dim:
        block = max(1, _MAX_SCORES // (num_heads * seq_len))
    outputs = []
    for first in range(0, length, block):
        queries = q[first : first + block]
        prefix = seq_len - length + first
        mask = None
        if prefix > 0 or block < length or sliding_window is not None:
            mask = torch.ones(queries.shape[0], seq_len, dtype=torch.bool).tril_(prefix)
            if sliding_window is not None:
                mask.triu_(prefix - sliding_window + 1)
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out.squeeze(0).transpose(0, 1))
    return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)


_library.impl("attention", attention, "CPU")


@torch.library.register_fake("srt::attention", lib=_library)
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    out_cache_loc: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    scale: float,
    v_head_dim: int,
    sliding_window: int | None,
) -> Tensor:
    return q.new_empty(*q.shape[:2], v_head_dim)


class RadixAttention(nn.Module):
    """Attention of one decoder layer; what computes it and how the cache is laid out is behind
    this class.

    Args:
        num_heads: Query heads, a multiple of `num_kv_heads`.
        head_dim: Size of a query and of a key.
        num_kv_heads: Heads of keys and values.
        layer_id: The layer's place in the KV cache.
        scale: Factor of the scores before the softmax; None is `head_dim ** -0.5`.
        v_head_dim: Size of a value; None is `head_dim`.
        sliding_window: Tokens that a token sees, itself included; None for all.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int,
        layer_id: int,
        *,
        scale: float | None = None,
        v_head_dim: int | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.scale = head_dim**-0.5 if scale is None else scale
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.sliding_window = sliding_window

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor | None, forward_batch: ForwardBatch
    ) -> Tensor:
        """Keys and values go into the cache.

        Args:
            q: `[T, num_heads, head_dim]`.
            k: `[T, num_kv_heads, head_dim]`.
            v: `[T, num_kv_heads, v_head_dim]`, or None where the values are the first columns of
                the keys and the cache holds no values.
            forward_batch: The pass.

        Returns:
            `[T, num_heads * v_head_dim]`.
        """
        # Called directly where nothing is traced: the dispatcher would cost more than the
        # bookkeeping here.
        op = torch.ops.srt.attention.default if torch.compiler.is_compiling() else attention
        k_cache, v_cache = forward_batch.kv_pool.get_kv_buffer(self.layer_id)
        out = op(
            q,
            k,
            v,
            k_cache,
            v_cache,
            forward_batch.out_cache_loc,
            forward_batch.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.extend_seq_lens,
            self.scale,
            self.v_head_dim,
            self.sliding_window,
        )
        return out.view(-1, self.num_heads * self.v_head_dim)
