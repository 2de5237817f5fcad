"""Random arguments of the ops against their contract, written down once more, in Python.

What the contract allows must run; anything else must be refused by a message that names the op and
the argument, before anything is written. The calls are the same in every run.
"""

import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from torch import Tensor

import sgl_kernel
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="per-commit")

E4M3, BF16, F16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
ACT_DTYPES, BIAS_DTYPES = (BF16, F16), (F32, BF16, F16)
B, M, N, K = 2, 3, 5, 4


def ones(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape).to(dtype)


def good_arguments(op: str, act_dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, Any]:
    """A call that the op accepts."""
    if op == "convert_weight_packed":
        return {"weight": ones(N, K, dtype=E4M3)}
    if op == "bmm_cpu":
        return {
            "out": ones(B, M, N, dtype=out_dtype),
            "mat1": ones(B, M, K, dtype=act_dtype),
            "mat2": ones(B, N, K, dtype=E4M3),
            "is_vnni": True,
            "scale": ones(B),
        }
    arguments: dict[str, Any] = {
        "mat1": ones(M, K, dtype=act_dtype),
        "mat2": ones(N, K, dtype=BF16 if op == "weight_packed_linear" else E4M3),
        "bias": ones(N),
        "out_dtype": out_dtype,
        "is_vnni": True,
    }
    if op == "fp8_per_tensor_scaled_mm_cpu":
        arguments["scales2"] = ones()
    elif op == "fp8_per_channel_scaled_mm_cpu":
        arguments["scales2"] = ones(N)
    elif op == "fp8_scaled_mm_cpu":
        arguments["scales2"] = ones(3, 2)
        arguments["block_size"] = [2, 3]
    return arguments


OPS = (
    "convert_weight_packed",
    "bmm_cpu",
    "weight_packed_linear",
    "fp8_per_tensor_scaled_mm_cpu",
    "fp8_per_channel_scaled_mm_cpu",
    "fp8_scaled_mm_cpu",
)


def is_dense(tensor: Tensor | None, dtypes: tuple[torch.dtype, ...], *ranks: int) -> bool:
    return (
        tensor is not None
        and tensor.layout == torch.strided
        and tensor.dtype in dtypes
        and tensor.dim() in ranks
    )


