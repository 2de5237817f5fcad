"""Attention over the paged KV cache (RadixAttention: Zheng et al., 2024), by the kernels.

Multi-head latent attention (DeepSeek-V2, 2024) in its absorbed form is attention with one KV head
whose value is the first part of its key, so its cache holds no values.
"""

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from srt.layers.layernorm import RMSNorm
from srt.layers.rotary_embedding import RotaryEmbedding

# A table of rotations without features, for layers that rotate nothing.
_NO_ROTATION = torch.empty(2**31, 0)


class RadixAttention(nn.Module):
    """Grouped-query attention of one decoder layer, from the fused projection on: head norms,
    rotation, storing keys and values, attention.

    Args:
        num_heads: Query heads, a multiple of `num_kv_heads`.
        head_dim: Size of a head.
        num_kv_heads: Heads of keys and values.
        layer_id: The layer's place in the KV cache.
        sliding_window: Tokens that a token sees, itself included; None for all.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int,
        layer_id: int,
        *,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.scale = head_dim**-0.5
        self.sliding_window = sliding_window or 0

    def forward(
        self,
        qkv: Tensor,
        batch: ForwardBatch,
        rope: RotaryEmbedding | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> Tensor:
        """Keys and values go into the cache.

        Args:
            qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`; its queries are overwritten.
            batch: The pass.
            rope: Rotates queries and keys; None for no rotation.
            q_norm: Norm of each query head before the rotation; None for none.
            k_norm: The same for key heads; of one epsilon with `q_norm`.

        Returns:
            `[T, num_heads * head_dim]` in the dtype of `qkv`.
        """
        pool = batch.kv_pool
        k_cache, v_cache = pool.get_kv_buffer(self.layer_id)
        assert v_cache is not None, "the layout of grouped-query attention holds values"
        k_scale, v_scale = pool.get_kv_scales(self.layer_id)
        decodes = batch.forward_mode is ForwardMode.DECODE
        return sgl_kernel.fused_qkv_attention_cpu(
            qkv,
            batch.positions,
            _NO_ROTATION if rope is None else rope.cos_sin_cache,
            rope is None or not rope.interleaved,
            self.num_heads,
            self.num_kv_heads,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            k_cache,
            v_cache,
            batch.out_cache_loc,
            batch.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            None if decodes else batch.extend_seq_lens,
            self.scale,
            0.0,
            self.sliding_window,
            None,
            k_scale,
            v_scale,
            None if rope is None else rope.query_scale,
        )


class RadixLatentAttention(nn.Module):
    """Multi-head latent attention of one decoder layer over latents.

    Args:
        latent_dim: Size of a latent, which is a key's first part and its value.
        layer_id: The layer's place in the KV cache.
        scale: Factor of the scores before the softmax.
    """

    def __init__(self, latent_dim: int, layer_id: int, *, scale: float) -> None:
        super().__init__()
        self.latent_dim = latent_dim
        self.layer_id = layer_id
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, batch: ForwardBatch) -> Tensor:
        """The key goes into the cache.

        Args:
            query: `[T, heads, latent_dim + rope_dim]`, heads of any number.
            key: `[T, 1, latent_dim + rope_dim]`.
            batch: The pass.

        Returns:
            `[T, heads, latent_dim]`.
        """
        # Called directly where nothing is traced, which saves the dispatcher.
        is_traced = torch.compiler.is_compiling()
        op = torch.ops.srt.latent_attention.default if is_traced else latent_attention
        decodes = batch.forward_mode is ForwardMode.DECODE
        out: Tensor = op(
            query,
            key,
            batch.kv_pool.get_kv_buffer(self.layer_id)[0],
            self.latent_dim,
            self.scale,
            batch.kv_pool.get_kv_scales(self.layer_id)[0],
            batch.out_cache_loc,
            batch.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            None if decodes else batch.extend_seq_lens,
            None if decodes else batch.extend_start_loc,
            batch.max_extend_len,
        )
        return out


def latent_attention(
    query: Tensor,
    key: Tensor,
    cache: Tensor,
    v_head_dim: int,
    sm_scale: float,
    cache_scale: float,
    out_cache_loc: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor | None,
    extend_start_loc: Tensor | None,
    max_extend_len: int,
) -> Tensor:
    """Stores keys and attends. An operator of its own, so that a compiled graph sees the cache once
    and not also as the view that the values are.

    Args:
        query: `[T, heads, head_dim]`.
        key: `[T, 1, head_dim]`, stored in `cache` at `out_cache_loc`.
        cache: `[slots, 1, head_dim]`.
        v_head_dim: Size of the part of a key that is its value.
        sm_scale: Factor of the scores before the softmax.
        cache_scale: What a stored number is multiplied by.
        out_cache_loc: As the rest, see :class:`ForwardBatch`.
        req_to_token: `[rows, max_context_len]` int32.
        req_pool_indices: `[B]`.
        seq_lens: `[B]`.
        extend_seq_lens: `[B]`; None for a decode pass.
        extend_start_loc: `[B]`; None for a decode pass.
        max_extend_len: The largest of `extend_seq_lens`.

    Returns:
        `[T, heads, v_head_dim]`.
    """
    values = cache.narrow(2, 0, v_head_dim)
    sgl_kernel.store_cache_cpu(
        key, key.narrow(2, 0, v_head_dim), cache, values, out_cache_loc, None, cache_scale,
        cache_scale,
    )  # fmt: skip
    out = query.new_empty(*query.shape[:2], v_head_dim)
    if extend_seq_lens is None or extend_start_loc is None:
        sgl_kernel.decode_attention_cpu(
            query, cache, values, out, None, None, None, None, req_to_token, req_pool_indices,
            seq_lens, sm_scale, 0.0, 0, None, cache_scale, cache_scale,
        )  # fmt: skip
    else:
        sgl_kernel.extend_attention_cpu(
            query, None, None, out, cache, values, req_to_token, req_pool_indices, seq_lens,
            extend_seq_lens, extend_start_loc, max_extend_len, sm_scale, 0.0, 0, None, cache_scale,
            cache_scale,
        )  # fmt: skip
    return out


_library = torch.library.Library("srt", "DEF")
_library.define(
    "latent_attention" + torch.library.infer_schema(latent_attention, mutates_args=("cache",))
)
_library.impl("latent_attention", latent_attention, "CPU")


@torch.library.register_fake("srt::latent_attention", lib=_library)
def _latent_attention_fake(
    query: Tensor, key: Tensor, cache: Tensor, v_head_dim: int, *pass_: object
) -> Tensor:
    return query.new_empty(*query.shape[:2], v_head_dim)
