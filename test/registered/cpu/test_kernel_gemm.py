"""The GEMM ops against float64, on every tier that this machine has."""

import itertools

import pytest
import torch

import sgl_kernel
from sgl_kernel.testing import (
    check_close,
    dequantise_blocks,
    isa,
    random_weight,
    reference_mm,
)
from srt.test.ci_register import register_cpu_ci
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=60, suite="per-commit")

E4M3 = torch.float8_e4m3fn
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]

M_GRID = (0, 1, 2, 3, 7, 11, 32, 97, 256)
N_GRID = (1, 16, 31, 32, 33, 128, 192, 224, 576)
K_GRID = (1, 2, 31, 64, 512, 576)
ACT_DTYPES = (torch.bfloat16, torch.float16)
SCALE_SHAPES = ((), (1,), (1, 1))


@pytest.mark.parametrize("k", K_GRID)
@pytest.mark.parametrize("n", N_GRID)
@pytest.mark.parametrize("tier", TIERS)
def test_per_tensor_grid(tier: str, n: int, k: int) -> None:
    mat2 = random_weight(E4M3, n, k)
    mat2_of = {False: mat2, True: sgl_kernel.convert_weight_packed(mat2)}
    bias = torch.randn(n) * k**0.5 * 40
    rows = {dtype: torch.randn(max(M_GRID), k).to(dtype) for dtype in ACT_DTYPES}
    scale = torch.tensor(0.037)
    with isa(tier):
        for dtype, with_bias in itertools.product(ACT_DTYPES, (False, True)):
            use_bias = bias if with_bias else None
            expected, bound = reference_mm(rows[dtype], mat2, scale, use_bias)
            for m, packed, shape in itertools.product(M_GRID, (False, True), SCALE_SHAPES):
                # Both output dtypes are walked by all the other parameters together.
                out_dtype = torch.float32 if (m + len(shape) + packed) % 2 else dtype
                mat1 = rows[dtype][:m]
                got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
                    mat1, mat2_of[packed], scale.view(shape), use_bias, out_dtype, packed
                )
                assert got.dtype == out_dtype
                case = f"{tier} M={m} N={n} K={k} {dtype} packed={packed} bias={with_bias}"
                check_close(got, expected[:m], bound[:m], case)


@pytest.mark.parametrize("n", N_GRID)
@pytest.mark.parametrize("tier", TIERS)
def test_per_channel_and_linear(tier: str, n: int) -> None:
    for m, k, dtype, packed, with_bias in itertools.product(
        (0, 1, 4, 97), (1, 31, 576), ACT_DTYPES, (False, True), (False, True)
    ):
        mat1 = torch.randn(m, k).to(dtype)
        bias = torch.randn(n) if with_bias else None
        scales = torch.rand(n) + 0.1
        case = f"{tier} M={m} N={n} K={k} {dtype} packed={packed} bias={with_bias}"
        with isa(tier):
            for mat2 in (random_weight(E4M3, n, k), random_weight(torch.bfloat16, n, k)):
                stored = sgl_kernel.convert_weight_packed(mat2) if packed else mat2
                if mat2.dtype == E4M3:
                    shaped = scales if m % 2 else scales.unsqueeze(1)
                    got = sgl_kernel.fp8_per_channel_scaled_mm_cpu(
                        mat1, stored, shaped, bias, dtype, packed
                    )
                    expected, bound = reference_mm(mat1, mat2, scales, bias)
                else:
                    out_dtype = torch.float32 if with_bias else None
                    got = sgl_kernel.weight_packed_linear(mat1, stored, bias, packed, out_dtype)
                    assert got.dtype == (out_dtype or dtype)
                    expected, bound = reference_mm(mat1, mat2, None, bias)
                check_close(got, expected, bound, case)


BLOCK_SIZES = ([128, 128], [64, 128], [1, 128], [128, 64], [48, 40], [7, 5], [1, 1], [2**40, 3])


