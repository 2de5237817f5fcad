"""The decoder-only transformer that the architectures here share: grouped-query attention and
SwiGLU, each after a norm and added to the residual stream.

What they differ in is written down in :class:`LayerOptions`; an architecture whose attention is
another replaces :meth:`CausalLM.make_attention`.

The residual stream is float32: it costs nothing next to the weights, and what it would lose by a
rounding after every block is most of what 16-bit activations lose.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.configs.model_config import ModelConfig
from srt.layers.activation import SiluAndMul
from srt.layers.attention import RadixAttention
from srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import Linear, MergedLinear, QKVLinear
from srt.layers.quantized_lm_head import quantize_lm_head
from srt.layers.rotary_embedding import RotaryEmbedding, get_rope
from srt.layers.vocab_embedding import LMHead, TiedLMHead, VocabEmbedding


@dataclass(frozen=True)
class LayerOptions:
    """What a decoder layer has beyond the plain one.

    Attributes:
        qkv_bias: Query, key and value projections have a bias.
        o_bias: The attention's output projection has one.
        mlp_bias: The feed-forward projections have one.
        qk_norm: Queries and keys are normalised head by head before they are rotated.
        use_rope: Queries and keys are rotated.
        sliding_window: Tokens that a token sees, itself included; None for all.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    use_rope: bool = True
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
        hidden_size: int,
        intermediate_size: int,
        quant: QuantizationConfig | None,
        prefix: str,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            quant_config=quant,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = Linear(
            intermediate_size,
            hidden_size,
            bias=bias,
            quant_config=quant,
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
        rope: RotaryEmbedding,
        quant: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        self.qkv_proj = QKVLinear(
            config.hidden_size,
            config.head_dim,
            heads,
            kv_heads,
            bias=options.qkv_bias,
            quant_config=quant,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = Linear(
            heads * config.head_dim,
            config.hidden_size,
            bias=options.o_bias,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
        )
        # Their weights are passed to the attention kernel.
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if options.qk_norm:
            eps = config.hf_config.rms_norm_eps
            self.q_norm, self.k_norm = (
                RMSNorm(config.head_dim, eps, torch.float32) for _ in range(2)
            )
        self.attn = RadixAttention(
            heads,
            config.head_dim,
            kv_heads,
            layer_id,
            sliding_window=options.sliding_window,
            rope=rope if options.use_rope else None,
            qk_norm=None
            if self.q_norm is None or self.k_norm is None
            else (self.q_norm, self.k_norm),
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32."""
        return self.o_proj(self.attn(self.qkv_proj(x), batch), torch.float32)


class DecoderLayer(nn.Module):
    """Attention and feed-forward block, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        eps = config.hf_config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, config.dtype)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, config.dtype)
        self.mlp = mlp

    def forward(self, x: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """One step along the residual stream.

        Args:
            x: `[T, hidden_size]` float32, what the layer before adds to the stream; None in the
                first.
            residual: `[T, hidden_size]` float32, the stream, to which `x` and the output of the
                attention are added in place.
            batch: The pass.

        Returns:
            `[T, hidden_size]` float32, what the feed-forward block adds.
        """
        x = self.input_layernorm(residual) if x is None else self.input_layernorm(x, residual)
        x = self.self_attn(x, batch)
        return self.mlp(self.post_attention_layernorm(x, residual))


class DecoderModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], rope: RotaryEmbedding
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(
            config.vocab_size,
            config.hidden_size,
            torch.float32,
            packed=config.tie_word_embeddings and config.dtype is not torch.float32,
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.hf_config.rms_norm_eps, config.dtype)
        self.rotary_emb = rope

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[T, hidden_size]`."""
        residual, x = self.embed_tokens(batch.input_ids), None
        for layer in self.layers:
            x = layer(x, residual, batch)
        return self.norm(x, residual)


class CausalLM(nn.Module, ABC):
    """A decoder with its output projection; one subclass an architecture."""

    def __init__(self, config: ModelConfig, quant: QuantizationConfig | None) -> None:
        super().__init__()
        rope = self.make_rope(config)
        layers = []
        for i in range(config.num_hidden_layers):
            prefix = f"model.layers.{i}"
            attention = self.make_attention(config, i, rope, quant, f"{prefix}.self_attn")
            mlp = self.make_mlp(config, i, quant, f"{prefix}.mlp")
            layers.append(DecoderLayer(config, attention, mlp))
        self.model = DecoderModel(config, layers, rope)
        self.lm_head: nn.Module = (
            TiedLMHead(self.model.embed_tokens)
            if config.tie_word_embeddings
            else LMHead(config.hidden_size, config.vocab_size, quant_config=quant)
        )

    @abstractmethod
    def layer_options(self, config: ModelConfig, layer_id: int) -> LayerOptions:
        """What a layer has beyond the plain one."""

    def make_rope(self, config: ModelConfig) -> RotaryEmbedding:
        """The model's rotary embedding."""
        return get_rope(config.hf_config, config.head_dim, config.context_length)

    def make_attention(
        self,
        config: ModelConfig,
        layer_id: int,
        rope: RotaryEmbedding,
        quant: QuantizationConfig | None,
        prefix: str,
    ) -> nn.Module:
        """A layer's attention: `(x, batch)` to `[T, hidden_size]`, float32."""
        options = self.layer_options(config, layer_id)
        return GroupedQueryAttention(config, layer_id, options, rope, quant, prefix)

    def make_mlp(
        self, config: ModelConfig, layer_id: int, quant: QuantizationConfig | None, prefix: str
    ) -> nn.Module:
        """A layer's feed-forward block: `x` to `[T, hidden_size]`, float32. A mixture of experts
        would be another block here.
        """
        return GatedMLP(
            config.hidden_size,
            config.hf_config.intermediate_size,
            quant,
            prefix,
            bias=self.layer_options(config, layer_id).mlp_bias,
        )

    def quantize_lm_head(self) -> None:
        """Turns the loaded output projection into FP8, unless it is already."""
        self.lm_head = quantize_lm_head(self.lm_head)

    def prepare_positions(self, length: int) -> None:
        """Makes the model ready for requests of up to `length` tokens."""
        self.model.rotary_emb.prepare(length)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits `[L, vocab_size]`, float32, after the tokens that `logits_indices` names."""
        hidden = self.model(batch)
        if batch.forward_mode is ForwardMode.EXTEND:
            hidden = hidden.index_select(0, batch.logits_indices)
        return self.lm_head(hidden)