def rows_are_dense(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.numel() == 0 or tensor.stride(-1) == 1


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share memory."""
    offsets = sum(
        (torch.arange(size) * stride).view(-1, *(1,) * (tensor.dim() - 1 - dim))
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    )
    return len(torch.as_tensor(offsets).unique()) < tensor.numel()


def scale_is_allowed(op: str, scale: Tensor | None, arguments: dict[str, Any]) -> bool:
    n, k = arguments["mat2"].shape[-2:]
    if not is_dense(scale, (F32,), *range(9)):
        return False
    assert scale is not None
    if op == "fp8_per_tensor_scaled_mm_cpu":
        return scale.numel() == 1
    if op == "bmm_cpu":
        one_each = scale.numel() == 1 or scale.shape == arguments["mat2"].shape[:1]
        return one_each and scale.is_contiguous()
    if op == "fp8_per_channel_scaled_mm_cpu":
        return scale.shape in ((n,), (n, 1)) and scale.is_contiguous()
    size = arguments["block_size"]
    if len(size) != 2 or min(size) < 1:
        return False
    return scale.shape == (-(-n // size[0]), -(-k // size[1])) and scale.is_contiguous()


def is_allowed(op: str, arguments: dict[str, Any]) -> bool:
    """The contract of each op, as the docstrings of sgl_kernel.ops tell it."""
    if op == "convert_weight_packed":
        weight = arguments["weight"]
        return is_dense(weight, (E4M3, BF16), 2, 3) and min(weight.shape[-2:]) >= 1
    mat1, mat2, bias = arguments["mat1"], arguments["mat2"], arguments.get("bias")
    rank = 3 if op == "bmm_cpu" else 2
    weight_dtypes = {"bmm_cpu": (E4M3, BF16), "weight_packed_linear": (BF16,)}.get(op, (E4M3,))
    if not (
        is_dense(mat1, ACT_DTYPES, rank)
        and is_dense(mat2, weight_dtypes, rank)
        and min(mat2.shape[-2:]) >= 1
        and (*mat1.shape[:-2], mat1.shape[-1]) == (*mat2.shape[:-2], mat2.shape[-1])
        and rows_are_dense(mat1)
        and mat2.is_contiguous()
    ):
        return False
    n = mat2.shape[-2]
    if op == "bmm_cpu":
        out = arguments["out"]
        if mat2.dtype == BF16 and arguments["scale"] is not None:
            return False
        return (
            is_dense(out, (mat1.dtype, F32), 3)
            and out.shape == (*mat1.shape[:2], n)
            and rows_are_dense(out)
            and not overlaps_itself(out)
            and (mat2.dtype == BF16 or scale_is_allowed(op, arguments["scale"], arguments))
        )
    if bias is not None and not (
        is_dense(bias, BIAS_DTYPES, 1) and bias.shape == (n,) and bias.is_contiguous()
    ):
        return False
    out_dtypes = (mat1.dtype, F32)
    if op == "weight_packed_linear":
        return arguments["out_dtype"] in (*out_dtypes, None)
    return arguments["out_dtype"] in out_dtypes and scale_is_allowed(
        op, arguments["scales2"], arguments
    )


DTYPES = (BF16, F16, F32, E4M3, torch.float64, torch.float8_e5m2, torch.int8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn, like: Tensor) -> Tensor:
    """A tensor that differs from `like` in dtype, shape, strides or layout, or in none of them."""
    shape = list(like.shape)
    if draw(st.booleans()):
        sizes = st.sampled_from((0, 1, B, M, N, K))
        if draw(st.booleans()) and shape:
            shape[draw(st.integers(0, len(shape) - 1))] = draw(sizes)
        else:
            shape = draw(st.lists(sizes, max_size=4))
    dtype = draw(st.sampled_from((like.dtype, *DTYPES)))
    form = draw(st.sampled_from(("contiguous", "strided", "reversed", "repeated", "sparse")))
    if form == "strided" and shape:
        tensor = ones(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    elif form == "reversed":
        tensor = ones(*shape[::-1], dtype=dtype).permute([*range(len(shape))][::-1])
    elif form == "repeated" and shape:
        tensor = ones(1, *shape[1:], dtype=dtype).expand(shape)
    elif form == "sparse":
        indices, values = torch.empty(len(shape), 0, dtype=torch.int64), torch.empty(0, dtype=dtype)
        tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    else:
        tensor = ones(*shape, dtype=dtype)
    return tensor


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    op = draw(st.sampled_from(OPS))
    act_dtype = draw(st.sampled_from(ACT_DTYPES))
    arguments = good_arguments(op, act_dtype, draw(st.sampled_from((act_dtype, F32))))
    names = st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)
    for name in draw(names):
        if name == "is_vnni":
            arguments[name] = draw(st.booleans())
        elif name == "out_dtype":
            optional = st.none() if op == "weight_packed_linear" else st.nothing()
            arguments[name] = draw(optional | st.sampled_from(DTYPES))
        elif name == "block_size":
            edges = st.integers(-2, 6) | st.sampled_from((2**63 - 1, -(2**63)))
            length = draw(st.sampled_from((2, 2, 2, 0, 1, 3)))
            arguments[name] = [draw(edges) for _ in range(length)]
        else:
            arguments[name] = draw(st.none() | tensors(arguments[name]))
    return op, arguments


def check(op: str, arguments: dict[str, Any]) -> None:
    call: Callable[..., Any] = getattr(sgl_kernel, op)
    allowed = is_allowed(op, arguments)
    event(f"{op}: {'runs' if allowed else 'refuses'}")  # pytest --hypothesis-show-statistics
    if allowed:
        call(**arguments)
        return
    out = arguments.get("out")
    outs = [out] if out is not None and out.layout == torch.strided else []
    before = [out.double() for out in outs]
    names = "|".join(arguments)
    message = rf"sgl_kernel::{op}: ({names}): expected .+, got .+"
    with pytest.raises(RuntimeError) as error:
        call(**arguments)
    assert re.search(message, str(error.value)), str(error.value)
    for out, was in zip(outs, before, strict=True):  # a product of ones is 4, out is 1
        assert torch.equal(out.double(), was), "refused, but out was written"


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,  # nor does a busy machine fail
        suppress_health_check=[HealthCheck.too_slow],
    )


@fuzz(200)
@given(calls())
def test_random_arguments(call: tuple[str, dict[str, Any]]) -> None:
    check(*call)


@pytest.mark.slow
@fuzz(2000)
@given(calls())
def test_many_random_arguments(call: tuple[str, dict[str, Any]]) -> None:
    check(*call)
