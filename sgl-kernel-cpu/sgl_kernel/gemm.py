"""The products, and the packing of their weights.

Names, argument order and meaning are those of SGLang's CPU backend where it has the op; optional
arguments behind them are ours. The body of an op is its fake kernel, see :mod:`sgl_kernel.fakes`.

Shapes: M rows of activations, N output columns, K the reduced dimension; `...` are further
dimensions of rows, or none. All tensors are on the CPU. Every op raises ``RuntimeError`` for a bad
argument, before anything is computed; the message names the op, the argument, what was expected and
what came. M = 0 gives an empty result.

Numerics: e4m3 codes are decoded exactly (subnormals, NaN), products and sums are f32, and the
result is rounded once. See docs/numerics.md.
"""

import torch
from torch import Tensor

from sgl_kernel._op import op

__all__ = [
    "bmm_cpu",
    "convert_weight_packed",
    "fp8_per_channel_scaled_mm_cpu",
    "fp8_per_tensor_scaled_mm_cpu",
    "fp8_scaled_mm_cpu",
    "weight_packed_linear",
]


@op
def convert_weight_packed(weight: Tensor) -> Tensor:
    """Pack a weight into the layout that the kernels read (VNNI pairs in blocks of 32 columns).

    Args:
        weight: [N, K] or [B, N, K], float8_e4m3fn, bfloat16 or float16, any N, K >= 1.

    Returns:
        A new contiguous tensor of the same shape and dtype; its bytes are permuted.
    """
    return weight.new_empty(weight.shape)


@op
def fp8_scaled_mm_cpu(
    mat1: Tensor,
    mat2: Tensor,
    scales2: Tensor,
    block_size: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    """``mat1 @ dequantised(mat2).T + bias`` with one scale per block of the weight.

    Weight element (n, k) is multiplied by ``scales2[n // block_n, k // block_k]``.

    Args:
        mat1: [..., M, K] bfloat16 or float16 activations; rows may be strided.
        mat2: [N, K] float8_e4m3fn, packed by :func:`convert_weight_packed` when ``is_vnni``.
        scales2: [ceil(N / block_n), ceil(K / block_k)] float32; edge blocks may be ragged.
        block_size: [block_n, block_k], each >= 1. [128, 128] is the fast one.
        bias: [N] float32, bfloat16 or float16 (converted to float32 exactly), or None.
        out_dtype: mat1's dtype or float32.
        is_vnni: whether mat2 is packed.

    Returns:
        [..., M, N] of ``out_dtype``.
    """
    return _product("fp8_scaled_mm_cpu", mat1, mat2, out_dtype)


@op
def fp8_per_tensor_scaled_mm_cpu(
    mat1: Tensor,
    mat2: Tensor,
    scales2: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    """``mat1 @ mat2.T * scales2 + bias`` with one scale for the whole weight.

    Args:
        mat1: [..., M, K] bfloat16 or float16 activations; rows may be strided.
        mat2: [N, K] float8_e4m3fn, packed by :func:`convert_weight_packed` when ``is_vnni``.
        scales2: one float32 element, of any rank.
        bias: [N] float32, bfloat16 or float16 (converted to float32 exactly), or None.
        out_dtype: mat1's dtype or float32.
        is_vnni: whether mat2 is packed.

    Returns:
        [..., M, N] of ``out_dtype``.
    """
    return _product("fp8_per_tensor_scaled_mm_cpu", mat1, mat2, out_dtype)


@op
def fp8_per_channel_scaled_mm_cpu(
    mat1: Tensor,
    mat2: Tensor,
    scales2: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    """As :func:`fp8_per_tensor_scaled_mm_cpu`, with one scale per output column.

    Args:
        scales2: [N] or [N, 1] float32. The other arguments are the same.
    """
    return _product("fp8_per_channel_scaled_mm_cpu", mat1, mat2, out_dtype)


@op
def weight_packed_linear(
    mat1: Tensor,
    mat2: Tensor,
    bias: Tensor | None,
    is_vnni: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``mat1 @ mat2.T + bias`` for a 16-bit weight: lm_head, and what stays unquantized.

    Args:
        mat1: [..., M, K] bfloat16 or float16; rows may be strided.
        mat2: [N, K] bfloat16 or float16, packed by :func:`convert_weight_packed` when ``is_vnni``.
        bias: [N] float32, bfloat16 or float16 (converted to float32 exactly), or None.
        is_vnni: whether mat2 is packed.
        out_dtype: mat1's dtype (the default) or float32.

    Returns:
        [..., M, N] of ``out_dtype``.
    """
    return _product("weight_packed_linear", mat1, mat2, out_dtype or mat1.dtype)


@op
def bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    """``out[b] = mat1[b] @ mat2[b].T * scale``, written in place.

    Args:
        out: [B, M, N], mat1's dtype or float32; batches and rows may be strided.
        mat1: [B, M, K] bfloat16 or float16; batches and rows may be strided.
        mat2: [B, N, K] float8_e4m3fn, bfloat16 or float16, contiguous, packed when ``is_vnni``.
        is_vnni: whether mat2 is packed.
        scale: float32, one element or [B], for a float8_e4m3fn mat2; else None.
    """


def _product(op: str, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """What the fake kernels of the products of one weight check, and their result."""
    torch._check(
        mat1.dim() >= 2, lambda: f"sgl_kernel::{op}: mat1: expected [..., M, K] (2-D or more)"
    )
    torch._check(mat2.dim() == 2, lambda: f"sgl_kernel::{op}: mat2: expected [N, K] (2-D)")
    torch._check(
        mat1.size(-1) == mat2.size(1),
        lambda: (
            f"sgl_kernel::{op}: mat1: expected size {mat2.size(1)} (K of mat2) in dimension "
            f"{mat1.dim() - 1}, got {mat1.size(-1)}"
        ),
    )
    return mat1.new_empty((*mat1.shape[:-1], mat2.size(0)), dtype=out_dtype)
