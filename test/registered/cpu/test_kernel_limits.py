"""What an op refuses because of its size or its kind: numbers that float32 does not hold, integers
at the ends of their range, inputs that require grad, memory that is not there; and scratch, which
is bounded for every shape.
"""

import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import isa, reference_mm
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels import all_ops, sample_calls

register_cpu_ci(est_time=10, suite="per-commit")

TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def schema(op: str) -> Any:
    return getattr(torch.ops.sgl_kernel, op).default._schema


def named(op: str, call: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip([argument.name for argument in schema(op).arguments], call, strict=False))


def run(op: str, call: dict[str, Any]) -> Any:
    return getattr(torch.ops.sgl_kernel, op).default(**call)


def arguments_of(kind: str) -> list[tuple[str, str]]:
    return [
        (op, argument.name)
        for op in all_ops()
        for argument in schema(op).arguments
        if str(argument.type) in (kind, f"Optional[{kind}]", f"List[{kind}]")
        and argument.name != "out_dtype"
    ]


@pytest.mark.parametrize(("op", "argument"), arguments_of("float"))
def test_numbers_are_what_float32_makes_of_them(op: str, argument: str) -> None:
    call = named(op, sample_calls(op)[0])
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(RuntimeError, match=f"{op}: {argument}: expected a finite number"):
            run(op, {**call, argument: value})
    # Infinity, 0 and a number with a few bits.
    for value in (1e300, -1e300, 1e-60, 1e-42):
        expected = re.escape("1.2e-38 to 3.4e38 in size (float32)")
        with pytest.raises(RuntimeError, match=f"{op}: {argument}: expected .*{expected}, got"):
            run(op, {**call, argument: value})
    if argument != "sm_scale":
        with pytest.raises(RuntimeError, match=f"{op}: {argument}: expected a finite number"):
            run(op, {**call, argument: -1.0})
    run(op, {**call, argument: 2.0**-126})


@pytest.mark.parametrize(("op", "argument"), arguments_of("int"))
@pytest.mark.parametrize("value", [2**63 - 1, 2**63 - 2, 2**62, 2**32 + 1, -1, -(2**63)])
def test_integers_at_the_ends(op: str, argument: str, value: int) -> None:
    """They are refused or do what smaller ones do."""
    for sample in sample_calls(op):
        call = named(op, sample)
        is_list = isinstance(call.get(argument), list)
        message = ""
        try:
            run(op, {**call, argument: [value, value] if is_list else value})
        except RuntimeError as error:
            message = str(error)
        assert re.match(f"sgl_kernel::{op}: .*expected .*got|$", message), message


def test_a_longest_prompt_near_the_end_of_int64() -> None:
    calls = [named("extend_attention_cpu", call) for call in sample_calls("extend_attention_cpu")]
    for call in calls:
        run("extend_attention_cpu", call)
        expected = call["o_extend"].clone()
        for most in (2**63 - 1, 2**62):
            call["o_extend"].zero_()
            run("extend_attention_cpu", {**call, "max_len_extend": most})
            assert torch.equal(call["o_extend"], expected)


def test_heads_without_columns_of_any_size() -> None:
    empty, angles = torch.zeros(2, 0).half(), torch.zeros(4, 2).half()
    with pytest.raises(RuntimeError, match="head_size: expected heads of 1 to 1048576 elements"):
        sgl_kernel.rotary_embedding_cpu(torch.tensor([0, 1]), empty, empty, 2**62, angles, True)


@pytest.mark.parametrize("op", all_ops())
def test_inputs_that_require_grad(op: str) -> None:
    for sample in sample_calls(op):
        call = named(op, sample)
        for name, tensor in call.items():
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                continue
            leaf = (
                tensor.detach().clone().as_strided(tensor.shape, tensor.stride())
                if (tensor.numel() and tensor.is_contiguous())
                else tensor.detach()
            )
            leaf.requires_grad_()
            for wanting in (leaf, leaf.view_as(leaf)):
                with pytest.raises(
                    RuntimeError,
                    match=rf"{op}: {name}: expected a tensor without gradient, or a call under "
                    r"torch.no_grad\(\), got one that requires grad",
                ):
                    run(op, {**call, name: wanting})
            with torch.no_grad():
                run(op, {**call, name: leaf})
            leaf.requires_grad_(False)