@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=lambda b: "x".join(map(str, b)))
@pytest.mark.parametrize("tier", TIERS)
def test_block_scales(tier: str, block_size: list[int]) -> None:
    for n, k in ((192, 256), (200, 300), (33, 131), (1, 1)):
        mat2 = random_weight(E4M3, n, k)
        scales = torch.rand(-(-n // block_size[0]), -(-k // block_size[1])) + 0.01
        weight = dequantise_blocks(mat2, scales, block_size)
        bias = torch.randn(n)
        for m, dtype, packed in itertools.product((0, 1, 3, 9, 97), ACT_DTYPES, (False, True)):
            # Strided rows, as slices of a fused projection are.
            mat1 = torch.randn(m, k + 8).to(dtype)[:, 5 : 5 + k]
            use_bias = bias if m % 2 else None
            out_dtype = torch.float32 if packed else dtype
            stored = sgl_kernel.convert_weight_packed(mat2) if packed else mat2
            with isa(tier):
                got = sgl_kernel.fp8_scaled_mm_cpu(
                    mat1, stored, scales, block_size, use_bias, out_dtype, packed
                )
            expected, bound = reference_mm(mat1, weight, None, use_bias, scales.shape[1])
            check_close(got, expected, bound, f"{tier} M={m} N={n} K={k} {dtype} packed={packed}")


@pytest.mark.parametrize("tier", TIERS)
def test_one_block_is_a_per_tensor_scale_bit_for_bit(tier: str) -> None:
    mat1, mat2 = torch.randn(9, 200).bfloat16(), random_weight(E4M3, 70, 200)
    scale, bias = torch.tensor([[0.3]]), torch.randn(70)
    with isa(tier):
        per_tensor = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            mat1, mat2, scale, bias, torch.float32, False
        )
        per_channel = sgl_kernel.fp8_per_channel_scaled_mm_cpu(
            mat1, mat2, scale.expand(70, 1).contiguous(), bias, torch.float32, False
        )
        block = sgl_kernel.fp8_scaled_mm_cpu(
            mat1, mat2, scale, [70, 200], bias, torch.float32, False
        )
    assert torch.equal(per_tensor, per_channel)
    assert torch.equal(per_tensor, block)


@pytest.mark.parametrize("act_dtype", ACT_DTYPES)
@pytest.mark.parametrize("weight_dtype", [E4M3, torch.bfloat16])
@pytest.mark.parametrize("tier", TIERS)
def test_bmm(tier: str, weight_dtype: torch.dtype, act_dtype: torch.dtype) -> None:
    for b, m, n, k, packed, strided in itertools.product(
        (1, 3), (0, 1, 3, 11), (32, 45), (31, 128), (False, True), (False, True)
    ):
        mat2 = random_weight(weight_dtype, b, n, k)
        is_fp8 = weight_dtype == E4M3
        scale = (torch.rand(b) + 0.5 if m % 2 else torch.tensor(0.3)) if is_fp8 else None
        out_dtype = torch.float32 if n == 45 else act_dtype
        # Strided: batches interleaved row by row, as [M, B, *] tensors of attention are.
        mat1 = torch.randn(m, b, k).to(act_dtype).transpose(0, 1)
        out = torch.full((m, b, n + 3), torch.nan, dtype=out_dtype)[..., :n].transpose(0, 1)
        if not strided:
            mat1, out = mat1.contiguous(), out.contiguous()
        with isa(tier):
            stored = sgl_kernel.convert_weight_packed(mat2) if packed else mat2
            sgl_kernel.bmm_cpu(out, mat1, stored, packed, scale)
        factor = scale.view(-1, 1, 1) if scale is not None else None
        expected, bound = reference_mm(mat1, mat2, factor, None)
        check_close(out, expected, bound, f"{tier} B={b} M={m} N={n} K={k} packed={packed}")


@pytest.mark.parametrize("tier", TIERS)
def test_bmm_leaves_the_gaps_of_a_strided_out_alone(tier: str) -> None:
    storage = torch.full((2, 5, 40), torch.nan)
    mat1 = torch.randn(2, 5, 16, dtype=torch.bfloat16)
    with isa(tier):
        sgl_kernel.bmm_cpu(
            storage[:, :, :33], mat1, random_weight(E4M3, 2, 33, 16), False, torch.tensor(1.0)
        )
    assert not storage[:, :, :33].isnan().any()
    assert storage[:, :, 33:].isnan().all()


@pytest.mark.parametrize("m", [1, 4, 9])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_every_code_is_exact(tier: str, packed: bool, m: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1).view(E4M3)
    stored = sgl_kernel.convert_weight_packed(codes) if packed else codes
    with isa(tier):
        got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            torch.ones(m, 1, dtype=torch.bfloat16),
            stored,
            torch.tensor(1.0),
            None,
            torch.float32,
            packed,
        )
    expected = codes.float().view(1, 256).expand(m, 256)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    # S.1111.111 is NaN, not 480, and there are no others.
    assert got.isnan().nonzero()[:, 1].unique().tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize("tier", TIERS)
def test_strided_rows_are_read_in_place(tier: str) -> None:
    mat2 = random_weight(E4M3, 64, 48)
    storage = torch.full((10, 100), torch.nan, dtype=torch.bfloat16)
    mat1 = storage[::2, 7:55]
    mat1.copy_(torch.randn(5, 48))
    expected, bound = reference_mm(mat1, mat2, None, None)
    with isa(tier):
        got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            mat1, mat2, torch.tensor(1.0), None, torch.float32, False
        )
    check_close(got, expected, bound, tier)


