"""References, error bounds and inputs for the ops: what tests and benchmarks compare with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sgl_kernel._library import active_tier, set_isa

# Unit roundoff of each dtype: half of the distance from 1 to the next number.
UNIT_ROUNDOFF = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
# Half of the smallest subnormal, where rounding stops being relative.
HALF_SMALLEST = {
    torch.float32: 2.0**-150,
    torch.bfloat16: 2.0**-134,
    torch.float16: 2.0**-25,
}


def reference_mm(
    mat1: Tensor,
    mat2: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    segments: int = 1,
) -> tuple[Tensor, Tensor]:
    """``mat1 @ mat2.T * scale + bias`` in float64 from the values that are stored.

    Args:
        mat1: [..., M, K] of any float dtype.
        mat2: [..., N, K] unpacked, of any float dtype.
        scale: broadcastable to [..., M, N], or None.
        bias: [N] or None.
        segments: how many scales there are along K.

    Returns:
        The product [..., M, N], and for each element a bound on the error of computing it with K
        float32 products and additions in any order, followed by a float32 scale and bias:
        ``(K + 2 * segments) * 2^-24 * sum_k |a_k b_k| * |scale|`` plus the roundings of the bias
        (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
    """
    a, b = mat1.double(), mat2.double()
    product = a @ b.mT
    magnitude = a.abs() @ b.abs().mT
    if scale is not None:
        product = product * scale.double()
        magnitude = magnitude * scale.double().abs()
    roundoff = UNIT_ROUNDOFF[torch.float32]
    bound = (mat1.shape[-1] + 2 * segments) * roundoff * magnitude
    if bias is not None:
        product = product + bias.double()
        bound = bound + roundoff * (product.abs() + bias.double().abs())
    return product, bound


def dequantise_blocks(mat2: Tensor, scales2: Tensor, block_size: list[int]) -> Tensor:
    """The weight that block scales stand for, in float64.

    Args:
        mat2: [N, K] unpacked.
        scales2: [ceil(N / block_n), ceil(K / block_k)].
        block_size: [block_n, block_k].
    """
    n, k = mat2.shape
    rows = torch.arange(n) // block_size[0]
    columns = torch.arange(k) // block_size[1]
    return mat2.double() * scales2.double()[rows][:, columns]


def check_close(got: Tensor, expected: Tensor, bound: Tensor, what: str = "") -> None:
    """Raise ``AssertionError`` unless every element of ``got`` is within its bound.

    Args:
        got: the op's result; its dtype's own rounding is added to the bound.
        expected, bound: from :func:`reference_mm`.
        what: said in the message, for example the call that reproduces the failure.
    """
    if got.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)} != {tuple(expected.shape)}")
    allowed = bound + UNIT_ROUNDOFF[got.dtype] * (expected.abs() + bound) + HALF_SMALLEST[got.dtype]
    error = (got.double() - expected).abs()
    wrong = ~(error <= allowed)  # NaN is wrong too
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; first at {index}: "
            f"expected {expected[index].item():.9g}, got {got[index].item():.9g}, "
            f"allowed error {allowed[index].item():.3g}"
        )


@contextmanager
def isa(tier: str) -> Iterator[None]:
    """Use the kernels of one tier inside the ``with`` block; the whole process is affected."""
    before = active_tier()
    set_isa(tier)
    try:
        yield
    finally:
        set_isa(before)


def random_weight(dtype: torch.dtype, *shape: int) -> Tensor:
    """A weight of the given shape from Torch's global generator.

    float8_e4m3fn: every finite code with equal probability, subnormals and both zeros included.
    bfloat16, float16: standard normal.
    """
    if dtype != torch.float8_e4m3fn:
        return torch.randn(shape).to(dtype)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] ^= 1
    return codes.view(dtype)
