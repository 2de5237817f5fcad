"""The contracts of the products, in Python."""

import torch
from torch import Tensor

from srt.test.kernel_contract_checks import (
    ACTS,
    BF16,
    E4M3,
    F32,
    FLOATS,
    INDICES,
    Arguments,
    are_indices,
    is_dense,
    is_eps,
    is_vector,
    ones,
    overlaps_itself,
    rows_are_dense,
)

B, M, N, K = 2, 3, 5, 4


def product_arguments(op: str, act_dtype: torch.dtype, out_dtype: torch.dtype) -> Arguments:
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
    arguments: Arguments = {
        "mat1": ones(M, K, dtype=act_dtype),
        "mat2": ones(N, K, dtype=act_dtype if op == "weight_packed_linear" else E4M3),
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


def _scale_is_allowed(op: str, scale: Tensor | None, arguments: Arguments) -> bool:
    n, k = arguments["mat2"].shape[-2:]
    if not is_dense(scale, (F32,)):
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


def product_is_allowed(op: str, arguments: Arguments) -> bool:
    """Whether the op takes these arguments."""
    if op == "convert_weight_packed":
        weight = arguments["weight"]
        return is_dense(weight, (E4M3, *ACTS), 2, 3) and min(weight.shape[-2:]) >= 1
    mat1, mat2, bias = arguments["mat1"], arguments["mat2"], arguments.get("bias")
    is_bmm = op == "bmm_cpu"
    rank = 3 if is_bmm else 2
    weights = {"bmm_cpu": (E4M3, *ACTS), "weight_packed_linear": ACTS}.get(op, (E4M3,))
    if not (
        is_dense(mat1, ACTS)
        and (mat1.dim() == 3 if is_bmm else mat1.dim() >= 2)
        and is_dense(mat2, weights, rank)
        and min(mat2.shape[-2:]) >= 1
        and mat1.shape[-1] == mat2.shape[-1]
        and (not is_bmm or mat1.shape[0] == mat2.shape[0])
        and rows_are_dense(mat1)
        and mat2.is_contiguous()
    ):
        return False
    n = mat2.shape[-2]
    if is_bmm:
        out = arguments["out"]
        is_fp8 = mat2.dtype == E4M3
        if not is_fp8 and arguments["scale"] is not None:
            return False
        return (
            is_dense(out, (mat1.dtype, F32), 3)
            and out.shape == (*mat1.shape[:2], n)
            and rows_are_dense(out)
            and not overlaps_itself(out)
            and (not is_fp8 or _scale_is_allowed(op, arguments["scale"], arguments))
        )
    if bias is not None and not is_vector(bias, FLOATS, n):
        return False
    out_dtypes = (mat1.dtype, F32)
    if op == "weight_packed_linear":
        return arguments["out_dtype"] in (*out_dtypes, None)
    return arguments["out_dtype"] in out_dtypes and _scale_is_allowed(
        op, arguments["scales2"], arguments
    )


def row_arguments(op: str, dtype: torch.dtype, out_dtype: torch.dtype) -> Arguments:
    """A call that the op accepts."""
    x, weight = ones(M, K, dtype=dtype), ones(K)
    if op == "packed_embedding_cpu":
        return {
            "indices": ones(M, dtype=torch.int64),
            "weight": ones(N, K, dtype=BF16),
            "is_vnni": True,
            "out_dtype": out_dtype,
        }
    if op == "concat_columns_cpu":
        return {"first": x, "second": ones(M, N, dtype=dtype), "third": ones(M, 1, dtype=dtype)}
    if op == "silu_and_mul_cpu":
        return {"input": x, "out_dtype": out_dtype}
    if op == "topk_softmax_cpu":
        return {
            "hidden_states": ones(M, 1, dtype=dtype),
            "gating_output": x,
            "topk": 2,
            "renormalize": True,
            "correction_bias": weight,
        }
    arguments: Arguments = {"input": x, "weight": weight, "eps": 1e-5}
    if op != "rmsnorm_cpu":
        arguments["residual"] = ones(M, K)
    if op != "fused_add_rmsnorm_cpu":
        arguments["out_dtype"] = out_dtype
    return arguments


def rows_are_allowed(op: str, arguments: Arguments) -> bool:
    """Whether the op takes these arguments."""
    if arguments.get("out_dtype") not in (None, *FLOATS):
        return False
    if op == "packed_embedding_cpu":
        weight, indices = arguments["weight"], arguments["indices"]
        return (
            is_dense(weight, ACTS, 2)
            and weight.is_contiguous()
            and is_dense(indices, INDICES, 1)
            and are_indices(indices, indices.shape[0], weight.shape[0])
        )
    if op == "topk_softmax_cpu":
        hidden, gates = arguments["hidden_states"], arguments["gating_output"]
        bias = arguments["correction_bias"]
        return (
            is_dense(gates, FLOATS, 2)
            and rows_are_dense(gates)
            and hidden is not None
            and is_dense(hidden, (hidden.dtype,), 2)
            and hidden.shape[0] == gates.shape[0]
            and 1 <= arguments["topk"] <= gates.shape[1]
            and (bias is None or is_vector(bias, FLOATS, gates.shape[1]))
        )
    if op == "concat_columns_cpu":
        first, *others = (arguments[name] for name in ("first", "second", "third"))
        return is_dense(first, FLOATS, 2) and all(
            is_dense(part, (first.dtype,), 2)
            and rows_are_dense(part)
            and part.shape[0] == first.shape[0]
            for part in (first, *([others[0]] if others[1] is None else others))
        )
    x = arguments["input"]
    if not (is_dense(x, FLOATS) and x.dim() >= 1 and rows_are_dense(x)):
        return False
    if op == "silu_and_mul_cpu":
        return x.shape[-1] % 2 == 0
    if x.shape[-1] < 1 or not is_vector(arguments["weight"], FLOATS, x.shape[-1]):
        return False
    if not is_eps(arguments["eps"]):
        return False
    if op == "rmsnorm_cpu":
        return True
    residual = arguments["residual"]
    return (
        is_dense(residual, FLOATS)
        and residual.shape == x.shape
        and rows_are_dense(residual)
        and not overlaps_itself(residual)
        and (op == "add_rmsnorm_cpu" or not overlaps_itself(x))
    )
