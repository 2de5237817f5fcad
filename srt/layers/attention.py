"""Grouped-query attention over the KV cache, registered as the operator `srt::attention`.

The operator is opaque to torch.compile: the lengths of the requests change with every step, and
code specialised to them would be compiled anew each time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.model_executor.forward_batch_info import ForwardBatch

_library = torch.library.Library("srt", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor out_cache_loc, Tensor cache_starts, Tensor seq_lens, Tensor extend_lens, "
    "float scale) -> Tensor"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    cache_starts: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    scale: float,
) -> Tensor:
    """Stores keys and values of the new tokens, then attends causally to all tokens of each
    request.

    Args:
        q: `[T, num_heads, head_dim]`.
        k: `[T, num_kv_heads, head_dim]`.
        v: As `k`.
        k_cache: `[slots, num_kv_heads, head_dim]`, written at `out_cache_loc`.
        v_cache: As `k_cache`.
        out_cache_loc: As the rest, see :class:`ForwardBatch`.
        cache_starts: `[B]`.
        seq_lens: `[B]`; a row of length 0 is padding and gives zeros.
        extend_lens: `[B]`.
        scale: Factor of the scores before the softmax.

    Returns:
        `[T, num_heads, head_dim]`, contiguous.
    """
    k_cache.index_copy_(0, out_cache_loc, k)
    v_cache.index_copy_(0, out_cache_loc, v)
    rows = zip(cache_starts.tolist(), seq_lens.tolist(), extend_lens.tolist(), strict=True)
    outputs = []
    first = 0
    for start, seq_len, extend_len in rows:
        queries = q.narrow(0, first, extend_len)
        first += extend_len
        if seq_len == 0:
            outputs.append(torch.zeros_like(queries))
            continue
        # [1, num_kv_heads, seq_len, head_dim]
        keys = k_cache.narrow(0, start, seq_len).transpose(0, 1).unsqueeze(0)
        values = v_cache.narrow(0, start, seq_len).transpose(0, 1).unsqueeze(0)
        attend = _decode if extend_len == 1 else _extend
        outputs.append(attend(queries, keys, values, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query, which sees every key: the query heads of a group become the rows of one small
    matrix.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = keys.shape[1]
    grouped = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return out.reshape(1, num_heads, head_dim)


def _extend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Several queries, the sequence's last; each sees the keys up to its own."""
    length, seq_len = q.shape[0], keys.shape[2]
    prefix = seq_len - length
    mask = None if prefix == 0 else torch.ones(length, seq_len, dtype=torch.bool).tril(prefix)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=mask,
        is_causal=prefix == 0,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).contiguous()


_library.impl("attention", attention, "CPU")


@torch.library.register_fake("srt::attention", lib=_library)
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    cache_starts: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape)


class Attention(nn.Module):
    """Attention of one decoder layer.

    Args:
        num_heads: Query heads, a multiple of `num_kv_heads`.
        head_dim: Size of a head.
        num_kv_heads: Heads of keys and values.
        layer_id: The layer's place in the KV cache.
    """

    def __init__(self, num_heads: int, head_dim: int, num_kv_heads: int, layer_id: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.scale = head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """`[T, heads, head_dim]` each, to `[T, num_heads * head_dim]`; keys and values go into the
        cache.
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
            forward_batch.cache_starts,
            forward_batch.seq_lens,
            forward_batch.extend_lens,
            self.scale,
        )
        return out.view(-1, self.num_heads * self.head_dim)
