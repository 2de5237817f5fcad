"""What happens to heads before attention: norm, rotation, KV cache; on every tier."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import UNIT_ROUNDOFF, check_close, isa
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels.references import U, cos_sin, reference_rmsnorm, reference_rope
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=6, suite="per-commit")

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
DTYPES = (F32, BF16, F16)
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("tier", TIERS)
def test_rotary_embedding(tier: str, is_neox: bool) -> None:
    for (head, rotary), tokens, dtype, cache_dtype, index in itertools.product(
        ((2, 2), (6, 6), (6, 0), (34, 34), (64, 64), (80, 64), (128, 128)),
        (0, 1, 5),
        DTYPES,
        (F32, BF16),
        (torch.int64, torch.int32),
    ):
        fused = torch.randn(tokens, 5, head).to(dtype)
        query, key = fused[:, :3], fused[:, 3:4]
        cache = cos_sin(11, rotary).to(cache_dtype)
        positions = torch.randint(0, 11, (tokens,))
        as_rows = head == 64
        inputs = (
            (fused.flatten(1)[:, : 3 * head], fused.flatten(1)[:, 3 * head : 4 * head])
            if as_rows
            else (query, key)
        )
        sources = query.clone(), key.clone()
        with isa(tier):
            outputs = sgl_kernel.rotary_embedding_cpu(
                positions.to(index), *inputs, head, cache, is_neox
            )
        for got, given, source in zip(outputs, inputs, sources, strict=True):
            assert got.shape == given.shape and got.dtype == dtype and got.is_contiguous()
            expected, bound = reference_rope(source, positions, cache, is_neox)
            check_close(
                got.view(expected.shape), expected, bound, f"{tier} {head} {rotary} {dtype}"
            )


@pytest.mark.parametrize("tier", TIERS)
def test_fused_qk_rmsnorm(tier: str) -> None:
    for tokens, head, dtype in itertools.product((0, 1, 4), (1, 7, 64, 129), DTYPES):
        fused = torch.randn(tokens, 4, head).to(dtype)
        q_weight, k_weight = torch.rand(head), torch.rand(head).to(dtype)
        with isa(tier):
            q, k = sgl_kernel.fused_qk_rmsnorm_cpu(
                fused[:, :3], fused[:, 3:], q_weight, k_weight, 1e-6
            )
        check_close(q, *reference_rmsnorm(fused[:, :3], q_weight, 1e-6), f"{tier} q {head} {dtype}")
        check_close(k, *reference_rmsnorm(fused[:, 3:], k_weight, 1e-6), f"{tier} k {head} {dtype}")


@pytest.mark.parametrize("tier", TIERS)
def test_fused_qk_rmsnorm_of_whole_rows_as_sglang_has_it(tier: str) -> None:
    q, k, _ = torch.randn(5, 96 + 32 + 32).bfloat16().split([96, 32, 32], dim=-1)
    q_weight, k_weight = torch.randn(96), torch.randn(32)
    with isa(tier):
        q_out, k_out = sgl_kernel.fused_qk_rmsnorm_cpu(q, k, q_weight, k_weight, 1e-5)
    check_close(q_out, *reference_rmsnorm(q, q_weight, 1e-5), tier)
    check_close(k_out, *reference_rmsnorm(k, k_weight, 1e-5), tier)


def nan_cache(slots: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((slots, heads, head_dim), math.nan).to(dtype)


def nan_caches(slots: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cache = nan_cache(slots, heads, head_dim, dtype)
    return cache, cache.clone()


@pytest.mark.parametrize("head", [1, 7, 64, 80])
@pytest.mark.parametrize("tier", TIERS)
def test_store_cache(tier: str, head: int) -> None:
    for tokens, dtype, cache_dtype in itertools.product((0, 1, 6), DTYPES, (*DTYPES, E4M3)):
        fused = (torch.randn(tokens, 5, head) * 100).to(dtype)
        k, v = fused[:, :2], fused[:, 3:]
        caches = nan_caches(13, 2, head, cache_dtype)
        slots = torch.randperm(13)[:tokens]
        scales = (0.37, 2.0) if cache_dtype == E4M3 else (1.0, 1.0)
        with isa(tier):
            sgl_kernel.store_cache_cpu(k, v, *caches, slots, 2 * head, *scales)
        for cache, source, scale in zip(caches, (k, v), scales, strict=True):
            limit = 448.0 if cache_dtype == E4M3 else math.inf
            expected = (source.float() / scale).clamp(-limit, limit).to(cache_dtype)
            assert torch.equal(cache[slots].float(), expected.float()), (tier, dtype, cache_dtype)
            untouched = torch.ones(13, dtype=torch.bool)
            untouched[slots] = False
            assert cache[untouched].float().isnan().all()


@pytest.mark.parametrize("tier", TIERS)
def test_every_half_is_rounded_to_the_nearest_code(tier: str) -> None:
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(F16).view(64, 4, 256)
    k_cache, v_cache = nan_cache(64, 4, 256, E4M3), nan_cache(64, 4, 256, E4M3)
    with isa(tier):
        sgl_kernel.store_cache_cpu(halves, halves.float(), k_cache, v_cache, torch.arange(64))
    finite = halves.float().clamp(-448, 448).to(E4M3).float()
    expected = torch.where(halves.isfinite(), finite, math.nan)
    for cache in (k_cache, v_cache):
        torch.testing.assert_close(cache.float(), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(cache.float().signbit()[halves == 0], halves.signbit()[halves == 0])


@pytest.mark.parametrize("cache_dtype", [F16, BF16, F32, E4M3])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_fused_qk_norm_rope_store(tier: str, with_norm: bool, cache_dtype: torch.dtype) -> None:
    for tokens, dtype, (head, v_head), is_neox, with_scale in itertools.product(
        (0, 1, 6), DTYPES, ((64, 64), (24, 10)), (True, False), (True, False)
    ):
        q_end, k_end = 3 * head, 5 * head
        storage = torch.randn(tokens, k_end + 2 * v_head + 4).to(dtype)
        qkv = storage[:, : k_end + 2 * v_head]
        before = storage.clone()
        cache = cos_sin(50, head)
        positions, slots = torch.randint(0, 50, (tokens,)), torch.randperm(9)[:tokens]
        k_cache, v_cache = nan_cache(9, 2, head, cache_dtype), nan_cache(9, 2, v_head, cache_dtype)
        weights: tuple[Tensor | None, Tensor | None] = (None, None)
        if with_norm:
            weights = torch.rand(head) + 1, torch.rand(head) + 1
        scales = (0.02, 0.5) if cache_dtype == E4M3 else (1.0, 1.0)
        q_scale = torch.rand(50) + 0.5 if with_scale else None
        with isa(tier):
            sgl_kernel.fused_qk_norm_rope_store_cpu(
                qkv, positions, cache, is_neox, 3, 2, *weights, 1e-6, k_cache, v_cache,
                slots, *scales, q_scale,
            )  # fmt: skip
        assert torch.equal(storage[:, q_end:], before[:, q_end:])
        case = f"{tier} {tokens} {dtype} {head} {is_neox} {with_scale}"

        q, k, v = (
            part.reshape(tokens, part.shape[1] // size, size)
            for part, size in zip(
                before[:, : k_end + 2 * v_head].split([q_end, 2 * head, 2 * v_head], 1),
                (head, head, v_head),
                strict=True,
            )
        )
        for source, weight, is_key in ((q, weights[0], False), (k, weights[1], True)):
            normed, norm_bound = source.double(), torch.zeros(())
            if weight is not None:
                normed, norm_bound = reference_rmsnorm(source, weight, 1e-6)
            expected, bound = reference_rope(normed, positions, cache, is_neox)
            # An error of the norm is turned into both elements of its pair.
            bound = bound + 2 * norm_bound.max() if norm_bound.numel() else bound
            if is_key:
                got = k_cache[slots].double() * scales[0]
                unit = UNIT_ROUNDOFF.get(cache_dtype, 2.0**-4)
                bound = bound + unit * (expected.abs() + bound) + scales[0] * 2.0**-10
                check_close(got.float(), expected, bound, case)
            else:
                if q_scale is not None:
                    factor = q_scale[positions].view(-1, 1, 1).double()
                    expected, bound = expected * factor, bound * factor
                    bound = bound + U * expected.abs()
                check_close(qkv[:, :q_end].reshape(expected.shape), expected, bound, case)
        stored = (v.float() / scales[1]).to(cache_dtype)
        assert torch.equal(v_cache[slots].float(), stored.float()), case


@pytest.mark.parametrize("tier", TIERS)
def test_fused_op_gives_the_bits_of_its_parts(tier: str) -> None:
    qkv = torch.randn(5, 6, 64).half()
    cache, positions, slots = cos_sin(20, 64), torch.arange(5), torch.arange(5).flip(0)
    q_weight, k_weight = torch.rand(64), torch.rand(64)
    parts, fused = nan_caches(5, 1, 64, F16), nan_caches(5, 1, 64, F16)
    with isa(tier):
        # Through float32, so that the parts round once, too.
        q, k = sgl_kernel.fused_qk_rmsnorm_cpu(
            qkv[:, :4].float(), qkv[:, 4:5].float(), q_weight, k_weight, 1e-6
        )
        q, k = sgl_kernel.rotary_embedding_cpu(positions, q, k, 64, cache, True)
        sgl_kernel.store_cache_cpu(k, qkv[:, 5:], *parts, slots)
        sgl_kernel.fused_qk_norm_rope_store_cpu(
            qkv.view(5, -1), positions, cache, True, 4, 1, q_weight, k_weight, 1e-6, *fused,
            slots,
        )  # fmt: skip
    assert torch.equal(qkv[:, :4], q.half())
    assert torch.equal(parts[0], fused[0]) and torch.equal(parts[1], fused[1])


@pytest.mark.parametrize("tier", TIERS)
def test_bits_depend_on_neither_threads_nor_tokens(tier: str) -> None:
    qkv = torch.randn(200, 6, 64).half()
    cache, positions = cos_sin(200, 64), torch.arange(200)
    weight = torch.rand(64)

    def run(tokens: int) -> list[Tensor]:
        work, caches = qkv[:tokens].clone(), nan_caches(200, 1, 64, E4M3)
        sgl_kernel.fused_qk_norm_rope_store_cpu(
            work.view(tokens, -1), positions[:tokens], cache, True, 4, 1, weight, weight, 1e-6,
            *caches, positions[:tokens], 0.1, 0.1,
        )  # fmt: skip
        return [work, *(c.view(torch.uint8)[:tokens] for c in caches)]

    with isa(tier), torch_threads(1):
        alone = run(200)
    with isa(tier), torch_threads(3):
        for tokens in (1, 7, 200):
            for got, expected in zip(run(tokens), alone, strict=True):
                assert torch.equal(got, expected[:tokens]), f"{tokens} tokens"


Q, K, CACHE = torch.zeros(2, 3, 4), torch.zeros(2, 1, 4), torch.zeros(5, 1, 4)
ANGLES, AT = torch.zeros(8, 4), torch.tensor([0, 1])
QKV = torch.zeros(2, 20)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("rotary_embedding_cpu", (AT + 7, Q, K, 4, ANGLES, True), r"positions: expected indices in "
         r"\[0, 8\) \(rows of cos_sin_cache\), got 8 at 1"),
        ("rotary_embedding_cpu", (AT - 1, Q, K, 4, ANGLES, True), r"positions: .*got -1 at 0"),
        ("rotary_embedding_cpu", (AT[:1], Q, K, 4, ANGLES, True), "positions: expected size 2"),
        ("rotary_embedding_cpu", (AT.float(), Q, K, 4, ANGLES, True), "positions: expected dtype"),
        ("rotary_embedding_cpu", (AT, Q, K, 0, ANGLES, True), "head_size: expected heads of 1 to"),
        ("rotary_embedding_cpu", (AT, Q, K, 3, ANGLES, True), "query: expected size 3"),
        ("rotary_embedding_cpu", (AT, Q, K.half(), 4, ANGLES, True), "key: expected dtype float32"),
        ("rotary_embedding_cpu", (AT, Q, K[:1], 4, ANGLES, True), "key: expected size 2"),
        ("rotary_embedding_cpu", (AT, Q, K, 4, torch.zeros(8, 6), True), "cos_sin_cache: expected"),
        ("rotary_embedding_cpu", (AT, Q, K, 4, torch.zeros(8, 3), True), "cos_sin_cache: expected"),
        ("fused_qk_rmsnorm_cpu", (Q, K, torch.ones(3), torch.ones(4), 1e-6), "q: expected size 3"),
        ("fused_qk_rmsnorm_cpu", (Q, K, torch.ones(0), torch.ones(4), 1e-6), "q_weight: expected"),
        ("store_cache_cpu", (K, K, CACHE, CACHE, AT + 4), r"indices: expected indices in \[0, 5\)"),
        ("store_cache_cpu", (K, K, CACHE, CACHE[:4], AT), r"v_cache: expected size 5"),
        ("store_cache_cpu", (Q, K, CACHE, CACHE, AT), "k_cache: expected size 3"),
        ("store_cache_cpu", (K, K, CACHE, CACHE, AT, 5), "row_dim: expected heads"),
        ("store_cache_cpu", (K, K, CACHE, CACHE, AT, None, 0.0), "k_scale: expected a finite"),
        ("store_cache_cpu", (K, K, CACHE, CACHE, AT, None, 1.0, math.inf), "v_scale: expected"),
        ("store_cache_cpu", (K, K, CACHE.int(), CACHE, AT), "k_cache: expected dtype"),
        ("store_cache_cpu", (K, K, CACHE[:1].expand(5, 1, 4), CACHE, AT), "k_cache: expected rows"),
        ("fused_qk_norm_rope_store_cpu",
         (QKV, AT, ANGLES, True, 2, 1, None, None, 1e-6, CACHE, CACHE, AT), "qkv: expected num_h"),
        ("fused_qk_norm_rope_store_cpu",
         (QKV, AT, ANGLES, True, 1, 2, None, None, 1e-6, CACHE, CACHE, AT), "k_cache: expected s"),
        ("fused_qk_norm_rope_store_cpu",
         (QKV, AT, ANGLES, True, 3, 1, torch.ones(3), None, 1e-6, CACHE, CACHE, AT), "q_weight: e"),
        *[
            ("fused_qk_norm_rope_store_cpu",
             (QKV, AT, ANGLES, True, 3, 1, None, None, 1e-6, CACHE, CACHE, AT, 1.0, 1.0, q_scale),
             message)
            for q_scale, message in (
                (torch.ones(7), r"q_scale: expected size 8 \(rows of cos_sin_cache\)"),
                (torch.ones(8).half(), "q_scale: expected dtype float32, got float16"),
                (torch.ones(8, 1), r"q_scale: expected \[max_position\] \(1-D\)"),
                (torch.ones(16)[::2], "q_scale: expected a contiguous tensor"),
                (torch.ones(8, device="meta"), "q_scale: expected a tensor on cpu, got meta"),
            )
        ],
    ],
)  # fmt: skip
def test_wrong_arguments(op: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"sgl_kernel::{op}: {message}"):
        getattr(sgl_kernel, op)(*arguments)
