"""DeepSeek-V2 and V3 (2024): multi-head latent attention (MLA), here with dense feed-forward
blocks.

Attention is computed in its absorbed form. The projection from the latent to keys is applied to the
queries and the one to values to the output, so that attention runs over latents: one KV head, whose
key is the latent followed by the rotary part and whose value is the latent.
"""

import math

import torch
from torch import Tensor, nn

import sgl_kernel
from srt.configs.model_config import ModelConfig
from srt.errors import UnsupportedConfigError
from srt.layers.attention import RadixAttention
from srt.layers.float32 import Float32LinearMethod, dequantize
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import Linear
from srt.layers.quantization.base_config import QuantizationConfig
from srt.layers.rotary_embedding import RotaryEmbedding, Rotation, get_rope
from srt.model_executor.forward_batch_info import ForwardBatch
from srt.models.decoder import CausalLM, LayerOptions

# Of the norms inside the attention, whatever the configuration says of the others.
_LATENT_NORM_EPS = 1e-6


class LatentProjection(Linear):
    """The checkpoint's `kv_b_proj`, from latents to keys and values, held per head as the two
    factors that the absorbed form needs.

    FP8 weights stay FP8 where each head's keys, and each head's values, have one scale, which is
    what `bmm_cpu` takes. Others (block scales, scales per channel) are held in bfloat16, rounded
    once.

    Attributes:
        w_kc: `[H, kv_lora_rank, qk_nope_head_dim]`, keys' part, packed.
        w_vc: `[H, v_head_dim, kv_lora_rank]`, values' part, packed.
        scale_kc: `[H]` float32, or None where `w_kc` is not FP8; likewise `scale_vc`.
    """

    w_kc: nn.Parameter
    w_vc: nn.Parameter
    scale_kc: nn.Parameter | None
    scale_vc: nn.Parameter | None

    def __init__(
        self,
        latent: int,
        num_heads: int,
        head_sizes: tuple[int, int],
        quant: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__(latent, num_heads * sum(head_sizes), quant_config=quant, prefix=prefix)
        self.num_heads = num_heads
        self.head_sizes = head_sizes
        for name in ("w_kc", "w_vc", "scale_kc", "scale_vc"):
            self.register_parameter(name, None)

    def process_weights_after_loading(self) -> None:
        weight = self.get_parameter("weight").data
        scales = self._head_scales()
        if isinstance(self.quant_method, Float32LinearMethod):
            super().process_weights_after_loading()
            weight = self.get_parameter("weight").data
        elif scales is None and weight.dtype != torch.bfloat16:
            super().process_weights_after_loading()
            weight = dequantize(self, self.quant_method).to(torch.bfloat16)
        per_head = weight.view(self.num_heads, sum(self.head_sizes), self.input_size)
        keys, values = per_head.split(self.head_sizes, dim=1)
        factors = [keys.transpose(1, 2).contiguous(), values.contiguous()]
        if weight.dtype != torch.float32:
            factors = [sgl_kernel.convert_weight_packed(factor) for factor in factors]
        for name in [name for name, _ in self.named_parameters(recurse=False)]:
            delattr(self, name)
        self.w_kc, self.w_vc = (nn.Parameter(f, requires_grad=False) for f in factors)
        self.scale_kc, self.scale_vc = (
            (nn.Parameter(s, requires_grad=False) for s in scales) if scales else (None, None)
        )

    def _head_scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales `[H]` of keys and of values if the weight is FP8 and has no finer ones."""
        scale = getattr(self, "weight_scale", None)
        if scale is None or isinstance(self.quant_method, Float32LinearMethod):
            return None
        if scale.shape not in ((self.output_size,), (self.output_size, 1)):
            return None
        parts = scale.data.view(self.num_heads, -1).split(self.head_sizes, dim=1)
        if any((part != part[:, :1]).any() for part in parts):
            return None
        keys, values = (part[:, 0].clone() for part in parts)
        return keys, values

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Queries `[T, H, qk_nope_head_dim]` to `[T, H, kv_lora_rank]`, against latents."""
        return _bmm(q_nope, self.w_kc, self.scale_kc)

    def expand(self, latents: Tensor) -> Tensor:
        """Attention's output over latents `[T, H, kv_lora_rank]` to `[T, H, v_head_dim]`."""
        return _bmm(latents, self.w_vc, self.scale_vc)


def _bmm(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """`[T, H, K]` by `[H, N, K]`, head by head, to `[T, H, N]`."""
    if weight.dtype == torch.float32:
        return torch.einsum("thk,hnk->thn", x, weight)
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[1])
    torch.ops.sgl_kernel.bmm_cpu.default(
        out.transpose(0, 1), x.transpose(0, 1), weight, True, scale
    )
    return out


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
        self._rotate = rope.rotate

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
        self.attn = RadixAttention(
            heads,
            self.latent + self.rope,
            1,
            layer_id,
            scale=_softmax_scale(config),
            v_head_dim=self.latent,
        )

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """`[T, hidden_size]` to the same shape in float32."""
        if self.has_query_latent:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, torch.float32)))
        else:
            q = self.q_proj(x)
        q_nope, q_rope = q.view(-1, self.num_heads, self.nope + self.rope).split(
            (self.nope, self.rope), dim=-1
        )
        kv = self.kv_a_proj_with_mqa(x, torch.float32).unsqueeze(1)
        latent, k_rope = kv.split((self.latent, self.rope), dim=-1)
        query = torch.cat(
            [self.kv_b_proj.absorb(q_nope), self._rotate(q_rope, rotation).to(x.dtype)], dim=-1
        )
        key = torch.cat(
            [self.kv_a_layernorm(latent), self._rotate(k_rope, rotation).to(x.dtype)], dim=-1
        )
        latents = self.attn(query, key, None, batch).view(-1, self.num_heads, self.latent)
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

    def __init__(self, config: ModelConfig, quant: QuantizationConfig | None) -> None:
        super().__init__(config, quant)
        first = config.num_hidden_layers
        extra = getattr(config.hf_config, "num_nextn_predict_layers", None) or 0
        # They predict further tokens, which is for speculative decoding.
        self.skipped_modules += tuple(f"layers.{i}" for i in range(first, first + extra))

    def layer_options(self, config: ModelConfig, layer_id: int) -> LayerOptions:
        return LayerOptions(mlp_bias=bool(getattr(config.hf_config, "mlp_bias", False)))

    def make_rope(self, config: ModelConfig) -> RotaryEmbedding:
        hf_config = config.hf_config
        interleaved = self.is_interleaved(config)
        rope = get_rope(hf_config, hf_config.qk_rope_head_dim, interleaved=interleaved)
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
