"""The norms of whole rows: sample calls, contracts, random calls."""

import functools
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch

import sgl_kernel
from sgl_kernel.testing import check_close
from srt.test.kernels.properties import (
    F32,
    FLOATS,
    Arguments,
    is_dense,
    is_eps,
    is_vector,
    ones,
    overlaps_itself,
    rows_are_dense,
)
from srt.test.kernels.record import (
    SEEDS,
    OpRecord,
    Records,
    check_margins,
    margins,
    rows_in_nan,
    sizes,
)
from srt.test.kernels.references import reference_rmsnorm

NORM, ADD_NORM, FUSED_ADD_NORM = "rmsnorm_cpu", "add_rmsnorm_cpu", "fused_add_rmsnorm_cpu"


def _samples(op: str) -> list[tuple[Any, ...]]:
    x, weight = torch.randn(3, 8).half(), torch.rand(8)
    strided = torch.randn(3, 4, 8).half()[:, 1:]
    if op == NORM:
        return [(x, weight, 1e-5), (strided, weight, 1e-5, F32), (x[0], weight, 1e-5)]
    if op == ADD_NORM:
        return [
            (x, x.float(), weight, 1e-5),
            (x.float(), x.float(), weight, 1e-5, torch.float16),
        ]
    return [(x, x.float(), weight, 1e-5), (strided, torch.randn(3, 3, 8), weight, 1e-5)]


def _arguments(op: str, dtype: torch.dtype, out_dtype: torch.dtype) -> Arguments:
    arguments: Arguments = {"input": ones(3, 4, dtype=dtype), "weight": ones(4), "eps": 1e-5}
    if op != NORM:
        arguments["residual"] = ones(3, 4)
    if op != FUSED_ADD_NORM:
        arguments["out_dtype"] = out_dtype
    return arguments


def _is_allowed(op: str, arguments: Arguments) -> bool:
    x = arguments["input"]
    if not (
        arguments.get("out_dtype") in (None, *FLOATS)
        and is_dense(x, FLOATS)
        and x.dim() >= 1
        and rows_are_dense(x)
        and x.shape[-1] >= 1
        and is_vector(arguments["weight"], FLOATS, x.shape[-1])
        and is_eps(arguments["eps"])
    ):
        return False
    if op == NORM:
        return True
    residual = arguments["residual"]
    return (
        is_dense(residual, FLOATS)
        and residual.shape == x.shape
        and rows_are_dense(residual)
        and not overlaps_itself(residual)
        and (op == ADD_NORM or not overlaps_itself(x))
    )


@dataclass(frozen=True)
class NormCall:
    """A norm, with an addition before it or without."""

    op: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    residual_dtype: torch.dtype
    out_dtype: torch.dtype | None
    eps: float
    exponent: int
    margin: tuple[int, int]
    transposed: bool
    residual_transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        buffer, x = rows_in_nan(self.sizes, self.dtype, self.margin, self.transposed)
        x.copy_(torch.randn(self.sizes) * 2.0**self.exponent)
        weight = (torch.randn(self.sizes[-1])).to(self.weight_dtype)
        total, before = x.float(), x.clone()
        if self.op == NORM:
            got = sgl_kernel.rmsnorm_cpu(x, weight, self.eps, self.out_dtype)
        else:
            margins = rows_in_nan(
                self.sizes, self.residual_dtype, self.margin[::-1], self.residual_transposed
            )
            residual = margins[1]
            residual.copy_(torch.randn(self.sizes))
            total = total + residual.float()
            if self.op == ADD_NORM:
                got = sgl_kernel.add_rmsnorm_cpu(x, residual, weight, self.eps, self.out_dtype)
            else:
                sgl_kernel.fused_add_rmsnorm_cpu(x, residual, weight, self.eps)
                got = x
            assert torch.equal(residual, total.to(self.residual_dtype)), tier
            check_margins(*margins)
        if self.op != FUSED_ADD_NORM:
            assert torch.equal(x, before) and got.is_contiguous()
            assert got.dtype == (self.out_dtype or self.dtype)
        check_margins(buffer, x)
        check_close(got, *reference_rmsnorm(total, weight, self.eps), tier)


@st.composite
def norms(draw: st.DrawFn, op: str) -> NormCall:
    """Calls of the op."""
    leading = draw(st.lists(st.integers(0, 5), max_size=4))
    return NormCall(
        op=op,
        sizes=(*leading, draw(sizes(1, 600))),
        dtype=draw(st.sampled_from(FLOATS)),
        weight_dtype=draw(st.sampled_from(FLOATS)),
        residual_dtype=draw(st.sampled_from(FLOATS)),
        out_dtype=draw(st.sampled_from((None, *FLOATS))) if op != FUSED_ADD_NORM else None,
        eps=draw(st.sampled_from((1e-5, 1e-6))),
        exponent=draw(st.integers(-6, 6)),
        margin=draw(margins()),
        transposed=draw(st.booleans()),
        residual_transposed=draw(st.booleans()),
        seed=draw(SEEDS),
    )


RECORDS: Records = {
    op: OpRecord(
        samples=functools.partial(_samples, op),
        arguments=functools.partial(_arguments, op),
        is_allowed=functools.partial(_is_allowed, op),
        calls=norms(op),
    )
    for op in (NORM, ADD_NORM, FUSED_ADD_NORM)
}
