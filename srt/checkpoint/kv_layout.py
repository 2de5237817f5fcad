"""What the KV cache holds of one token, from a model's configuration alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from srt.utils.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class KVLayout:
    """Keys and values of one token; sizes in elements.

    Attributes:
        num_layers: Decoder layers.
        num_kv_heads: Heads of keys and values; 1 for latent attention.
        k_head_dim: Size of a key.
        v_head_dim: Size of a value; 0 where values are a part of the keys and not held again
            (multi-head latent attention).
    """

    num_layers: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        """Memory of one token over all layers, with elements of `itemsize` bytes."""
        elements = self.num_kv_heads * (self.k_head_dim + self.v_head_dim)
        return self.num_layers * elements * itemsize

    def on_each_rank(self, tp: TensorParallel) -> "KVLayout":
        """The layout of what each rank holds; the one head of latent attention, which all query
        heads read, is held by all.

        Raises:
            UnsupportedConfigError: Ranks cannot hold equally many heads.
        """
        return replace(self, num_kv_heads=tp.kv_heads(self.num_kv_heads, "KV cache"))


def get_kv_layout(config: Mapping[str, Any]) -> KVLayout:
    """The layout for a text model's configuration (content of config.json, or of its
    `text_config`).

    Raises:
        KeyError: A size is missing.
    """
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    latent = config.get("kv_lora_rank")
    if latent:
        return KVLayout(layers, 1, latent + config["qk_rope_head_dim"], 0)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return KVLayout(layers, config.get("num_key_value_heads") or heads, head_dim, head_dim)
