"""Every bad argument ends in a message that names op, argument, what was expected and what came."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sgl_kernel
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="per-commit")

M, N, K, B = 3, 40, 16, 2


def acts(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


LINEAR: dict[str, Any] = {
    "mat1": acts(M, K),
    "mat2": fp8(N, K),
    "scales2": torch.tensor(1.0),
    "bias": torch.zeros(N),
    "out_dtype": torch.bfloat16,
    "is_vnni": True,
}
CHANNEL = {**LINEAR, "scales2": torch.ones(N)}
BLOCK = {**LINEAR, "scales2": torch.ones(2, 2), "block_size": [32, 8]}
UNQUANTIZED: dict[str, Any] = {
    "mat1": acts(M, K),
    "mat2": acts(N, K),
    "bias": torch.zeros(N),
    "is_vnni": True,
    "out_dtype": None,
}
BMM: dict[str, Any] = {
    "out": acts(B, M, N),
    "mat1": acts(B, M, K),
    "mat2": fp8(B, N, K),
    "is_vnni": True,
    "scale": torch.tensor(1.0),
}
GOOD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "fp8_per_tensor_scaled_mm_cpu": (sgl_kernel.fp8_per_tensor_scaled_mm_cpu, LINEAR),
    "fp8_per_channel_scaled_mm_cpu": (sgl_kernel.fp8_per_channel_scaled_mm_cpu, CHANNEL),
    "fp8_scaled_mm_cpu": (sgl_kernel.fp8_scaled_mm_cpu, BLOCK),
    "weight_packed_linear": (sgl_kernel.weight_packed_linear, UNQUANTIZED),
    "bmm_cpu": (sgl_kernel.bmm_cpu, BMM),
    "convert_weight_packed": (sgl_kernel.convert_weight_packed, {"weight": fp8(N, K)}),
}

PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP, BMM_OP, PACK = GOOD
CORPUS: list[tuple[str, str, Any, str]] = [
    (op, argument, value, message)
    for ops, argument, value, message in [
        # dtype
        (
            (PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP, BMM_OP),
            "mat1",
            torch.ones(M, K),
            "dtype bfloat16 or float16, got float32",
        ),
        ((PER_TENSOR, PER_CHANNEL), "mat2", acts(N, K), "dtype float8_e4m3fn, got bfloat16"),
        ((LINEAR_OP,), "mat2", fp8(N, K), "dtype bfloat16 or float16, got float8_e4m3fn"),
        (
            (BMM_OP,),
            "mat2",
            torch.ones(B, N, K),
            "dtype float8_e4m3fn or bfloat16 or float16, got float32",
        ),
        (
            (PER_TENSOR, PER_CHANNEL),
            "scales2",
            torch.ones(N, dtype=torch.float64),
            "dtype float32, got float64",
        ),
        (
            (PER_TENSOR,),
            "scales2",
            torch.ones(1, dtype=torch.int32),
            "dtype float32, got int32",
        ),
        (
            (PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP),
            "bias",
            torch.zeros(N, dtype=torch.float64),
            "dtype float32 or bfloat16 or float16, got float64",
        ),
        (
            (PER_TENSOR, PER_CHANNEL),
            "out_dtype",
            torch.float16,
            "mat1's dtype (bfloat16) or float32, got float16",
        ),
        (
            (LINEAR_OP,),
            "out_dtype",
            torch.int8,
            "mat1's dtype (bfloat16) or float32, got int8",
        ),
        (
            (BMM_OP,),
            "out",
            acts(B, M, N, dtype=torch.float16),
            "dtype bfloat16 or float32, got float16",
        ),
        (
            (PACK,),
            "weight",
            torch.ones(N, K),
            "dtype float8_e4m3fn or bfloat16 or float16, got float32",
        ),
        # nothing at all
        (
            (PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP, BMM_OP),
            "mat1",
            None,
            "a tensor, got None",
        ),
        ((PER_TENSOR, PER_CHANNEL, BLOCK_OP), "scales2", None, "a tensor, got None"),
        ((BMM_OP,), "out", None, "a tensor, got None"),
        ((PACK,), "weight", None, "a tensor, got None"),
        # rank
        (
            (PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP),
            "mat1",
            acts(K),
            "[..., M, K] (2-D or more), got 1-D [16]",
        ),
        (
            (PER_TENSOR, PER_CHANNEL),
            "mat2",
            fp8(1, N, K),
            "[N, K] (2-D), got 3-D [1, 40, 16]",
        ),
        ((PER_TENSOR, LINEAR_OP), "bias", torch.zeros(1, N), "[N] (1-D), got 2-D [1, 40]"),
        ((BMM_OP,), "mat1", acts(M, K), "[B, M, K] (3-D), got 2-D [3, 16]"),
        ((PACK,), "weight", fp8(K), "[N, K] or [B, N, K], got 1-D [16]"),
        ((PACK,), "weight", fp8(1, 1, 2, 2), "[N, K] or [B, N, K], got 4-D [1, 1, 2, 2]"),
        # sizes
        (
            (PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP),
            "mat1",
            acts(M, K + 1),
            "size 16 (K of mat2) in dimension 1, got 17 in shape [3, 17]",
        ),
        (
            (PER_TENSOR, PER_CHANNEL),
            "mat2",
            fp8(0, K),
            "N >= 1 in dimension 0, got 0 in shape [0, 16]",
        ),
        (
            (PER_TENSOR,),
            "mat2",
            fp8(N, 0),
            "K >= 1 in dimension 1, got 0 in shape [40, 0]",
        ),
        (
            (PER_TENSOR,),
            "scales2",
            torch.ones(2),
            "one element (per-tensor scale), got 2 in shape [2]",
        ),
        (
            (PER_TENSOR,),
            "scales2",
            torch.ones(0),
            "one element (per-tensor scale), got 0 in shape [0]",
        ),
        (
            (PER_CHANNEL,),
            "scales2",
            torch.ones(N - 1),
            "shape [N] or [N, 1] with N = 40, got [39]",
        ),
        (
            (PER_CHANNEL,),
            "scales2",
            torch.ones(1, N),
            "shape [N] or [N, 1] with N = 40, got [1, 40]",
        ),
        (
            (PER_CHANNEL,),
            "scales2",
            torch.tensor(1.0),
            "shape [N] or [N, 1] with N = 40, got []",
        ),
        (
            (PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP),
            "bias",
            torch.zeros(N + 1),
            "size 40 (N of mat2) in dimension 0, got 41 in shape [41]",
        ),
        ((BMM_OP,), "mat1", acts(B + 1, M, K), "size 2 (B of mat2) in dimension 0, got 3"),
        ((BMM_OP,), "mat1", acts(B, M, K + 1), "size 16 (K of mat2) in dimension 2, got 17"),
        ((BMM_OP,), "out", acts(B, M + 1, N), "size 3 (M of mat1) in dimension 1, got 4"),
        ((BMM_OP,), "out", acts(B, M, N - 1), "size 40 (N of mat2) in dimension 2, got 39"),
        (
            (BMM_OP,),
            "scale",
            torch.ones(3),
            "one element, or shape [B] with B = 2, got [3]",
        ),
        ((BMM_OP,), "scale", None, "a float32 tensor for float8_e4m3fn mat2, got None"),
        ((PACK,), "weight", fp8(0, K), "N >= 1 in dimension 0, got 0 in shape [0, 16]"),
        *(
            ((BLOCK_OP,), "block_size", size, f"two sizes >= 1: [block_n, block_k], got {size}")
            for size in ([32], [32, 8, 1], [0, 8], [32, -1], [])
        ),
        *(
            (
                (BLOCK_OP,),
                "scales2",
                torch.ones(shape),
                f"[ceil(N / block_n), ceil(K / block_k)] = [2, 2], got {list(shape)}",
            )
            for shape in ((1, 2), (2, 3), (4,), (2, 2, 1), ())
        ),
        # strides
        (
            (PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP),
            "mat1",
            acts(K, M).t(),
            "unit stride in the last dimension, got strides [1, 3] for shape [3, 16]",
        ),
        (
            (PER_TENSOR,),
            "mat2",
            fp8(N, 2 * K)[:, :K],
            "a contiguous tensor, got strides [32, 1] for shape [40, 16]",
        ),
        (
            (PER_CHANNEL,),
            "scales2",
            torch.ones(2 * N)[::2],
            "a contiguous tensor, got strides [2] for shape [40]",
        ),
        (
            (BMM_OP,),
            "out",
            acts(B, N, M).transpose(1, 2),
            "unit stride in the last dimension, got strides [120, 1, 3]",
        ),
        # devices and layouts
        *(
            (ops, argument, torch.empty(shape, dtype=dtype, device="meta"), "cpu, got meta")
            for ops, argument, shape, dtype in [
                ((PER_TENSOR, PER_CHANNEL, BLOCK_OP, LINEAR_OP), "mat1", (M, K), torch.bfloat16),
                ((PER_TENSOR, PER_CHANNEL), "mat2", (N, K), torch.float8_e4m3fn),
                ((PER_TENSOR,), "scales2", (1,), torch.float32),
                ((PER_CHANNEL,), "scales2", (N,), torch.float32),
                ((PER_TENSOR, LINEAR_OP), "bias", (N,), torch.float32),
                ((BMM_OP,), "out", (B, M, N), torch.bfloat16),
                ((PACK,), "weight", (N, K), torch.bfloat16),
            ]
        ),
        (
            (PER_TENSOR, LINEAR_OP),
            "mat1",
            acts(M, K).to_sparse(),
            "a dense (strided) tensor, got another layout",
        ),
    ]
    for op in ops
]


@pytest.mark.parametrize("op", GOOD)
def test_the_arguments_that_the_corpus_spoils_are_good(op: str) -> None:
    call, arguments = GOOD[op]
    call(**arguments)


@pytest.mark.parametrize(
    ("op", "argument", "value", "message"),
    CORPUS,
    ids=[f"{op}-{argument}-{i}" for i, (op, argument, _, _) in enumerate(CORPUS)],
)
def test_bad_argument_is_named(op: str, argument: str, value: Any, message: str) -> None:
    call, arguments = GOOD[op]
    with pytest.raises(RuntimeError, match=re.escape(f"{op}: {argument}: expected ")) as error:
        call(**{**arguments, argument: value})
    assert message in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", GOOD)
def test_cuda_tensors_are_refused(op: str) -> None:
    call, arguments = GOOD[op]
    on_cuda = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(RuntimeError, match=f"{op}: .*expected a tensor on cpu, got cuda"):
        call(**on_cuda)


def test_bf16_bmm_takes_no_scale() -> None:
    with pytest.raises(RuntimeError, match="scale: expected None for bfloat16 mat2, got a tensor"):
        sgl_kernel.bmm_cpu(acts(B, M, N), acts(B, M, K), acts(B, N, K), False, torch.tensor(1.0))


def test_bmm_refuses_an_out_that_overlaps_itself() -> None:
    out = acts(1, 1, N).expand(B, M, N)
    with pytest.raises(RuntimeError, match="bmm_cpu: out: expected rows that do not overlap"):
        sgl_kernel.bmm_cpu(out, acts(B, M, K), fp8(B, N, K), False, torch.tensor(1.0))


def test_mat1_may_repeat_one_row() -> None:
    repeated = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
        **{**LINEAR, "mat1": acts(1, K).expand(M, K)}
    )
    assert torch.equal(repeated, sgl_kernel.fp8_per_tensor_scaled_mm_cpu(**LINEAR))