def test_a_compiled_function_refuses_gradients_while_it_is_traced() -> None:
    sgl_kernel.fakes.register()
    x, weight = torch.randn(2, 8, requires_grad=True), torch.rand(8)
    with torch._subclasses.FakeTensorMode() as mode:
        with pytest.raises(
            RuntimeError, match="rmsnorm_cpu: input: expected a tensor without grad"
        ):
            sgl_kernel.rmsnorm_cpu(mode.from_tensor(x), mode.from_tensor(weight), 1e-5)
        with torch.no_grad():
            sgl_kernel.rmsnorm_cpu(mode.from_tensor(x), mode.from_tensor(weight), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int32, "int32"),
        (torch.float8_e5m2, "float8_e5m2"),
        (torch.float64, "float64"),
        (torch.uint16, "uint16"),
        (torch.complex64, "complex64"),
        (torch.bool, "bool"),
        (torch.float8_e8m0fnu, "float8_e8m0fnu"),
        (torch.float4_e2m1fn_x2, "float4_e2m1fn_x2"),
    ],
)
def test_dtypes_have_the_names_that_python_gives_them(dtype: torch.dtype, name: str) -> None:
    assert str(dtype) == f"torch.{name}"
    weight = torch.rand(8)
    with pytest.raises(RuntimeError, match=f"^sgl_kernel::rmsnorm_cpu: .*got {name}$"):
        sgl_kernel.rmsnorm_cpu(torch.empty(2, 8, dtype=dtype), weight, 1e-5)
    with pytest.raises(RuntimeError, match=f"^sgl_kernel::rmsnorm_cpu: .*got {name}$"):
        sgl_kernel.rmsnorm_cpu(torch.ones(2, 8), weight, 1e-5, dtype)


@pytest.mark.parametrize("device", ["meta"])
def test_devices_have_the_names_that_python_gives_them(device: str) -> None:
    with pytest.raises(RuntimeError, match=f"expected a tensor on cpu, got {device}$"):
        sgl_kernel.convert_weight_packed(torch.ones(4, 4, dtype=BF16, device=device))


def test_a_result_that_does_not_fit_into_memory() -> None:
    rows = 1 << 40
    for op, call, size in (
        ("rmsnorm_cpu", (torch.ones(1, 64).expand(rows, 64), torch.rand(64), 1e-5), rows * 256),
        ("silu_and_mul_cpu", (torch.ones(1, 64).half().expand(rows, 64),), rows * 64),
        (
            "weight_packed_linear",
            (
                torch.ones(1, 8, dtype=BF16).expand(rows, 8),
                torch.ones(32, 8, dtype=BF16),
                None,
                False,
            ),
            rows * 64,
        ),
    ):
        with pytest.raises(
            RuntimeError,
            match=f"^sgl_kernel::{op}: out of memory: there are no {size} bytes for the result$",
        ):
            run(op, named(op, call))


SMALL_BLOCKS = """
import resource, torch, sgl_kernel
torch.set_num_threads(2)
torch.manual_seed(0)
mat1 = torch.randn(max({rows}), {K}).to(torch.bfloat16)
mat2 = torch.randn({N}, {K}).to(torch.float8_e4m3fn)
scales = torch.rand({N}, {K})
weight = mat2.double() * scales.double()
exact, size = mat1.double() @ weight.T, mat1.double().abs() @ weight.abs().T
del weight
# All that a product may take.
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), -1))
for M in {rows}:
    out = sgl_kernel.fp8_scaled_mm_cpu(mat1[:M], mat2, scales, [1, 1], None, torch.float32, False)
    assert ((out - exact[:M]).abs() <= 3 * {K} * 2.0**-24 * size[:M]).all(), M
"""


