"""Memory in huge pages, where the system has them: with small ones, what is measured would depend
on which pages an allocator happens to hand out.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 * 2**20
_ALIGNMENT = 64


def huge_pages(nbytes: int) -> Tensor:
    """uint8 [nbytes], zeros that take no memory before they are written."""
    # Shared memory, the default, would get no huge pages.
    buffer = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :][:nbytes]


def huge_copies(tensor: Tensor, count: int) -> list[Tensor]:
    """``count`` copies of a contiguous tensor, side by side."""
    nbytes = tensor.nbytes
    room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    parts = huge_pages(count * room).view(count, room)
    return [part[:nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor) for part in parts]
