"""What loaders and linear methods do to the bytes of a weight."""

from torch import Tensor

import sgl_kernel
from sgl_kernel.packing import BLOCK_N

# Bytes packed at once: few enough for a chunk and its packed copy to stay in the last-level cache,
# many enough for starting threads to cost nothing.
_CHUNK_BYTES = 4 << 20


def pack_weight_(weight: Tensor) -> Tensor:
    """Packs a weight `[N, K]` where it lies; returns it.

    The packed layout keeps each block of 32 rows in the memory of these rows, so that packing needs
    no second weight: the result is that of `sgl_kernel.convert_weight_packed`, bit for bit.

    Args:
        weight: Contiguous, of a dtype that `convert_weight_packed` takes.
    """
    row_bytes = max(1, weight.shape[1] * weight.itemsize)
    step = max(1, _CHUNK_BYTES // row_bytes // BLOCK_N) * BLOCK_N
    for rows in weight.split(step):
        rows.copy_(sgl_kernel.convert_weight_packed(rows))
    return weight
