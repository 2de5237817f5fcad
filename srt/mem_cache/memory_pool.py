"""Memory for the keys and values of running requests.

Tokens live in numbered slots. What reads and writes the cache only sees slot numbers
(`out_cache_loc`, `req_to_token`), so the policy that hands them out can change without the kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from srt.checkpoint.kv_layout import KVLayout


class TokenToKVPool:
    """Keys and values of every layer, one slot a token.

    Memory is reserved at once but becomes resident only where tokens are written.

    Args:
        size: Tokens that can be held.
        layout: What a token takes, on this rank.
        dtype: Dtype that keys and values are held in: that of activations, or float8_e4m3fn.
        scales: (key scale, value scale) of each layer, by which what is held is multiplied; None
            for ones.

    Attributes:
        k_buffer: A tensor `[size + 1, num_kv_heads, k_head_dim]` for each layer; slot 0 is
            PADDING_SLOT.
        v_buffer: The same for values, with `v_head_dim`; None for each layer where the values are
            the first part of the keys.
    """

    def __init__(
        self,
        size: int,
        layout: KVLayout,
        dtype: torch.dtype,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.size = size
        self._scales = scales or [(1.0, 1.0)] * layout.num_layers
        self.layout = layout
        slots, heads = size + 1, layout.num_kv_heads
        layers = range(layout.num_layers)
        self.k_buffer = [torch.empty(slots, heads, layout.k_head_dim, dtype=dtype) for _ in layers]
        self.v_buffer = [
            torch.empty(slots, heads, layout.v_head_dim, dtype=dtype) if layout.v_head_dim else None
            for _ in layers
        ]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor | None]:
        """Keys and values of a layer; None for values that are the first part of the keys."""
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def get_kv_scales(self, layer_id: int) -> tuple[float, float]:
        """What a layer's keys and values are multiplied by when they are read."""
        return self._scales[layer_id]

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes over all layers."""
        return self.layout.bytes_per_token(self.k_buffer[0].dtype.itemsize)
