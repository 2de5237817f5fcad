"""Memory for weights in huge pages: a token reads all of them once, and with pages of 4 KiB the
processor looks up a translation every few dozen lines and stops prefetching at each.
"""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from srt.utils.arithmetic import ceil_div

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20
# Where tensors begin: a cache line.
_ALIGNMENT = 64


class HugePageArena:
    """Hands out memory of tensors that live as long as each other, side by side, so that even small
    ones share huge pages. Linux is asked for such pages (madvise, transparent huge pages); where it
    has none, the pages are ordinary.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the CPU, not initialised. Its memory is kept as long as any tensor
        of the same chunk is.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        start = ceil_div(self._used, _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._chunk.numel():
            self._chunk, start = _huge_pages(max(nbytes, _CHUNK)), 0
        self._used = start + nbytes
        return self._chunk[start : self._used].view(dtype).view(shape)


def _huge_pages(nbytes: int) -> Tensor:
    """At least `nbytes` bytes that begin at a huge page; not resident until they are written."""
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Kernels without huge pages refuse.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :][:nbytes]
