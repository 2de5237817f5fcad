"""Mistral (Jiang et al., 2023) and Ministral: Llama's decoder with a sliding window.

Ministral 3 (2025) adds YaRN and scales its queries by their position, both of which its rotary
parameters say. Behind the `mistral3` wrapper, which adds a vision tower, is one of the two.
"""

from srt.models.decoder import CausalLM
from srt.models.decoder_layer import LayerOptions, get_sliding_window


class MistralForCausalLM(CausalLM):
    """Mistral 7B, Nemo, Small and Devstral."""

    def layer_options(self, layer_id: int) -> LayerOptions:
        return LayerOptions(sliding_window=get_sliding_window(self.config.hf_config, layer_id))


class MinistralForCausalLM(MistralForCausalLM):
    """Ministral (2024), whose layers alternate between a window and none."""


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3 (2025)."""
