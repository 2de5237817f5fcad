"""The forms in which SGLang's own tests and layers call the ops: ranks, dtypes, what is written."""

import itertools

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, isa, random_weight, reference_mm
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels.references import U, cos_sin, reference_rmsnorm, reference_rope, rows_as_given
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=10, suite="per-commit")

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]


def of_rank(rank: int, width: int, form: str) -> Tensor:
    """[.., width] float32 whose rows stand side by side, apart, or in another order."""
    sizes = (3, 2, 4, 2)[4 - (rank - 1) :] if rank > 1 else ()
    if form == "transposed":
        return torch.randn(*sizes[::-1], width).permute(*range(rank - 1)[::-1], rank - 1)
    margin = 5 if form == "strided" else 0
    return torch.randn(*sizes, width + margin)[..., margin // 2 : margin // 2 + width]


FORMS = ("contiguous", "strided", "transposed")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("weight_dtype", [BF16, F16, E4M3])
def test_products_take_rows_of_any_rank(weight_dtype: torch.dtype, rank: int, form: str) -> None:
    """With the bits of the same rows in two dimensions."""
    n, k = 45, 70
    weight, bias = random_weight(weight_dtype, n, k), torch.randn(n)
    for dtype, packed in itertools.product((BF16, F16), (False, True)):
        stored = sgl_kernel.convert_weight_packed(weight) if packed else weight
        mat1 = rows_as_given(of_rank(rank, k, form), dtype)

        def product(x: Tensor, stored: Tensor = stored, packed: bool = packed) -> Tensor:
            if weight_dtype == E4M3:
                scale = torch.tensor(0.5)
                return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
                    x, stored, scale, bias, x.dtype, packed
                )
            return sgl_kernel.weight_packed_linear(x, stored, bias, packed)

        got = product(mat1)
        assert got.shape == (*mat1.shape[:-1], n) and got.is_contiguous()
        assert torch.equal(got.view(-1, n), product(mat1.reshape(-1, k)))


@pytest.mark.parametrize("op", ["fp8_per_channel_scaled_mm_cpu", "fp8_scaled_mm_cpu"])
def test_products_with_other_scales_take_rows_of_any_rank(op: str) -> None:
    mat1, weight = torch.randn(2, 3, 64).bfloat16(), random_weight(E4M3, 40, 64)
    scales: tuple[object, ...] = (torch.rand(40),)
    if op == "fp8_scaled_mm_cpu":
        scales = (torch.rand(2, 2), [32, 32])
    call = getattr(sgl_kernel, op)
    got = call(mat1, weight, *scales, None, F32, False)
    flat = call(mat1.view(6, 64), weight, *scales, None, F32, False)
    assert torch.equal(got, flat.view(2, 3, 40))


