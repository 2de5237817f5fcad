"""The packed (VNNI) layout in Torch terms: where an element lies, and reading rows back.

For each block of 32 output columns (the last may be narrower, width w) the elements stand as
``[K // 2, w, 2]``: two consecutive k of a column side by side. With an odd K the last k follows as
``[w]``. The packed weight has the elements of its source and no padding, for every N and K.
"""

import torch
from torch import Tensor

BLOCK_N = 32


def packed_index(rows: Tensor, n: int, k: int) -> Tensor:
    """Flat positions of whole rows inside a packed [n, k] weight.

    Args:
        rows: [R] integer row (output column) numbers in [0, n).
        n, k: the weight's shape.

    Returns:
        [R, k] int64 positions in the flattened packed weight.
    """
    rows = rows.to(torch.int64).unsqueeze(1)
    first = rows // BLOCK_N * BLOCK_N
    width = (n - first).clamp(max=BLOCK_N)
    column = rows - first
    columns = torch.arange(k, device=rows.device).unsqueeze(0)
    even_k = k - k % 2
    paired = ((columns // 2) * width + column) * 2 + columns % 2
    tail = even_k * width + column
    return first * k + torch.where(columns < even_k, paired, tail)


def unpack_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Read rows of a packed 2-D weight: ``unpack_rows(convert_weight_packed(w), i) == w[i]``.

    With tied embeddings the packed lm_head is the only copy of the table; this is its lookup.

    Args:
        packed: [N, K] as :func:`sgl_kernel.convert_weight_packed` returns it.
        rows: [R] integer row numbers in [0, N); other values raise ``IndexError``.

    Returns:
        [R, K] of packed's dtype.
    """
    n, k = packed.shape
    if n % BLOCK_N == 0 and k % 2 == 0:
        # Whole blocks: a strided view addresses a row without an index per element.
        blocks = packed.view(n // BLOCK_N, k // 2, BLOCK_N, 2)
        return blocks[rows // BLOCK_N, :, rows % BLOCK_N, :].reshape(rows.shape[0], k)
    return packed.view(-1)[packed_index(rows, n, k)]
