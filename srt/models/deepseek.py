"""DeepSeek-V2 and V3 (2024): multi-head latent attention (MLA), here with dense feed-forward
blocks.

Attention is computed in its absorbed form. The projection from the latent to keys is applied to the
queries and the one to values to the output, so that attention runs over latents: one KV head, whose
key is the latent followed by the rotary part and whose value is the latent.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.configs.model_config import ModelConfig
from srt.errors import UnsupportedConfigError
from srt.layers.attention import RadixLatentAttention
from srt.layers.forward_batch_info import ForwardBatch
from srt.layers.latent_projection import LatentProjection
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from srt.layers.rotary_embedding import RotaryEmbedding, get_rope
from srt.models.decoder import CausalLM, layer_prefix
from srt.models.decoder_layer import MAIN_ROPE, LayerOptions

# Of the norms inside the attention, whatever the configuration says of the others.
_LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Multi-head latent attention in the absorbed form. Heads are shared out among ranks; the
    latents, which all heads read, are not.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        hf_config, tp = config.hf_config, config.tensor_parallel
        hidden, bias = config.hidden_size, bool(hf_config.attention_bias)
        heads = config.num_attention_heads
        nope_dim, rope_dim = hf_config.qk_nope_head_dim, hf_config.qk_rope_head_dim
        latent_dim, v_head_dim = hf_config.kv_lora_rank, hf_config.v_head_dim
        # What a head's query and what a token's key are put together from.
        self.query_parts = (nope_dim, rope_dim)
        self.key_parts = (latent_dim, rope_dim)

        def replicated(name: str, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(
                hidden, outputs, bias=bias, quant_config=quant_config, prefix=f"{prefix}.{name}"
            )

        def queries(name: str, inputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs,
                heads * (nope_dim + rope_dim),
                tp=tp,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
            )

        self.has_query_latent = hf_config.q_lora_rank is not None
        if self.has_query_latent:
            rank = hf_config.q_lora_rank
            self.q_a_proj = replicated("q_a_proj", rank)
            self.q_a_layernorm = RMSNorm(rank, _LATENT_NORM_EPS, config.dtype)
            self.q_b_proj = queries("q_b_proj", rank)
        else:
            self.q_proj = queries("q_proj", hidden)
        self.kv_a_proj_with_mqa = replicated("kv_a_proj_with_mqa", latent_dim + rope_dim)
        self.kv_a_layernorm = RMSNorm(latent_dim, _LATENT_NORM_EPS, config.dtype)
        self.kv_b_proj = LatentProjection(
            latent_dim,
            heads,
            (nope_dim, v_head_dim),
            tp=tp,
            quant_config=quant_config,
            prefix=f"{prefix}.kv_b_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * v_head_dim,
            hidden,
            tp=tp,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.attn = RadixLatentAttention(latent_dim, layer_id, scale=_softmax_scale(config))

    def forward(self, x: Tensor, batch: ForwardBatch, rope: RotaryEmbedding) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32; `rope` rotates queries and keys."""
        if self.has_query_latent:
            q_latent = self.q_a_layernorm(self.q_a_proj(x, torch.float32))
            q = self.q_b_proj(q_latent, torch.float32)
        else:
            q = self.q_proj(x, torch.float32)
        heads = q.view(-1, self.kv_b_proj.num_heads, sum(self.query_parts))
        q_nope, q_rope = heads.split(self.query_parts, dim=-1)
        kv = self.kv_a_proj_with_mqa(x, torch.float32).unsqueeze(1)
        latent, k_rope = kv.split(self.key_parts, dim=-1)
        q_nope = self.kv_b_proj.absorb(q_nope, x.dtype)
        q_rope, k_rope = rope(batch.positions, q_rope, k_rope)
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

    def layer_options(self, layer_id: int) -> LayerOptions:
        return LayerOptions(mlp_bias=bool(getattr(self.config.hf_config, "mlp_bias", False)))

    def make_ropes(self) -> Mapping[str, RotaryEmbedding]:
        hf_config = self.config.hf_config
        rope = get_rope(
            hf_config,
            hf_config.qk_rope_head_dim,
            self.config.context_length,
            interleaved=self.is_interleaved,
        )
        if rope.query_scaling is not None:
            raise UnsupportedConfigError(
                f"llama_4_scaling_beta {rope.query_scaling[0]} is not supported with latent "
                "attention; expected none"
            )
        return {MAIN_ROPE: rope}

    @property
    def is_interleaved(self) -> bool:
        """Whether the features that are rotated together are neighbours."""
        return True

    def make_attention(self, layer_id: int) -> nn.Module:
        prefix = f"{layer_prefix(layer_id)}.self_attn"
        return LatentAttention(self.config, layer_id, self.quant_config, prefix)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 and R1."""

    @property
    def is_interleaved(self) -> bool:
        return bool(self.config.hf_config.rope_interleave)
