"""Which slots of the KV cache are free."""

import numpy as np
import numpy.typing as npt

# Written by padding rows and never read.
PADDING_SLOT = 0

SlotArray = npt.NDArray[np.int32]
NO_SLOTS: SlotArray = np.empty(0, dtype=np.int32)


class TokenToKVPoolAllocator:
    """Hands out the slots 1 to `size`, one a token; slot 0 is PADDING_SLOT.

    The lowest free slots go first as long as nothing has been freed, so that a prompt usually lies
    in one piece and untouched memory stays untouched.

    Attributes:
        size: Slots in total.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # A stack: the next slot is the last element of _stack[:_count].
        self._stack: SlotArray = np.empty(size, dtype=np.int32)
        self._is_free = np.empty(size + 1, dtype=np.bool_)
        self.reset()

    def reset(self) -> None:
        """Takes all slots back, whoever has them."""
        self._stack[:] = np.arange(self.size, 0, -1, dtype=np.int32)
        self._count = self.size
        self._is_free[:] = True
        self._is_free[PADDING_SLOT] = False

    @property
    def available_size(self) -> int:
        """Free slots."""
        return self._count

    def alloc(self, count: int) -> SlotArray | None:
        """`count` slots, or None, and nothing is taken, if fewer are free."""
        if count > self._count:
            return None
        first = self._count - count
        slots = self._stack[first : self._count][::-1].copy()
        self._count = first
        self._is_free[slots] = False
        return slots

    def free(self, slots: SlotArray) -> None:
        """Takes slots back.

        Raises:
            ValueError: A slot is free already, given twice, or out of range; nothing is taken back.
        """
        count = len(slots)
        if count == 0:
            return
        if slots.min() < 1 or slots.max() > self.size or self._is_free[slots].any():
            raise ValueError(f"slots {slots.tolist()} are not all in use")
        if count > 1 and len(np.unique(slots)) != count:
            raise ValueError(f"slots {slots.tolist()} are given back twice")
        self._is_free[slots] = True
        # Reversed, so that they come out in the order in which they went in.
        self._stack[self._count : self._count + count] = slots[::-1]
        self._count += count