@pytest.mark.parametrize("dtype", ACT_DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_bits_depend_on_neither_threads_nor_rows(tier: str, dtype: torch.dtype) -> None:
    mat2 = sgl_kernel.convert_weight_packed(random_weight(E4M3, 224, 1100))
    mat1, bias, scale = torch.randn(130, 1100).to(dtype), torch.randn(224), torch.tensor(0.01)

    def run(rows: int) -> torch.Tensor:
        return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            mat1[:rows], mat2, scale, bias, torch.float32, True
        )

    with isa(tier), torch_threads(1):
        alone = run(130)
    for count in (2, 3, 8):
        with isa(tier), torch_threads(count):
            assert torch.equal(run(130), alone), f"{count} threads"
            for rows in (1, 2, 3, 4, 5, 12, 13, 97):
                assert torch.equal(run(rows), alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("tier", TIERS)
def test_flush_denormal_changes_nothing(tier: str) -> None:
    mat2 = random_weight(E4M3, 64, 96)
    mat1 = torch.randn(6, 96).half() * 2.0**-14  # half of these are subnormal halves
    with isa(tier):
        results = []
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            try:
                results.append(
                    sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
                        mat1, mat2, torch.tensor(2.0**-100), None, torch.float32, False
                    )
                )
            finally:
                torch.set_flush_denormal(False)
    assert torch.equal(results[0], results[1])
    assert results[0].abs().max() > 0


@pytest.mark.parametrize("power", [-60, -20, 13, 60])
@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("tier", TIERS)
def test_powers_of_two_pass_through(tier: str, m: int, power: int) -> None:
    mat1, mat2 = torch.randn(m, 256).bfloat16(), random_weight(E4M3, 96, 256)
    factor = 2.0**power

    def run(x: torch.Tensor) -> torch.Tensor:
        return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            x, mat2, torch.tensor(0.3), None, torch.float32, False
        )

    with isa(tier):
        assert torch.equal(run(mat1 * factor), run(mat1) * factor)


@pytest.mark.parametrize("dtype", ACT_DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_nan_and_infinity_reach_only_their_outputs(tier: str, dtype: torch.dtype) -> None:
    mat2 = random_weight(E4M3, 40, 64).float().clamp(1, 2).to(E4M3)
    mat2.view(torch.uint8)[7, 3] = 0xFF
    mat1 = torch.ones(6, 64, dtype=dtype)
    mat1[2, 5] = torch.inf
    mat1[4, 0] = torch.nan
    with isa(tier):
        got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            mat1, mat2, torch.tensor(1.0), None, dtype, False
        )
    is_nan = torch.zeros(6, 40, dtype=torch.bool)
    is_nan[:, 7] = True
    is_nan[4] = True
    assert torch.equal(got.isnan(), is_nan)
    is_inf = torch.zeros(6, 40, dtype=torch.bool)
    is_inf[2] = True
    is_inf[2, 7] = False
    assert torch.equal(got.isinf(), is_inf)


@pytest.mark.parametrize("m", [1, 2, 6, 20])
@pytest.mark.parametrize("tier", TIERS)
def test_rows_near_the_end_of_float32_are_exact(tier: str, m: int) -> None:
    # From 2^120 on, a row leaves no room for the power of two that words of weights ask of it.
    k = 1100
    row = torch.zeros(k)
    row[0], row[1], row[2], row[700] = 2.0**121, -1.5 * 2.0**119, 2.0**-90, 3.0
    weight = torch.zeros(33, k)
    weight[0, 0], weight[0, 1] = 1.5, 2.0**-9
    weight[1, 2] = -448.0
    weight[2, 700] = 2.0**-9
    weight[32, 0], weight[32, 700] = -16.0, 0.0
    expected = (row.double() @ weight.double().T).float().expand(m, 33)
    mat1 = row.to(torch.bfloat16).expand(m, k).contiguous()
    with isa(tier):
        got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            mat1, weight.to(E4M3), torch.tensor(1.0), None, torch.float32, False
        )
    torch.testing.assert_close(got, expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("dtype", ACT_DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_a_last_block_of_one_row(tier: str, dtype: torch.dtype) -> None:
    # 20 blocks of 96 rows and one of a single row, which is not the path of a few rows.
    m, n, k = 1921, 33, 600
    mat1, mat2 = torch.randn(m, k).to(dtype), random_weight(E4M3, n, k)
    scale = torch.tensor(0.5)
    with isa(tier):
        got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(mat1, mat2, scale, None, torch.float32, False)
    check_close(got, *reference_mm(mat1, mat2, scale, None), f"{tier} {dtype}")
