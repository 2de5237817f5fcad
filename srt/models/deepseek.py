"""DeepSeek-V2 and V3 (2024): multi-head latent attention (MLA), here with dense feed-forward
blocks.

Attention is computed in its absorbed form. The projection from the latent to keys is applied to the
queries and the one to values to the output, so that attention runs over latents: one KV head, whose
key is the latent followed by the rotary part and whose value is the latent.
"""

import math

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.configs.model_config import ModelConfig
from srt.errors import UnsupportedConfigError
from srt.layers.attention import RadixLatentAttention
from srt.layers.forward_batch_info import ForwardBatch
from srt.layers.latent_projection import LatentProjection
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import Linear
from srt.layers.rotary_embedding import RotaryEmbedding, get_rope
from srt.models.decoder import CausalLM, LayerOptions

# Of the norms inside the attention, whatever the configuration says of the others.
_LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention in the absorbed form."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rope: RotaryEmbedding,
        quant: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        hf_config = config.hf_config
        hidden, bias = config.hidden_size, bool(hf_config.attention_bias)
        self.num_heads = heads = config.num_attention_heads
        self.nope, self.rope = hf_config.qk_nope_head_dim, hf_config.qk_rope_head_dim
        self.latent, v_head_dim = hf_config.kv_lora_rank, hf_config.v_head_dim
        # Not a submodule: the model owns it.
        self._rope = (rope,)

        def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias=bias, quant_config=quant, prefix=f"{prefix}.{name}")

        query_size = heads * (self.nope + self.rope)
        self.has_query_latent = hf_config.q_lora_rank is not None
        if self.has_query_latent:
            rank = hf_config.q_lora_rank
            self.q_a_proj = linear("q_a_proj", hidden, rank, bias)
            self.q_a_layernorm = RMSNorm(rank, _LATENT_NORM_EPS, config.dtype)
            self.q_b_proj = linear("q_b_proj", rank, query_size)
        else:
            self.q_proj = linear("q_proj", hidden, query_size)
        self.kv_a_proj_with_mqa = linear(
            "kv_a_proj_with_mqa", hidden, self.latent + self.rope, bias
        )
        self.kv_a_layernorm = RMSNorm(self.latent, _LATENT_NORM_EPS, config.dtype)
        self.kv_b_proj = LatentProjection(
            self.latent, heads, (self.nope, v_head_dim), quant, f"{prefix}.kv_b_proj"
        )
        self.o_proj = linear("o_proj", heads * v_head_dim, hidden, bias)
        self.attn = RadixLatentAttention(
            self.latent, self.rope, layer_id, scale=_softmax_scale(config)
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32."""
        if self.has_query_latent:
            q_latent = self.q_a_layernorm(self.q_a_proj(x, torch.float32))
            q = self.q_b_proj(q_latent, torch.float32)
        else:
            q = self.q_proj(x, torch.float32)
        q_nope, q_rope = q.view(-1, self.num_heads, self.nope + self.rope).split(
            (self.nope, self.rope), dim=-1
        )
        kv = self.kv_a_proj_with_mqa(x, torch.float32).unsqueeze(1)
        latent, k_rope = kv.split((self.latent, self.rope), dim=-1)
        q_nope = self.kv_b_proj.absorb(q_nope, x.dtype)
        q_rope, k_rope = self._rope[0](batch.positions, q_rope, k_rope)
        query = torch.cat([q_nope, q_rope.to(x.dtype)], dim=-1)
        key = torch.cat([self.kv_a_layernorm(latent), k_rope.to(x.dtype)], dim=-1)
        latents = self.attn(query, key, batch)
        return self.o_proj(self.kv_b_proj.expand(latents).flatten(1), torch.float32)


def _softmax_scale(config: ModelConfig) -> float:
    """One over the root of the size of a whole query, sharpened where YaRN asks for it."""
    hf_config = config.hf_config
    scale: float = (hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim) ** -0.5
    parameters = hf_config.rope_parameters
    weight, factor = parameters.get("mscale_all_dim"), parameters.get("factor")
    if parameters.get("rope_type", "default") == "default" or not weight or factor is None:
        return scale
    return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else scale


class DeepseekV2ForCausalLM(CausalLM):
    """DeepSeek-V2."""

    def layer_options(self, config: ModelConfig, layer_id: int) -> LayerOptions:
        return LayerOptions(mlp_bias=bool(getattr(config.hf_config, "mlp_bias", False)))

    def make_rope(self, config: ModelConfig) -> RotaryEmbedding:
        hf_config = config.hf_config
        interleaved = self.is_interleaved(config)
        rope = get_rope(
            hf_config,
            hf_config.qk_rope_head_dim,
            config.context_length,
            interleaved=interleaved,
        )
        if rope.query_scaling is not None:
            raise UnsupportedConfigError(
                f"llama_4_scaling_beta {rope.query_scaling[0]} is not supported with latent "
                "attention; expected none"
            )
        return rope

    def is_interleaved(self, config: ModelConfig) -> bool:
        """Whether the features that are rotated together are neighbours."""
        return True

    def make_attention(
        self,
        config: ModelConfig,
        layer_id: int,
        rope: RotaryEmbedding,
        quant: QuantizationConfig | None,
        prefix: str,
    ) -> nn.Module:
        return LatentAttention(config, layer_id, rope, quant, prefix)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 and R1."""

    def is_interleaved(self, config: ModelConfig) -> bool:
        return bool(config.hf_config.rope_interleave)
