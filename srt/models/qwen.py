"""Qwen2, Qwen2.5 and Qwen3 (dense)."""

from srt.models.decoder import CausalLM
from srt.models.decoder_layer import LayerOptions, get_sliding_window


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5 (Yang et al., 2024): queries, keys and values have a bias."""

    def layer_options(self, layer_id: int) -> LayerOptions:
        window = get_sliding_window(self.config.hf_config, layer_id)
        return LayerOptions(qkv_bias=True, sliding_window=window)


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 (Yang et al., 2025): queries and keys are normalised."""

    def layer_options(self, layer_id: int) -> LayerOptions:
        bias = self.config.hf_config.attention_bias
        return LayerOptions(
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            sliding_window=get_sliding_window(self.config.hf_config, layer_id),
        )
