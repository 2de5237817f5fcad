"""The decoder-only transformer that the architectures here share.

An architecture says what its layers have beyond the plain one (:meth:`CausalLM.layer_options`).
Where that is not enough, it replaces a hook: :meth:`CausalLM.make_attention`,
:meth:`CausalLM.make_mlp`, :meth:`CausalLM.make_ropes`.

The residual stream is float32: it costs nothing next to the weights, and what it would lose by a
rounding after every block is most of what 16-bit activations lose.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.configs.model_config import ModelConfig
from srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from srt.layers.layernorm import RMSNorm
from srt.layers.quantized_lm_head import quantize_lm_head
from srt.layers.rotary_embedding import RotaryEmbedding, get_rope
from srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from srt.models.decoder_layer import (
    MAIN_ROPE,
    DecoderLayer,
    GatedMLP,
    GroupedQueryAttention,
    LayerOptions,
)


class DecoderModel(nn.Module):
    """Embedding, decoder layers and final norm.

    Args:
        config: The model's configuration.
        layers: The decoder layers.
        ropes: The rotary embeddings by name.
        rope_names: Which of them each layer is given; None for none.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        ropes: Mapping[str, RotaryEmbedding],
        rope_names: Sequence[str | None],
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            torch.float32,
            tp=config.tensor_parallel,
            packed=config.tie_word_embeddings and config.dtype is not torch.float32,
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.hf_config.rms_norm_eps, config.dtype)
        self.ropes = nn.ModuleDict(ropes)
        self._layer_ropes = [None if name is None else ropes[name] for name in rope_names]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[T, hidden_size]`."""
        residual, x = self.embed_tokens(batch.input_ids), None
        for layer, rope in zip(self.layers, self._layer_ropes, strict=True):
            x = layer(x, residual, batch, rope)
        return self.norm(x, residual)


class CausalLM(nn.Module, ABC):
    """A decoder with its output projection; one subclass an architecture.

    Attributes:
        config: The model's configuration.
        quant_config: The checkpoint's format, or None.
        lm_head: The output projection; None where it is the token table.
    """

    def __init__(self, config: ModelConfig, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        self.config = config
        self.quant_config = quant_config
        layer_ids = range(config.num_hidden_layers)
        self.model = DecoderModel(
            config,
            [DecoderLayer(config, self.make_attention(i), self.make_mlp(i)) for i in layer_ids],
            self.make_ropes(),
            [self.layer_options(i).rope for i in layer_ids],
        )
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(
                config.hidden_size,
                config.vocab_size,
                tp=config.tensor_parallel,
                quant_config=quant_config,
            )

    @abstractmethod
    def layer_options(self, layer_id: int) -> LayerOptions:
        """What a layer has beyond the plain one."""

    def make_ropes(self) -> Mapping[str, RotaryEmbedding]:
        """The model's rotary embeddings by the names that :attr:`LayerOptions.rope` says."""
        config = self.config
        return {MAIN_ROPE: get_rope(config.hf_config, config.head_dim, config.context_length)}

    def make_attention(self, layer_id: int) -> nn.Module:
        """A layer's attention: `(x, batch, rope)` to `[T, hidden_size]`, float32."""
        return GroupedQueryAttention(
            self.config,
            layer_id,
            self.layer_options(layer_id),
            self.quant_config,
            f"{layer_prefix(layer_id)}.self_attn",
        )

    def make_mlp(self, layer_id: int) -> nn.Module:
        """A layer's feed-forward block: `x` to `[T, hidden_size]`, float32. A mixture of experts
        would be another block here.
        """
        return GatedMLP(
            self.config,
            self.config.hf_config.intermediate_size,
            self.quant_config,
            f"{layer_prefix(layer_id)}.mlp",
            bias=self.layer_options(layer_id).mlp_bias,
        )

    def quantize_lm_head(self) -> None:
        """Turns the loaded output projection into FP8, unless it is already."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        self.lm_head = quantize_lm_head(head) or self.lm_head

    def prepare_positions(self, length: int) -> None:
        """Makes the model ready for requests of up to `length` tokens."""
        for rope in self.model.ropes.values():
            assert isinstance(rope, RotaryEmbedding)
            rope.prepare(length)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states `[L, hidden_size]` to logits `[L, vocab_size]`, float32."""
        if self.lm_head is None:
            return self.model.embed_tokens.logits(hidden)
        return self.lm_head(hidden)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits `[L, vocab_size]`, float32, after the tokens that `logits_indices` names."""
        hidden = self.model(batch)
        if batch.forward_mode is ForwardMode.EXTEND:
            hidden = hidden.index_select(0, batch.logits_indices)
        return self.compute_logits(hidden)


def layer_prefix(layer_id: int) -> str:
    """Full name of a decoder layer's module."""
    return f"model.layers.{layer_id}"
