"""Llama (Touvron et al., 2023; Llama 3, 2024) and its kin: SmolLM2 is one; SmolLM3 leaves the
rotation out of some layers (NoPE).
"""

from srt.models.decoder import CausalLM
from srt.models.decoder_layer import MAIN_ROPE, LayerOptions, get_sliding_window


class LlamaForCausalLM(CausalLM):
    """Llama 1 to 3.3."""

    def layer_options(self, layer_id: int) -> LayerOptions:
        hf_config = self.config.hf_config
        bias = hf_config.attention_bias
        return LayerOptions(qkv_bias=bias, o_bias=bias, mlp_bias=hf_config.mlp_bias)


class SmolLM3ForCausalLM(CausalLM):
    """SmolLM3 (2025)."""

    def layer_options(self, layer_id: int) -> LayerOptions:
        hf_config = self.config.hf_config
        bias = hf_config.attention_bias
        return LayerOptions(
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=hf_config.mlp_bias,
            rope=MAIN_ROPE if hf_config.no_rope_layers[layer_id] else None,
            sliding_window=(
                get_sliding_window(hf_config, layer_id) if hf_config.use_sliding_window else None
            ),
        )
