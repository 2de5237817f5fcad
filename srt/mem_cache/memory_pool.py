"""Memory for the keys and values of running requests.

Tokens live in numbered slots. A request owns a contiguous range of them for its whole life; what
reads and writes the cache only sees slot numbers (`out_cache_loc`, `cache_starts`), so the policy
that hands them out can change without the kernels.
"""

import torch
from torch import Tensor

from srt.configs.kv_layout import KVLayout

# Written by the padding rows of a captured batch and never read.
PADDING_SLOT = 0


class TokenToKVPool:
    """Keys and values of every layer, one slot a token.

    Memory is reserved at once but becomes resident only where tokens are written.

    Args:
        size: Tokens that can be held.
        layout: What a token takes.
        dtype: Dtype of keys and values.

    Attributes:
        k_buffer: A tensor `[size + 1, num_kv_heads, k_head_dim]` for each layer; slot 0 is
            PADDING_SLOT.
        v_buffer: The same for values, with `v_head_dim`; None for each layer where the values are
            the first part of the keys.
    """

    def __init__(self, size: int, layout: KVLayout, dtype: torch.dtype) -> None:
        self.size = size
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


class ContiguousSlotAllocator:
    """Hands out contiguous ranges of the slots 1 to `size`, lowest first, so that used memory stays
    dense.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = (
            [(1, size + 1)] if size > 0 else []
        )  # sorted, [start, stop)

    @property
    def available_size(self) -> int:
        """Free slots in total."""
        return sum(stop - start for start, stop in self._free)

    def alloc(self, count: int) -> int | None:
        """First slot of a free range of `count`, or None if there is no such range now."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                if stop - start == count:
                    del self._free[index]
                else:
                    self._free[index] = (start + count, stop)
                return start
        return None

    def free(self, start: int, count: int) -> None:
        """Returns the range that `alloc(count)` gave, joining it with its free neighbours."""
        ranges = sorted([*self._free, (start, start + count)])
        merged = [ranges[0]]
        for begin, stop in ranges[1:]:
            if begin < merged[-1][1]:
                raise ValueError(f"slots {start} to {start + count - 1} are not all in use")
            if begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((begin, stop))
        self._free = merged
