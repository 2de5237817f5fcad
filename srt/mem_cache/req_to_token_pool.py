"""The table that says where each running request's tokens are.

A token lives in a numbered slot of the KV cache. Attention reads a request's keys and values
through the request's row of this table, so slots need not be neighbours and requests can share
those of a common prefix.
"""

import numpy as np
import numpy.typing as npt
import torch

# The row of padding: all its entries are PADDING_SLOT.
PADDING_REQUEST = 0


class ReqToTokenPool:
    """The table from a request's token positions to cache slots.

    Args:
        size: Requests that can run together.
        max_context_len: Longest request in tokens.

    Attributes:
        req_to_token: `[size + 1, max_context_len]` int32: the slot of each token of the request in
            that row. Row 0 is PADDING_REQUEST.
        table: The same memory as a NumPy array, which is written with less overhead.
    """

    def __init__(self, size: int, max_context_len: int) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.table: npt.NDArray[np.int32] = np.zeros((size + 1, max_context_len), dtype=np.int32)
        self.req_to_token = torch.from_numpy(self.table)
        self._free: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Takes all rows back, whoever has them."""
        self._free = list(range(self.size, 0, -1))

    @property
    def available_size(self) -> int:
        """Free rows."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A free row, or None if there is none."""
        return self._free.pop() if self._free else None

    def free(self, row: int) -> None:
        """Takes a row back.

        Raises:
            ValueError: It is not in use.
        """
        if not 1 <= row <= self.size or row in self._free:
            raise ValueError(f"row {row} is not in use")
        self._free.append(row)
