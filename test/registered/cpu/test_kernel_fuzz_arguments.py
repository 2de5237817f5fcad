"""Random arguments of every op against its contract (srt/test/kernels/).

What the contract allows must run; anything else must be refused by a message that names the op and
the argument, before anything is written. The calls are the same in every run.
"""

import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import event, given
from torch import Tensor

import sgl_kernel
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels import FAMILIES, RECORDS, all_ops, is_allowed
from srt.test.kernels.properties import BF16, E4M3, F16, F32, FLOATS, INDICES, Arguments, ones
from srt.test.kernels.record import fuzz

register_cpu_ci(est_time=20, suite="per-commit")

DTYPES = (
    BF16,
    F16,
    F32,
    E4M3,
    torch.float64,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
    *INDICES,
)
SIZES = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7))
NUMBERS = st.sampled_from(
    (0.0, 1.0, -1.0, 0.5, 2.0, 1e300, -1e300, 1e-60, 1e-42, 1e30, torch.inf, torch.nan)
)
EDGES = st.integers(-2, 8) | st.sampled_from((2**63 - 1, -(2**63)))


@st.composite
def tensors(draw: st.DrawFn, like: Tensor) -> Tensor:
    """A tensor that differs from `like` in dtype, shape, strides, layout or numbers, or in none."""
    shape = list(like.shape)
    if draw(st.booleans()):
        if draw(st.booleans()) and shape:
            shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZES)
        else:
            shape = draw(st.lists(SIZES, max_size=4))
    dtype = draw(st.sampled_from((like.dtype, like.dtype, *DTYPES)))
    forms = ("contiguous", "strided", "reversed", "repeated", "sparse", "gradient")
    form = draw(st.sampled_from(forms))
    value = draw(st.sampled_from((1, 1, 0, -1, 4, 5, 7, 2**20))) if like.dtype in INDICES else 1

    def filled(*sizes: int) -> Tensor:
        return (ones(*sizes) * value).to(dtype)

    if form == "strided" and shape:
        return filled(*shape[:-1], 2 * shape[-1])[..., ::2]
    if form == "reversed":
        return filled(*shape[::-1]).permute([*range(len(shape))][::-1])
    if form == "repeated" and shape:
        return filled(1, *shape[1:]).expand(shape)
    if form == "gradient" and dtype in FLOATS:
        return filled(*shape).requires_grad_()
    if form == "sparse":
        indices, values = torch.empty(len(shape), 0, dtype=torch.int64), torch.empty(0, dtype=dtype)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return filled(*shape)


def other_value(draw: st.DrawFn, name: str, value: Any) -> Any:
    """Something else in place of an argument, of the type that its schema has."""
    if isinstance(value, bool):
        return draw(st.booleans())
    if isinstance(value, float):
        return draw(NUMBERS)
    if isinstance(value, int):
        return draw(EDGES if name != "row_dim" else EDGES | st.none())
    if isinstance(value, list):
        length = draw(st.sampled_from((2, 2, 2, 0, 1, 3)))
        return [draw(EDGES) for _ in range(length)]
    if isinstance(value, torch.dtype):
        return draw(st.sampled_from(DTYPES))
    return draw(st.none() | tensors(value))


@st.composite
def calls(draw: st.DrawFn, family: str) -> tuple[str, Arguments]:
    """An op, and arguments of which one or two may not be good."""
    op = draw(st.sampled_from([*FAMILIES[family]]))
    dtype = draw(st.sampled_from(RECORDS[op].dtypes))
    arguments = RECORDS[op].arguments(dtype, draw(st.sampled_from((dtype, F32))))
    names = sorted(name for name, value in arguments.items() if value is not None)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        others = [x for x in arguments.values() if isinstance(x, Tensor)]
        if isinstance(arguments[name], Tensor) and draw(st.integers(0, 4)) == 0:
            arguments[name] = draw(st.sampled_from(others))  # one tensor in two places
        else:
            arguments[name] = other_value(draw, name, arguments[name])
    schema = getattr(torch.ops.sgl_kernel, op).default._schema
    has_default = any(a.name == "out_dtype" and a.has_default_value() for a in schema.arguments)
    if has_default and draw(st.booleans()):
        arguments["out_dtype"] = None
    return op, arguments


def bits(tensor: Tensor) -> Tensor:
    """What a tensor shows, for comparison; any dtype and strides."""
    return tensor.detach().to(torch.float64).nan_to_num(-7.0)


def check(op: str, arguments: Arguments) -> None:
    """Make the call and compare what happens with the contract."""
    call: Callable[..., Any] = getattr(sgl_kernel, op)
    allowed = is_allowed(op, arguments)
    event(f"{op}: {'runs' if allowed else 'refuses'}")  # pytest --hypothesis-show-statistics
    if allowed:
        call(**arguments)
        return
    given = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }
    before = {name: bits(value) for name, value in given.items()}
    names = "|".join(arguments)
    message = rf"sgl_kernel::{op}: ({names})[^:]*: expected .+, got .+"
    with pytest.raises(RuntimeError) as error:
        call(**arguments)
    assert re.search(message, str(error.value)), str(error.value)
    for name, value in given.items():
        assert torch.equal(bits(value), before[name]), f"refused, but {name} was written"


def test_every_op_has_a_record() -> None:
    assert sorted(RECORDS) == all_ops(), "write the op's record in srt/test/kernels/"


@pytest.mark.parametrize("op", RECORDS)
def test_good_arguments_are_good(op: str) -> None:
    for dtype in RECORDS[op].dtypes:
        arguments = RECORDS[op].arguments(dtype, F32)
        assert is_allowed(op, arguments)
        getattr(sgl_kernel, op)(**arguments)


def run_calls(family: str, examples: int) -> None:
    """Draw that many calls of the family's ops."""

    @fuzz(examples)
    @given(calls(family))
    def run(call: tuple[str, Arguments]) -> None:
        check(*call)

    test: Callable[[], None] = run
    test()


@pytest.mark.parametrize("family", FAMILIES)
def test_random_arguments(family: str) -> None:
    run_calls(family, 200)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_arguments(family: str) -> None:
    run_calls(family, 2000)
