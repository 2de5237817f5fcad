"""The CPU ops against a Triton kernel that shares no code with them: triton_w8a16.py.

Each of the two is within the error bound of docs/numerics.md, so they differ by no more than twice
that. With a CUDA device the kernel is compiled and the whole grid runs; without one a few small
shapes run in Triton's interpreter and the grid is skipped.
"""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, random_weight, reference_mm
from srt.test.ci_register import register_gpu_ci

register_gpu_ci(est_time=20, suite="per-commit")

pytest.importorskip("triton", exc_type=ImportError)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_w8a16 import TILE_K, TILE_M, TILE_N, jit, w8a16_mm

E4M3 = torch.float8_e4m3fn
ACT_DTYPES = (torch.bfloat16, torch.float16)
BLOCKS = ((128, 128), (64, 128), (1, 128), (128, 64))


def scale_blocks(n: int, k: int) -> tuple[tuple[int, int], ...]:
    """The (bn, bk) of per-tensor, per-channel and block scales of an [n, k] weight."""
    return ((n, k), (1, k), *BLOCKS)


def on_cpu(
    mat1: Tensor, mat2: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None
) -> dict[str, Tensor]:
    """The results of every CPU op that can express these scales, packed and not."""
    n, k = mat2.shape
    results = {}
    for packed in (False, True):
        stored = sgl_kernel.convert_weight_packed(mat2) if packed else mat2
        rest = (bias, torch.float32, packed)
        results[f"block packed={packed}"] = sgl_kernel.fp8_scaled_mm_cpu(
            mat1, stored, scales, list(block), *rest
        )
        if block == (n, k):
            results[f"per-tensor packed={packed}"] = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
                mat1, stored, scales, *rest
            )
        if block == (1, k):
            results[f"per-channel packed={packed}"] = sgl_kernel.fp8_per_channel_scaled_mm_cpu(
                mat1, stored, scales, *rest
            )
    return results


def compare(
    m: int, n: int, k: int, block: tuple[int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    block_n, block_k = block
    mat1 = torch.randn(m, 2 * k).to(dtype)[:, :k]  # rows are strided
    mat2 = random_weight(E4M3, n, k)
    scales = torch.rand(-(-n // block_n), -(-k // block_k)) + 0.1
    bias = torch.randn(n) * 100 if with_bias else None

    by_triton = w8a16_mm(mat1, mat2, scales, block, bias)
    scale_of = scales[torch.arange(n) // block_n][:, torch.arange(k) // block_k]
    _, bound = reference_mm(mat1, mat2.double() * scale_of, None, bias)
    for name, got in on_cpu(mat1, mat2, scales, block, bias).items():
        case = f"{name} M={m} N={n} K={k} block={block} {dtype} bias={with_bias}"
        check_close(got, by_triton.double(), 2 * bound, case)


@pytest.mark.parametrize("dtype", ACT_DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 33, 65), (3, 65, 31), (17, 130, 66), (2, 130, 257)]
)
def test_small_shapes(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    for i, block in enumerate(scale_blocks(n, k)):
        compare(m, n, k, block, dtype, with_bias=i % 2 == m % 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the whole grid needs a CUDA device")
@pytest.mark.parametrize("k", [1, 31, 64, 127, 129, 256, 576])
@pytest.mark.parametrize("n", [1, 31, 33, 128, 200, 576])
@pytest.mark.parametrize("m", [1, 2, 7, 16, 33, 130])
def test_grid(m: int, n: int, k: int) -> None:
    for block, dtype, bias in itertools.product(scale_blocks(n, k), ACT_DTYPES, (False, True)):
        compare(m, n, k, block, dtype, bias)


@pytest.mark.parametrize("dtype", ACT_DTYPES)
def test_all_codes_decode_to_the_same_bits(dtype: torch.dtype) -> None:
    mat1 = torch.ones(1, 1, dtype=dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1).view(E4M3)
    one = torch.ones(1, 1)
    by_triton = w8a16_mm(mat1, codes, one, (256, 1), None)
    for name, got in on_cpu(mat1, codes, one, (256, 1), None).items():
        torch.testing.assert_close(got, by_triton, rtol=0, atol=0, equal_nan=True, msg=name)
    assert by_triton.isnan().nonzero()[:, 1].tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize("dtype", ACT_DTYPES)
def test_batches_agree(dtype: torch.dtype) -> None:
    mat1, mat2 = torch.randn(3, 5, 40).to(dtype), random_weight(E4M3, 3, 45, 40)
    scale = torch.rand(3) + 0.1
    _, bound = reference_mm(mat1, mat2, scale.view(3, 1, 1), None)
    out = torch.full((3, 5, 45), torch.nan)
    sgl_kernel.bmm_cpu(out, mat1, sgl_kernel.convert_weight_packed(mat2), True, scale)
    for b in range(3):
        by_triton = w8a16_mm(mat1[b], mat2[b], scale[b].view(1, 1), (45, 40), None)
        check_close(out[b], by_triton.double(), 2 * bound[b], f"batch {b}")


# So that a machine without a GPU notices a kernel that only the interpreter understands.
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("act", ["*bf16", "*fp16"])
def test_compiles_to_f32_fmas(
    act: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    pointers = {"mat1": act, "codes": "*u8", "scales": "*fp32", "bias": "*fp32", "out": "*fp32"}
    integers = dict.fromkeys(("M", "N", "K", "mat1_stride", "block_n", "block_k"), "i32")
    constants = {"HAS_BIAS": True, "TILE_M": TILE_M, "TILE_N": TILE_N, "TILE_K": TILE_K}
    signature = {**pointers, **integers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=jit(interpret=False), signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert "fma.rn.f32" in ptx
    assert "mma" not in ptx, "tensor cores: the error bound does not hold for them"
