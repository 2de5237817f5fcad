"""A W8A16 FP8 GEMM in Triton, written apart from the CPU kernels to be compared with them.

One kernel serves every scale: a per-tensor scale is one block of the whole weight, per-channel
scales are blocks of one row. It shares nothing with the CPU kernels: e4m3 is decoded by integer
operations, so neither the device's nor Torch's conversion is trusted, and nothing is packed.

Products are f32 FMAs (``input_precision="ieee"``), not tensor cores: how those round their sums is
not published, so no bound would hold for them. Without a CUDA device the kernel runs in Triton's
interpreter, on the CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Also what tl.dot needs at least: 16 in every dimension.
TILE_M, TILE_N, TILE_K = 16, 32, 32


# Where the kernel runs; on the CPU it is interpreted.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# The interpreter evaluates this function's body as it is, so it calls only what Triton defines in
# Python as a builtin: a function of tl that is itself compiled (tl.zeros, tl.cdiv) would need
# TRITON_INTERPRET in the environment of the whole process, before Triton is first imported.
def _w8a16_kernel(  # type: ignore[no-untyped-def]  # Triton gives its arguments their types
    mat1,  # [M, K] bf16 or f16, rows mat1_stride apart
    codes,  # [N, K] uint8, the bits of e4m3 weights
    scales,  # [ceil(N / block_n), ceil(K / block_k)] f32
    bias,  # [N] f32, read only with HAS_BIAS
    out,  # [M, N] f32
    M,
    N,
    K,
    mat1_stride,
    block_n,
    block_k,
    HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k_blocks = (K + block_k - 1) // block_k

    total = tl.full((TILE_M, TILE_N), 0.0, tl.float32)
    for k_block in range(k_blocks):
        # The sum over one block of K, which shares a scale for each column.
        partial = tl.full((TILE_M, TILE_N), 0.0, tl.float32)
        end = min((k_block + 1) * block_k, K)
        for start in range(k_block * block_k, end, TILE_K):
            k = start + tl.arange(0, TILE_K)
            activation = tl.load(
                mat1 + rows[:, None] * mat1_stride + k[None, :],
                mask=(rows[:, None] < M) & (k[None, :] < end),
                other=0.0,
            ).to(tl.float32)
            code = tl.load(
                codes + columns[None, :] * K + k[:, None],
                mask=(columns[None, :] < N) & (k[:, None] < end),
                other=0,
            ).to(tl.int32)
            # e4m3 is S.EEEE.MMM with bias 7. Normal: its exponent and mantissa moved to where f32
            # (bias 127) has them. Subnormal: m * 2^-9. All ones: NaN; there are no infinities.
            magnitude = code & 0x7F
            normal = ((magnitude << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
            weight = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
            weight = tl.where(magnitude == 0x7F, float("nan"), weight)
            weight = tl.where(code >= 0x80, -weight, weight)
            partial = tl.dot(activation, weight, partial, input_precision="ieee")
        scale = tl.load(
            scales + (columns // block_n) * k_blocks + k_block, mask=columns < N, other=0.0
        )
        total += partial * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
    tl.store(
        out + rows[:, None] * N + columns[None, :],
        total,
        mask=(rows[:, None] < M) & (columns[None, :] < N),
    )


def jit(interpret: bool) -> Any:
    """The kernel, compiled for the CUDA device or interpreted."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        return triton.jit(_w8a16_kernel)


_KERNEL = jit(interpret=DEVICE.type == "cpu")


def w8a16_mm(
    mat1: Tensor, mat2: Tensor, scales: Tensor, block_size: tuple[int, int], bias: Tensor | None
) -> Tensor:
    """``mat1 @ (mat2 * scales of its blocks).T + bias`` in f32.

    Args:
        mat1: [M, K] bfloat16 or float16, unit stride in K.
        mat2: [N, K] float8_e4m3fn, contiguous, not packed.
        scales: [ceil(N / bn), ceil(K / bk)] float32, contiguous.
        block_size: (bn, bk), each at least 1.
        bias: [N] float32, or None.

    Returns:
        [M, N] float32. All tensors are on the CPU, and copied to the device and back.
    """
    (M, K), N = mat1.shape, mat2.shape[0]
    block_n, block_k = block_size
    assert mat1.stride(1) == 1 and mat2.shape == (N, K) and mat2.is_contiguous()
    assert scales.shape == (-(-N // block_n), -(-K // block_k)) and scales.is_contiguous()
    rows = mat1.to(DEVICE)
    out = torch.full((M, N), torch.nan, device=DEVICE)
    _KERNEL[(-(-M // TILE_M), -(-N // TILE_N))](
        rows,
        mat2.view(torch.uint8).to(DEVICE),
        scales.to(DEVICE),
        out if bias is None else bias.to(DEVICE),  # without a bias, a pointer that is never read
        out,
        M,
        N,
        K,
        rows.stride(0),
        block_n,
        block_k,
        HAS_BIAS=bias is not None,
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        TILE_K=TILE_K,
    )
    return out.cpu()
