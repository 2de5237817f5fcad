"""Ops on rows between a transformer's products: norms, the gate, the token table, the router.

Names, argument order and meaning are those of SGLang's CPU backend where it has the op; optional
arguments behind them are ours. The body of an op is its fake kernel, see :mod:`sgl_kernel.fakes`.

T tokens or M rows; `float` means float32, bfloat16 or float16. Last dimensions have unit stride,
all others may be strided, so slices of a fused projection are taken as they are. Every op raises
``RuntimeError`` for a bad argument, before anything is computed or written; the message names the
op, the argument, what was expected and what came. No rows: nothing is done.

Numerics: float32 inside, one rounding at the end. See docs/numerics.md.
"""

import torch
from torch import Tensor

from sgl_kernel._op import op

__all__ = [
    "add_rmsnorm_cpu",
    "concat_columns_cpu",
    "fused_add_rmsnorm_cpu",
    "packed_embedding_cpu",
    "rmsnorm_cpu",
    "silu_and_mul_cpu",
    "topk_softmax_cpu",
]


@op
def packed_embedding_cpu(
    indices: Tensor, weight: Tensor, is_vnni: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Rows of a token table: ``weight[indices]`` of the unpacked weight.

    With tied embeddings the packed lm_head is the only copy of the table; this is its lookup.

    Args:
        indices: [T] int64 or int32.
        weight: [N, K] bfloat16 or float16.
        is_vnni: packed by :func:`sgl_kernel.convert_weight_packed`, else row-major.
        out_dtype: float; weight's dtype when None.

    Returns:
        [T, K].
    """
    shape = (indices.shape[0], weight.shape[1])
    return weight.new_empty(shape, dtype=out_dtype or weight.dtype)


@op
def rmsnorm_cpu(
    input: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``input / sqrt(mean(input^2) + eps) * weight`` over the last dimension.

    Args:
        input: [..., N] float.
        weight: [N] float.
        eps: added to the mean square.
        out_dtype: float; input's dtype when None.

    Returns:
        A contiguous tensor of input's shape.
    """
    return input.new_empty(input.shape, dtype=out_dtype or input.dtype)


@op
def fused_add_rmsnorm_cpu(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += input``, then ``input = rmsnorm(residual)``, both in place.

    The norm is that of the float32 sum, before its rounding to residual's dtype.

    Args:
        input: [..., N] float.
        residual: of input's shape, of any of the dtypes.
        weight: [N] float.
        eps: added to the mean square.
    """


@op
def add_rmsnorm_cpu(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """:func:`fused_add_rmsnorm_cpu` that leaves input as it is.

    Args:
        input, residual, weight, eps: as there; only residual is written.
        out_dtype: float; input's dtype when None.

    Returns:
        The norm, contiguous, of input's shape.
    """
    return input.new_empty(input.shape, dtype=out_dtype or input.dtype)


@op
def silu_and_mul_cpu(input: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``silu(input[..., :N]) * input[..., N:]``.

    Args:
        input: [..., 2 N] float.
        out_dtype: float; input's dtype when None.

    Returns:
        [..., N], contiguous.
    """
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    return input.new_empty(shape, dtype=out_dtype or input.dtype)


@op
def concat_columns_cpu(first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor:
    """The columns of several results side by side, copied. Unlike ``torch.cat`` it is recorded.

    Args:
        first: [M, N1] float; rows may be strided, in all of them.
        second: [M, N2] of the same dtype.
        third: [M, N3] of the same dtype, or None.

    Returns:
        [M, N1 + N2 + N3] of that dtype.
    """
    columns = first.shape[1] + second.shape[1] + (0 if third is None else third.shape[1])
    return first.new_empty((first.shape[0], columns))


@op
def topk_softmax_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The router of a mixture of experts: softmax over the experts, then the largest of them.

    Args:
        hidden_states: [M, K]; only M is looked at.
        gating_output: [M, experts] float.
        topk: 1 to experts.
        renormalize: divide the chosen weights by their sum.
        correction_bias: [experts] float, or None. Experts are chosen, and ordered, by probability
            plus bias; their weights are the probabilities without it.

    Returns:
        Weights [M, topk] float32 and expert indices [M, topk] int32, largest first; of equal
        ones the lower index first.
    """
    shape = (gating_output.shape[0], topk)
    return (
        gating_output.new_empty(shape, dtype=torch.float32),
        gating_output.new_empty(shape, dtype=torch.int32),
    )
