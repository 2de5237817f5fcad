"""Norms, the gate of SwiGLU and the router against float64, on every tier of this machine."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, isa
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels.references import U, reference_rmsnorm
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=8, suite="per-commit")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]
SIZES = (1, 3, 4, 7, 8, 15, 16, 17, 33, 63, 64, 65, 100, 576)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("tier", TIERS)
def test_rmsnorm(tier: str, n: int) -> None:
    for rows, dtype, out_dtype, weight_dtype in itertools.product(
        (0, 1, 5), DTYPES, (None, *DTYPES), DTYPES
    ):
        x = (torch.randn(rows, n + 3) * 3).to(dtype)[:, 2 : n + 2]
        weight = torch.randn(n).to(weight_dtype)
        expected, bound = reference_rmsnorm(x, weight, 1e-5)
        with isa(tier):
            got = sgl_kernel.rmsnorm_cpu(x, weight, 1e-5, out_dtype)
        assert got.dtype == (out_dtype or dtype)
        check_close(got, expected, bound, f"{tier} {rows}x{n} {dtype} -> {out_dtype}")


@pytest.mark.parametrize("tier", TIERS)
def test_rmsnorm_takes_heads_of_a_fused_projection(tier: str) -> None:
    heads = torch.randn(7, 6, 40).half()[:, 1:4]
    weight = torch.rand(40)
    with isa(tier):
        got = sgl_kernel.rmsnorm_cpu(heads, weight, 1e-6)
    check_close(got, *reference_rmsnorm(heads, weight, 1e-6), tier)
    assert got.is_contiguous()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("tier", TIERS)
def test_add_rmsnorm(tier: str, n: int) -> None:
    for rows, dtype, residual_dtype, out_dtype in itertools.product(
        (0, 1, 4), DTYPES, DTYPES, (None, *DTYPES)
    ):
        branch = torch.randn(rows, n).to(dtype)
        storage = torch.randn(rows, n + 2).to(residual_dtype)
        residual = storage[:, 1 : n + 1]
        edges = storage[:, [0, n + 1]].clone()
        weight = torch.rand(n)
        # The norm is that of the sum in float32.
        total = branch.float() + residual.float()
        stored = total.to(residual_dtype)
        expected, bound = reference_rmsnorm(total, weight, 1e-5)
        before, other_residual = branch.clone(), storage.clone()[:, 1 : n + 1]
        with isa(tier):
            normed = sgl_kernel.add_rmsnorm_cpu(branch, residual, weight, 1e-5, out_dtype)
            assert torch.equal(branch, before)
            sgl_kernel.fused_add_rmsnorm_cpu(branch, other_residual, weight, 1e-5)
        case = f"{tier} {rows}x{n} {dtype} {residual_dtype} {out_dtype}"
        assert torch.equal(storage[:, [0, n + 1]], edges), case
        assert normed.dtype == (out_dtype or dtype)
        for result, summed in ((normed, residual), (branch, other_residual)):
            assert torch.equal(summed, stored), case
            check_close(result, expected, bound, case)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("tier", TIERS)
def test_silu_and_mul(tier: str, n: int) -> None:
    for rows, dtype, out_dtype in itertools.product((0, 1, 5), DTYPES, (None, *DTYPES)):
        x = (torch.randn(rows, 2 * n + 1) * 20).to(dtype)[:, 1:]
        gate, up = x[:, :n].double(), x[:, n:].double()
        expected = gate * torch.sigmoid(gate) * up
        # e^-x has a relative error of 3 u, then a sum, a quotient and a product. Where e^-x leaves
        # float32's range, what is lost is below 2^-119 of up.
        bound = 10 * U * expected.abs() + 2.0**-119 * up.abs()
        with isa(tier):
            got = sgl_kernel.silu_and_mul_cpu(x, out_dtype)
        assert got.dtype == (out_dtype or dtype)
        check_close(got, expected, bound, f"{tier} {rows}x{n} {dtype} -> {out_dtype}")


@pytest.mark.parametrize("tier", TIERS)
def test_silu_over_the_range_of_float32(tier: str) -> None:
    magnitudes = torch.cat(
        [torch.linspace(0, 110, 20001), torch.tensor([1e-40, 1e-20, 1e20, 3e38])]
    )
    x = torch.cat([magnitudes, -magnitudes]).unsqueeze(0)
    with isa(tier):
        got = sgl_kernel.silu_and_mul_cpu(torch.cat([x, torch.ones_like(x)], 1))
    expected = x.double() * torch.sigmoid(x.double())
    check_close(got, expected, 10 * U * expected.abs() + 2.0**-119, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_nan_and_infinity_stay_in_their_rows(tier: str) -> None:
    x = torch.randn(6, 70)
    x[1, 3], x[3, 69], x[4, 0] = math.nan, math.inf, -math.inf
    weight = torch.ones(70)
    with isa(tier):
        normed = sgl_kernel.rmsnorm_cpu(x, weight, 1e-6)
        gated = sgl_kernel.silu_and_mul_cpu(x)
    reference = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(normed.isnan(), reference.isnan())
    assert normed[[0, 2, 5]].isfinite().all()
    gate = x[:, :35] / (1 + torch.exp(-x[:, :35])) * x[:, 35:]
    assert torch.equal(gated.isnan(), gate.isnan())
    assert torch.equal(gated.isinf(), gate.isinf())


@pytest.mark.parametrize("tier", TIERS)
def test_topk_softmax(tier: str) -> None:
    for rows, experts, dtype, renormalize in itertools.product(
        (0, 1, 9), (1, 4, 7, 16, 33, 64), DTYPES, (False, True)
    ):
        topk = min(experts, 4)
        # Distinct logits: the order does not hang on a rounding.
        logits = torch.stack([torch.randperm(experts) for _ in range(rows)] or [torch.empty(0)])
        logits = (logits.view(rows, experts) / 4).to(dtype)
        with isa(tier):
            weights, ids = sgl_kernel.topk_softmax_cpu(
                torch.empty(rows, 2), logits, topk, renormalize
            )
        expected, order = logits.double().softmax(-1).topk(topk)
        if renormalize:
            expected = expected / expected.sum(-1, keepdim=True)
        case = f"{tier} {rows}x{experts} {dtype} {renormalize}"
        assert torch.equal(ids, order.int()), case
        check_close(weights, expected, (experts + 16) * U * expected, case)


@pytest.mark.parametrize("tier", TIERS)
def test_topk_of_equal_weights_takes_the_lower_experts_and_of_nan_the_first(tier: str) -> None:
    logits = torch.zeros(2, 9)
    logits[1, 4] = math.nan
    with isa(tier):
        weights, ids = sgl_kernel.topk_softmax_cpu(logits, logits, 3, True)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights[0], torch.full((3,), 1 / 3))
    assert weights[1].isnan().all()


@pytest.mark.parametrize("tier", TIERS)
def test_bits_depend_on_neither_threads_nor_rows(tier: str) -> None:
    x, gates = torch.randn(300, 576).half(), torch.randn(300, 16)
    weight = torch.rand(576)

    def run(rows: int) -> list[Tensor]:
        branch, residual = x[:rows].clone(), x[:rows].float()
        sgl_kernel.fused_add_rmsnorm_cpu(branch, residual, weight, 1e-5)
        return [
            sgl_kernel.rmsnorm_cpu(x[:rows], weight, 1e-5),
            sgl_kernel.add_rmsnorm_cpu(x[:rows], x[:rows].float(), weight, 1e-5),
            branch,
            residual,
            sgl_kernel.silu_and_mul_cpu(x[:rows]),
            *sgl_kernel.topk_softmax_cpu(gates[:rows], gates[:rows], 4, True),
        ]

    with isa(tier), torch_threads(1):
        alone = run(300)
    with isa(tier), torch_threads(3):
        for rows in (1, 7, 300):
            for got, expected in zip(run(rows), alone, strict=True):
                assert torch.equal(got, expected[:rows]), f"{rows} rows"


ROW = torch.zeros(2, 8)
WEIGHT = torch.ones(8)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("rmsnorm_cpu", (ROW.int(), WEIGHT, 1e-5), "input: expected dtype float32 or bfloat16"),
        ("rmsnorm_cpu", (ROW[0, 0], WEIGHT, 1e-5), r"input: expected \[..., N\] \(1-D or more\)"),
        ("rmsnorm_cpu", (ROW[:, :0], WEIGHT[:0], 1e-5), "input: expected N >= 1"),
        ("rmsnorm_cpu", (ROW.t(), WEIGHT, 1e-5), "input: expected unit stride"),
        ("rmsnorm_cpu", (ROW, WEIGHT[:7], 1e-5), r"weight: expected size 8 \(N of input\)"),
        ("rmsnorm_cpu", (ROW, WEIGHT, 1e-5, torch.int8), "out_dtype: expected float32, bfloat16"),
        ("rmsnorm_cpu", (ROW.to("meta"), WEIGHT, 1e-5), "input: expected a tensor on cpu"),
        ("fused_add_rmsnorm_cpu", (ROW, ROW[:1], WEIGHT, 1e-5), "residual: expected the rows of"),
        ("fused_add_rmsnorm_cpu", (ROW, ROW[:, :7], WEIGHT, 1e-5), r"residual: expected size 8"),
        (
            "fused_add_rmsnorm_cpu",
            (ROW, WEIGHT.expand(2, 8), WEIGHT, 1e-5),
            "residual: expected rows that do not overlap",
        ),
        ("fused_add_rmsnorm_cpu", (ROW[:, :0], ROW[:, :0], WEIGHT[:0], 1e-5), "input: expected N"),
        (
            "add_rmsnorm_cpu",
            (ROW, ROW[:1], WEIGHT, 1e-5),
            r"residual: .*input, \[2, 8\], got \[1, 8\]",
        ),
        ("add_rmsnorm_cpu", (ROW, ROW, WEIGHT[:7], 1e-5), "weight: expected size 8"),
        ("add_rmsnorm_cpu", (ROW.int(), ROW, WEIGHT, 1e-5), "input: expected dtype float32"),
        ("add_rmsnorm_cpu", (ROW, ROW, WEIGHT, 1e-5, torch.int8), "out_dtype: expected float32"),
        ("silu_and_mul_cpu", (ROW[:, :7],), "input: expected an even size"),
        ("silu_and_mul_cpu", (ROW[0, 0],), r"input: expected \[..., 2 N\] \(1-D or"),
        ("silu_and_mul_cpu", (ROW, torch.int8), "out_dtype: expected float32"),
        ("topk_softmax_cpu", (ROW, ROW, 9, True), "topk: expected 1 to the number of experts, 8"),
        ("topk_softmax_cpu", (ROW, ROW, 0, True), "topk: expected 1 to the number of experts, 8"),
        ("topk_softmax_cpu", (ROW[:1], ROW, 2, True), "hidden_states: expected size 2"),
    ],
)
def test_wrong_arguments(op: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"sgl_kernel::{op}: {message}"):
        getattr(sgl_kernel, op)(*arguments)
