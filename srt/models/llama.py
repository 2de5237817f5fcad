"""The Llama architecture (Touvron et al., 2023; Llama 3, 2024), which SmolLM2 and others share.

The residual stream is float32: it costs nothing next to the weights, and what it would lose by a
rounding after every block is most of what 16-bit activations lose.
"""

from typing import Any

import torch
from torch import Tensor, nn

from srt.configs.model_config import ModelConfig
from srt.errors import UnsupportedConfigError
from srt.layers.activation import SiluAndMul
from srt.layers.attention import RadixAttention
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import Linear, MergedLinear, QKVLinear
from srt.layers.quantization.base_config import QuantizationConfig
from srt.layers.rotary_embedding import apply_rotary, get_rope
from srt.layers.vocab_embedding import LMHead, TiedLMHead, VocabEmbedding
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


class LlamaMLP(nn.Module):
    """Feed-forward block with SwiGLU."""

    def __init__(self, hf_config: Any, quant: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        hidden, inner, bias = hf_config.hidden_size, hf_config.intermediate_size, hf_config.mlp_bias
        self.gate_up_proj = MergedLinear(
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            bias=bias,
            quant_config=quant,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.down_proj = Linear(
            inner, hidden, bias=bias, quant_config=quant, prefix=f"{prefix}.down_proj"
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)), torch.float32)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary position embedding."""

    def __init__(
        self, config: ModelConfig, layer_id: int, quant: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.hf_config.attention_bias
        self.heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.qkv_proj = QKVLinear(
            hidden,
            config.head_dim,
            config.num_attention_heads,
            config.num_kv_heads,
            bias=bias,
            quant_config=quant,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = Linear(
            config.num_attention_heads * config.head_dim,
            hidden,
            bias=bias,
            quant_config=quant,
            prefix=f"{prefix}.o_proj",
        )
        self.attn = RadixAttention(
            config.num_attention_heads, config.head_dim, config.num_kv_heads, layer_id
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32; `rope` is cosine and sine for the
        batch's positions.
        """
        q_heads, k_heads, v_heads = self.heads
        qkv = self.qkv_proj(x).view(-1, q_heads + k_heads + v_heads, self.head_dim)
        # Queries and keys lie side by side and are rotated in one go.
        qk, v = qkv.split((q_heads + k_heads, v_heads), dim=1)
        q, k = apply_rotary(qk, *rope).split((q_heads, k_heads), dim=1)
        return self.o_proj(self.attn(q, k, v, batch), torch.float32)


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward block, each after a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, layer_id: int, quant: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        eps = config.hf_config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, config.dtype)
        self.self_attn = LlamaAttention(config, layer_id, quant, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, config.dtype)
        self.mlp = LlamaMLP(config.hf_config, quant, f"{prefix}.mlp")

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: ForwardBatch) -> Tensor:
        """Residual stream `[T, hidden_size]`, float32, before and after the layer."""
        x = x + self.self_attn(self.input_layernorm(x), rope, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig, quant: QuantizationConfig | None) -> None:
        super().__init__()
        hf_config = config.hf_config
        self.embed_tokens = VocabEmbedding(
            config.vocab_size, config.hidden_size, torch.float32, packed=config.tie_word_embeddings
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i, quant, f"model.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, hf_config.rms_norm_eps, config.dtype)
        self.rotary_emb = get_rope(config.head_dim, hf_config.rope_parameters)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[T, hidden_size]`."""
        x = self.embed_tokens(batch.input_ids)
        rope = self.rotary_emb(batch.positions)
        for layer in self.layers:
            x = layer(x, rope, batch)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Llama with its output projection."""

    def __init__(self, config: ModelConfig, quant: QuantizationConfig | None) -> None:
        super().__init__()
        if config.hf_config.hidden_act != "silu":
            raise UnsupportedConfigError(
                f"hidden_act {config.hf_config.hidden_act!r} is not supported; expected 'silu'"
            )
        self.model = LlamaModel(config, quant)
        self.tied = config.tie_word_embeddings
        self.lm_head = (
            TiedLMHead(self.model.embed_tokens)
            if self.tied
            else LMHead(config.hidden_size, config.vocab_size, quant_config=quant)
        )

    def is_unused_tensor(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor of this canonical name although the model has no
        use for it.
        """
        # Old checkpoints store the rotation's frequencies, which follow from the configuration.
        return name.endswith(".rotary_emb.inv_freq") or (self.tied and name.startswith("lm_head."))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits `[L, vocab_size]`, float32, after the tokens that `logits_indices` names."""
        hidden = self.model(batch)
        if batch.forward_mode is ForwardMode.EXTEND:
            hidden = hidden.index_select(0, batch.logits_indices)
        return self.lm_head(hidden)
