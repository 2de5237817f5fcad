"""One layer of the decoder that the architectures here share: grouped-query attention and SwiGLU,
each after a norm and added to the residual stream. What layers differ in is written down in
:class:`LayerOptions`.

Projections are named by their role in tensor parallelism and take the sizes of the whole model;
what a rank holds of them, they say themselves (`num_heads`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.configs.model_config import ModelConfig
from srt.layers.activation import SiluAndMul
from srt.layers.attention import RadixAttention
from srt.layers.forward_batch_info import ForwardBatch
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from srt.layers.rotary_embedding import RotaryEmbedding

# Name of the only rotary embedding of most models.
MAIN_ROPE = "main"


@dataclass(frozen=True)
class LayerOptions:
    """What a decoder layer has beyond the plain one.

    Attributes:
        qkv_bias: Query, key and value projections have a bias.
        o_bias: The attention's output projection has one.
        mlp_bias: The feed-forward projections have one.
        qk_norm: Queries and keys are normalised head by head before they are rotated.
        rope: Which of the model's rotary embeddings (:meth:`CausalLM.make_ropes`) rotates queries
            and keys; None for no rotation.
        sliding_window: Tokens that a token sees, itself included; None for all.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: str | None = MAIN_ROPE
    sliding_window: int | None = None


def get_sliding_window(hf_config: Any, layer_id: int) -> int | None:
    """The window of a layer: that of the configuration, in the layers that `layer_types` calls
    sliding, or in all where there is no such list.
    """
    window: int | None = getattr(hf_config, "sliding_window", None)
    layer_types: Sequence[str] | None = getattr(hf_config, "layer_types", None)
    if layer_types is not None and layer_types[layer_id] != "sliding_attention":
        return None
    return window


class GatedMLP(nn.Module):
    """Feed-forward block with SwiGLU."""

    def __init__(
        self,
        config: ModelConfig,
        intermediate_size: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            tp=config.tensor_parallel,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            config.hidden_size,
            tp=config.tensor_parallel,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)), torch.float32)


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) with what `options` asks for."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        options: LayerOptions,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_kv_heads,
            tp=config.tensor_parallel,
            bias=options.qkv_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            tp=config.tensor_parallel,
            bias=options.o_bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if options.qk_norm:
            eps = config.hf_config.rms_norm_eps
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, eps, torch.float32) for _ in range(2)
            )
        self.attn = RadixAttention(
            self.qkv_proj.num_heads,
            config.head_dim,
            self.qkv_proj.num_kv_heads,
            layer_id,
            sliding_window=options.sliding_window,
        )

    def forward(self, x: Tensor, batch: ForwardBatch, rope: RotaryEmbedding | None) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32; `rope` rotates queries and keys."""
        heads = self.attn(self.qkv_proj(x), batch, rope, self.q_norm, self.k_norm)
        return self.o_proj(heads, torch.float32)


class DecoderLayer(nn.Module):
    """Attention and feed-forward block, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        eps = config.hf_config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, config.dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, config.dtype)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        rope: RotaryEmbedding | None,
    ) -> Tensor:
        """One step along the residual stream.

        Args:
            x: `[T, hidden_size]` float32, what the layer before adds to the stream; None in the
                first.
            residual: `[T, hidden_size]` float32, the stream, to which `x` and the output of the
                attention are added in place.
            batch: The pass.
            rope: The layer's rotary embedding, or None.

        Returns:
            `[T, hidden_size]` float32, what the feed-forward block adds.
        """
        x = self.input_layernorm(residual) if x is None else self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, rope)
        return self.mlp(self.post_attention_layernorm(x, residual))
