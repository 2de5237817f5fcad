"""What the contracts of the ops are made of: properties of tensors and numbers."""

import math
from typing import Any

import torch
from torch import Tensor

E4M3, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
ACTS, FLOATS, INDICES = (BF16, F16), (F32, BF16, F16), (torch.int64, torch.int32)

Arguments = dict[str, Any]


def ones(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """A tensor of ones, of any dtype."""
    return torch.ones(shape).to(dtype)


def is_dense(tensor: Tensor | None, dtypes: tuple[torch.dtype, ...], *ranks: int) -> bool:
    """A strided tensor of one of these dtypes and ranks; no ranks: of any."""
    return (
        tensor is not None
        and tensor.layout == torch.strided
        and tensor.dtype in dtypes
        and (not ranks or tensor.dim() in ranks)
    )


def rows_are_dense(tensor: Tensor) -> bool:
    """Whether elements of a row stand side by side."""
    return tensor.shape[-1] <= 1 or tensor.numel() == 0 or tensor.stride(-1) == 1


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share memory."""
    offsets = sum(
        (torch.arange(size) * stride).view(-1, *(1,) * (tensor.dim() - 1 - dim))
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    )
    return len(torch.as_tensor(offsets).unique()) < tensor.numel()


def is_vector(tensor: Tensor | None, dtypes: tuple[torch.dtype, ...], size: int) -> bool:
    """A contiguous vector of that size."""
    return (
        tensor is not None
        and is_dense(tensor, dtypes, 1)
        and tensor.shape == (size,)
        and tensor.is_contiguous()
    )


def are_indices(tensor: Tensor | None, count: int, limit: int) -> bool:
    """That many integers in [0, limit)."""
    if tensor is None or not is_vector(tensor, INDICES, count):
        return False
    return all(0 <= index < limit for index in tensor.tolist())  # limits may be beyond int64


def is_number(value: float) -> bool:
    """Finite as float32, which ops use it as, and not so small that it would lose bits there."""
    used = torch.tensor(value, dtype=F32).item()
    return math.isfinite(used) and (value == 0 or abs(used) >= 2.0**-126)


def is_scale(value: float) -> bool:
    """A number above 0."""
    return is_number(value) and value > 0


def is_eps(value: float) -> bool:
    """A number of at least 0."""
    return is_number(value) and value >= 0


def are_heads(x: Tensor | None, head_dim: int, dtypes: tuple[torch.dtype, ...], most: int) -> bool:
    """[T, heads * head_dim] and so on, of at most that many dimensions."""
    if x is None or not (is_dense(x, dtypes, *range(2, most + 1)) and rows_are_dense(x)):
        return False
    return x.shape[1] % head_dim == 0 if x.dim() == 2 else x.shape[-1] == head_dim


def head_count(x: Tensor, head_dim: int) -> int:
    """Heads of what `are_heads` accepts."""
    return x.shape[1] // head_dim if x.dim() == 2 else x.shape[-2]


def is_table(table: Tensor | None, head_dim: int) -> bool:
    """[max_position, rotary_dim] of cosines and sines for heads of that size."""
    if table is None or not (is_dense(table, FLOATS, 2) and rows_are_dense(table)):
        return False
    return table.shape[1] % 2 == 0 and table.shape[1] <= head_dim