@pytest.mark.parametrize("m", [1, 2, 4, 7, 40])
@pytest.mark.parametrize("act_dtype", [BF16, F16])
@pytest.mark.parametrize("tier", TIERS)
def test_float16_weights(tier: str, act_dtype: torch.dtype, m: int) -> None:
    for n, k, packed, with_bias in itertools.product(
        (1, 32, 45, 96), (1, 31, 576), (False, True), (False, True)
    ):
        mat1 = torch.randn(m, k).to(act_dtype)
        weight = (torch.randn(n, k) * 2.0 ** torch.randint(-16, 3, (n, k))).half()
        bias = torch.randn(n) if with_bias else None
        stored = sgl_kernel.convert_weight_packed(weight) if packed else weight
        with isa(tier):
            got = sgl_kernel.weight_packed_linear(mat1, stored, bias, packed, F32)
        case = f"{tier} M={m} N={n} K={k} {act_dtype} packed={packed}"
        check_close(got, *reference_mm(mat1, weight, None, bias), case)


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_every_float16_weight_is_exact(tier: str, packed: bool, m: int) -> None:
    """All 65,536 codes: subnormals, zeros with their signs, infinities, NaN."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(F16).view(-1, 1)
    stored = sgl_kernel.convert_weight_packed(codes) if packed else codes
    with isa(tier):
        for act_dtype in (BF16, F16):
            one = torch.ones(m, 1, dtype=act_dtype)
            got = sgl_kernel.weight_packed_linear(one, stored, None, packed, F32)
            torch.testing.assert_close(
                got, codes.float().view(1, -1).expand(m, -1), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("act_dtype", [BF16, F16])
def test_float16_weights_give_the_same_bits_on_every_tier_and_for_every_batch(
    act_dtype: torch.dtype,
) -> None:
    mat1, weight = torch.randn(131, 1100).to(act_dtype), random_weight(F16, 70, 1100)
    stored, bias = sgl_kernel.convert_weight_packed(weight), torch.randn(70)
    results = []
    for tier, count in itertools.product(TIERS, (1, 3)):
        with isa(tier), torch_threads(count):
            whole = sgl_kernel.weight_packed_linear(mat1, stored, bias, True, F32)
            for rows in (1, 2, 4, 5, 13, 97):
                part = sgl_kernel.weight_packed_linear(mat1[:rows], stored, bias, True, F32)
                assert torch.equal(part, whole[:rows]), f"{tier}: {rows} rows"
        results.append(whole)
    assert all(torch.equal(whole, results[0]) for whole in results)


@pytest.mark.parametrize("tier", TIERS)
def test_float16_weights_in_batched_products_and_tables(tier: str) -> None:
    weight, mat1 = random_weight(F16, 3, 45, 33), torch.randn(3, 6, 33).half()
    rows = torch.tensor([44, 0, 7])
    for packed in (False, True):
        stored = sgl_kernel.convert_weight_packed(weight) if packed else weight
        out = torch.full((3, 6, 45), torch.nan)
        with isa(tier):
            sgl_kernel.bmm_cpu(out, mat1, stored, packed, None)
            table = sgl_kernel.packed_embedding_cpu(rows, stored[1], packed)
        check_close(out, *reference_mm(mat1, weight, None, None), tier)
        assert table.dtype == F16 and torch.equal(table, weight[1][rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_norms_and_gate_take_any_rank(rank: int, form: str) -> None:
    n = 36
    weight = torch.rand(n)
    for dtype, residual_dtype in itertools.product((F32, BF16, F16), (F32, F16)):
        x = rows_as_given(of_rank(rank, n, form), dtype)
        case = f"{form} {tuple(x.shape)} {dtype}"
        got = sgl_kernel.rmsnorm_cpu(x, weight, 1e-6)
        check_close(got, *reference_rmsnorm(x, weight, 1e-6), case)
        assert got.is_contiguous()

        residual = rows_as_given(of_rank(rank, n, "strided"), residual_dtype)
        total = x.float() + residual.float()
        before = x.clone()
        added = rows_as_given(residual, residual_dtype)
        normed = sgl_kernel.add_rmsnorm_cpu(x, added, weight, 1e-6)
        assert torch.equal(x, before), case
        sgl_kernel.fused_add_rmsnorm_cpu(x, residual, weight, 1e-6)
        for result, stored in ((normed, added), (x, residual)):
            check_close(result, *reference_rmsnorm(total, weight, 1e-6), case)
            assert torch.equal(stored, total.to(residual_dtype)), case

        gate, up = before[..., : n // 2].double(), before[..., n // 2 :].double()
        expected = gate * torch.sigmoid(gate) * up
        gated = sgl_kernel.silu_and_mul_cpu(before)
        check_close(gated, expected, 10 * U * expected.abs() + 2.0**-119, case)
        assert gated.is_contiguous()


def test_what_is_added_in_place_writes_its_rows_only() -> None:
    storage = torch.full((4, 3, 10), torch.nan)
    x, residual = storage[::2, :, 1:9], torch.zeros(2, 3, 8)
    x.copy_(torch.randn(2, 3, 8))
    sgl_kernel.fused_add_rmsnorm_cpu(x, residual, torch.ones(8), 1e-6)
    assert not x.isnan().any() and storage.isnan().sum() == storage.numel() - x.numel()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("tier", TIERS)
def test_rotation_is_in_place_where_sglangs_is(tier: str, rank: int, is_neox: bool) -> None:
    batch, length, heads, size, rotary = 2, 5, 3, 24, 16
    cache, positions = cos_sin(9, rotary), torch.randint(0, 9, (batch * length,))
    for dtype, form in itertools.product((F32, BF16, F16), FORMS):
        fused = rows_as_given(torch.randn(batch, length, heads + 1, size), dtype)
        if form == "transposed":
            fused = fused.transpose(0, 1).contiguous().transpose(0, 1)
        query, key = fused[:, :, :heads], fused[:, :, heads:]
        if form == "contiguous":
            query, key = query.contiguous(), key.contiguous()
        if rank < 4:
            query, key = query.reshape(-1, heads, size), key.reshape(-1, 1, size)
        if rank == 2:
            query, key = query.flatten(1), key.flatten(1)
        before = query.clone(), key.clone()
        with isa(tier):
            outputs = sgl_kernel.rotary_embedding_cpu(positions, query, key, size, cache, is_neox)
        for got, given, source in zip(outputs, (query, key), before, strict=True):
            expected, bound = reference_rope(
                source.reshape(batch * length, -1, size), positions, cache, is_neox
            )
            assert got.shape == given.shape and got.is_contiguous()
            check_close(got.view(expected.shape), expected, bound, f"{tier} {rank} {dtype}")
            assert torch.equal(given, source if rank == 3 else got)
            assert got.data_ptr() != given.data_ptr()


def test_head_norms_take_four_dimensions() -> None:
    heads = torch.randn(3, 2, 5, 16).half().transpose(0, 1)
    weight = torch.rand(16)
    got = sgl_kernel.fused_qk_rmsnorm_cpu(heads[:, :, :4], heads[:, :, 4:], weight, weight, 1e-6)
    expected, bound = reference_rmsnorm(heads, weight, 1e-6)
    check_close(torch.cat(got, 2), expected, bound)


@pytest.mark.parametrize("cache_dtype", [torch.uint8, E4M3])
@pytest.mark.parametrize("dtype", [torch.uint8, E4M3])
@pytest.mark.parametrize("tier", TIERS)
def test_fp8_keys_and_values_are_stored_as_they_are(
    tier: str, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """All 256 codes, NaN included, whichever 8-bit format they are of."""
    codes = torch.arange(256, dtype=torch.uint8).view(4, 2, 32)
    k, v = codes.view(dtype), codes.flip(0).view(dtype)
    caches = [torch.zeros(9, 2, 32, dtype=torch.uint8).view(cache_dtype) for _ in range(2)]
    slots = torch.tensor([7, 0, 3, 8])
    with isa(tier):
        sgl_kernel.store_cache_cpu(k, v, caches[0], caches[1], slots, 64)
    for cache, given in zip(caches, (codes, codes.flip(0)), strict=True):
        expected = torch.zeros(9, 2, 32, dtype=torch.uint8)
        expected[slots] = given
        assert torch.equal(cache.view(torch.uint8), expected)


K, SLOTS = torch.zeros(2, 1, 4), torch.tensor([0, 1])
NUMBERS, BYTES = torch.zeros(5, 1, 4), torch.zeros(5, 1, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((K, K, BYTES, BYTES.clone(), SLOTS), "k: expected dtype float8_e4m3fn or uint8 for"),
        ((K.byte(), K, BYTES, BYTES.clone(), SLOTS), "v: expected dtype float8_e4m3fn or uint8"),
        (
            (K.byte(), K, NUMBERS, NUMBERS.clone(), SLOTS),
            "k_cache: expected dtype float8_e4m3fn or uint8 for FP8 k, got float32",
        ),
        (
            (K, K.to(E4M3), NUMBERS, NUMBERS.clone(), SLOTS),
            "v_cache: expected dtype float8_e4m3fn or uint8 for FP8 v, got float32",
        ),
        (
            (K.byte(), K.byte(), BYTES, BYTES.clone(), SLOTS, None, 0.5),
            "k_scale: expected 1 for FP8 k, which is stored as it is, got 0.5",
        ),
        (
            (K.byte(), K.byte(), BYTES, BYTES.clone(), SLOTS, None, 1.0, 2.0),
            "v_scale: expected 1 for FP8 v, which is stored as it is, got 2",
        ),
    ],
)
def test_fp8_and_numbers_are_not_mixed(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"store_cache_cpu: {message}"):
        sgl_kernel.store_cache_cpu(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", TIERS)
def test_correction_bias_chooses_and_does_not_weigh(tier: str) -> None:
    for rows, experts, dtype, bias_dtype, renormalize in itertools.product(
        (0, 1, 17), (1, 16, 33), (F32, BF16), (F32, F16), (False, True)
    ):
        topk = min(experts, 4)
        logits = torch.randn(rows, experts).to(dtype)
        # Far apart, so that the order does not hang on a rounding.
        bias = (torch.randperm(experts) * 2.0 - experts).to(bias_dtype)
        with isa(tier):
            weights, ids = sgl_kernel.topk_softmax_cpu(
                torch.empty(rows, 2), logits, topk, renormalize, correction_bias=bias
            )
        order = bias.argsort(descending=True)[:topk].expand(rows, topk)
        assert torch.equal(ids.long(), order), tier
        expected = logits.double().softmax(-1).gather(1, order)
        if renormalize:
            expected = expected / expected.sum(-1, keepdim=True)
        check_close(weights, expected, (experts + 16) * U * expected, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_bias_of_zero_or_none_is_no_bias(tier: str) -> None:
    logits = torch.randn(20, 33)
    with isa(tier):
        plain, none, zero = (
            sgl_kernel.topk_softmax_cpu(logits, logits, 5, True, *bias)
            for bias in ((), (None,), (torch.zeros(33),))
        )
    for other in (none, zero):
        assert all(torch.equal(a, b) for a, b in zip(other, plain, strict=True))


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.zeros(7), r"size 8 \(experts of gating_output\)"),
        (torch.zeros(1, 8), r"\[experts\] \(1-D\)"),
        (torch.zeros(16)[::2], "a contiguous tensor"),
        (torch.zeros(8, dtype=torch.int32), "dtype float32 or bfloat16 or float16"),
    ],
)
def test_wrong_correction_bias(bias: Tensor, message: str) -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(
        RuntimeError, match=f"topk_softmax_cpu: correction_bias: expected {message}"
    ):
        sgl_kernel.topk_softmax_cpu(logits, logits, 2, True, bias)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tier", TIERS)
def test_sinks_of_the_activations_dtype(tier: str, dtype: torch.dtype) -> None:
    """Are numbers like those of float32: the same bits come out of all three ops."""
    sinks = torch.randn(4).to(dtype)
    caches = torch.randn(6, 2, 8).to(dtype), torch.randn(6, 2, 8).to(dtype)
    table, one = torch.tensor([[3, 0, 5, 1]]), torch.tensor([0])
    query, lengths = torch.randn(2, 4, 8).to(dtype), torch.tensor([4])
    qkv, angles = torch.randn(1, (4 + 2 + 2) * 8).to(dtype), cos_sin(8, 8)

    def run(sinks: Tensor) -> list[Tensor]:
        decoded, extended = torch.empty_like(query[:1]), torch.empty_like(query)
        sgl_kernel.decode_attention_cpu(
            query[:1], *caches, decoded, None, None, None, None, table, one, lengths, 0.3, 0.0, 0,
            sinks,
        )  # fmt: skip
        sgl_kernel.extend_attention_cpu(
            query, None, None, extended, *caches, table, one, lengths, torch.tensor([2]), one, 2,
            0.3, 0.0, 0, sinks,
        )  # fmt: skip
        fused = sgl_kernel.fused_qkv_attention_cpu(
            qkv.clone(), torch.tensor([3]), angles, True, 4, 2, None, None, 0.0, caches[0].clone(),
            caches[1].clone(), torch.tensor([1]), table, one, lengths, None, 0.3, 0.0, 0, sinks,
        )  # fmt: skip
        return [decoded, extended, fused]

    with isa(tier):
        for got, expected in zip(run(sinks), run(sinks.float()), strict=True):
            assert torch.equal(got, expected)