@pytest.mark.parametrize(
    ("K", "N"), [(200_000, 2), pytest.param(1_000_000, 1, marks=pytest.mark.slow)]
)
def test_the_smallest_blocks_along_a_long_k(K: int, N: int) -> None:
    """Scratch that holds a padded block of K for each scale takes 33 GB for K = 1,000,000."""
    program = SMALL_BLOCKS.format(rows=[1, 4, 16, 17], N=N, K=K)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_a_row_has_the_same_bits_in_runs_of_k(tier: str, dtype: torch.dtype) -> None:
    """One row, few and many along a K that is converted whole, in runs, and in panels."""
    torch.manual_seed(2)
    K, N = 140_000, 40
    x, w = torch.randn(20, K).to(BF16), torch.randn(N, K).to(dtype)
    with isa(tier):
        products = []
        for rows in (1, 4, 9, 16, 20):
            if dtype is BF16:
                out = sgl_kernel.weight_packed_linear(x[:rows], w, None, False, F32)
            else:
                scales = torch.linspace(0.5, 2, 2 * 1400).view(2, 1400)
                out = sgl_kernel.fp8_scaled_mm_cpu(x[:rows], w, scales, [32, 100], None, F32, False)
            products.append(out)
    for product in products:
        assert torch.equal(product, products[-1][: len(product)])
    if dtype is BF16:
        exact, bound = reference_mm(x[:1], w, None, None)
        assert ((products[0] - exact).abs() <= bound).all()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("columns", [16384, 16385, 16400, 32768, 50001])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms_of_rows_that_go_by_in_pieces(tier: str, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    x, before = torch.randn(2, columns).to(dtype), torch.randn(2, columns).to(dtype)
    weight = torch.rand(columns).to(dtype)
    sums = x.double() + before.double()
    exact = sums / (sums.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    unit = 2.0**-24 if dtype is F32 else 2.0**-8
    with isa(tier):
        residual = before.clone()
        out = sgl_kernel.add_rmsnorm_cpu(x, residual, weight, 1e-5)
        inside, in_place = before.clone(), x.clone()
        sgl_kernel.fused_add_rmsnorm_cpu(in_place, inside, weight, 1e-5)
        alone = sgl_kernel.rmsnorm_cpu(x[1:], weight, 1e-5)
        both = sgl_kernel.rmsnorm_cpu(x, weight, 1e-5)
    assert torch.equal(residual, sums.float().to(dtype))
    assert ((out - exact).abs() <= exact.abs() * (unit + columns / 8 * 2.0**-24)).all()
    assert torch.equal(in_place, out) and torch.equal(inside, residual)
    assert torch.equal(both[1:], alone)


def test_a_context_of_many_turns() -> None:
    """Partial results of long contexts are merged in turns: they take 64 MiB, not 520."""
    torch.manual_seed(4)
    heads, length, requests = 64, 60_000, 2
    cache = torch.randn(length, 1, 64).to(BF16)
    query, out = torch.randn(requests, heads, 64).half(), torch.empty(requests, heads, 64).half()
    table = torch.stack([torch.randperm(length) for _ in range(requests)]).int()
    call = (query, cache, cache, out, None, None, None, None, table, torch.arange(requests))
    lengths = torch.tensor([length, length - 77])
    sgl_kernel.decode_attention_cpu(*call, lengths, 0.2, 0.0)
    alone = torch.empty_like(out)
    for r in range(requests):
        sgl_kernel.decode_attention_cpu(
            query[r : r + 1], cache, cache, alone[r : r + 1], None, None, None, None,
            table[r : r + 1], torch.tensor([0]), lengths[r : r + 1], 0.2, 0.0,
        )  # fmt: skip
    assert torch.equal(out, alone)
    for r in range(requests):
        rows = cache[table[r, : lengths[r]].long(), 0].double()
        expected = torch.softmax(query[r].double() @ rows.T * 0.2, -1) @ rows
        assert ((out[r] - expected).abs() <= 2.0**-10 * (expected.abs() + 0.05)).all()


def test_heads_of_a_size_that_no_model_has() -> None:
    cache = torch.zeros(1, 1, 16385)
    q, table = torch.zeros(1, 1, 16385), torch.zeros(1, 4, dtype=torch.int32)
    one = torch.tensor([0])
    with pytest.raises(RuntimeError, match="k_cache: expected heads of at most 16384 elements"):
        sgl_kernel.decode_attention_cpu(
            q, cache, cache, q.clone(), None, None, None, None, table, one, one + 1, 1.0, 0.0
        )
    with pytest.raises(RuntimeError, match="gating_output: expected at most 1048576 experts"):
        sgl_kernel.topk_softmax_cpu(torch.zeros(1, 1), torch.zeros(1, 2**20 + 1), 1, True)


def test_many_heads_of_keys_take_no_more_scratch() -> None:
    """More than those whose queries a thread holds."""
    torch.manual_seed(5)
    heads = 5000
    cache = torch.randn(70, heads, 2)
    q, out = torch.randn(1, heads, 2), torch.empty(1, heads, 2)
    table, length = torch.randperm(70).int()[None], torch.tensor([70])
    sgl_kernel.decode_attention_cpu(
        q, cache, cache, out, None, None, None, None, table, torch.tensor([0]), length, 0.5, 0.0
    )
    rows = cache[table[0].long()].double()
    weights = torch.softmax(torch.einsum("hd,khd->hk", q[0].double(), rows) * 0.5, -1)
    expected = torch.einsum("hk,khd->hd", weights, rows)
    assert ((out[0] - expected).abs() <= 1e-5).all()
