"""The contract of each op, written down once more, in Python: arguments that it accepts, and
whether it accepts others. The docstrings of sgl_kernel tell the same in words.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from srt.test.kernel_contract_checks import ACTS, FLOATS, Arguments
from srt.test.kernel_contracts_attention import attention_arguments, attention_is_allowed
from srt.test.kernel_contracts_heads import head_arguments, heads_are_allowed
from srt.test.kernel_contracts_products import (
    product_arguments,
    product_is_allowed,
    row_arguments,
    rows_are_allowed,
)

Good = Callable[[str, torch.dtype, torch.dtype], Arguments]
Allowed = Callable[[str, Arguments], bool]
_FAMILIES: list[tuple[Good, Allowed, tuple[torch.dtype, ...], tuple[str, ...]]] = [
    (
        product_arguments,
        product_is_allowed,
        ACTS,
        (
            "convert_weight_packed",
            "bmm_cpu",
            "weight_packed_linear",
            "fp8_per_tensor_scaled_mm_cpu",
            "fp8_per_channel_scaled_mm_cpu",
            "fp8_scaled_mm_cpu",
        ),
    ),
    (
        row_arguments,
        rows_are_allowed,
        FLOATS,
        (
            "rmsnorm_cpu",
            "fused_add_rmsnorm_cpu",
            "add_rmsnorm_cpu",
            "packed_embedding_cpu",
            "silu_and_mul_cpu",
            "concat_columns_cpu",
            "topk_softmax_cpu",
        ),
    ),
    (
        lambda op, dtype, _: head_arguments(op, dtype),
        heads_are_allowed,
        FLOATS,
        (
            "rotary_embedding_cpu",
            "fused_qk_rmsnorm_cpu",
            "store_cache_cpu",
            "fused_qk_norm_rope_store_cpu",
        ),
    ),
    (
        lambda op, dtype, _: attention_arguments(op, dtype),
        attention_is_allowed,
        FLOATS,
        ("decode_attention_cpu", "extend_attention_cpu", "fused_qkv_attention_cpu"),
    ),
]
CONTRACTS = {op: (good, allowed, dtypes) for good, allowed, dtypes, ops in _FAMILIES for op in ops}
FAMILY_OPS = [ops for *_, ops in _FAMILIES]


def good_arguments(op: str, dtype: torch.dtype, out_dtype: torch.dtype) -> Arguments:
    """A call that the op accepts, with activations and results of these dtypes."""
    return CONTRACTS[op][0](op, dtype, out_dtype)


def written(op: str, arguments: Arguments) -> list[str]:
    """Names of the tensors that a call writes."""
    if op == "rotary_embedding_cpu" and arguments["query"].dim() == 3:
        return []
    if op == "decode_attention_cpu" and arguments["key"] is None:
        return ["output"]
    return _WRITTEN.get(op, [])


_WRITTEN = {
    "bmm_cpu": ["out"],
    "fused_add_rmsnorm_cpu": ["input", "residual"],
    "add_rmsnorm_cpu": ["residual"],
    "rotary_embedding_cpu": ["query", "key"],
    "store_cache_cpu": ["k_cache", "v_cache"],
    "fused_qk_norm_rope_store_cpu": ["qkv", "k_cache", "v_cache"],
    "decode_attention_cpu": ["output", "k_cache", "v_cache"],
    "extend_attention_cpu": ["o_extend"],
    "fused_qkv_attention_cpu": ["qkv", "k_cache", "v_cache"],
}


def _memory_is_apart(op: str, arguments: Arguments) -> bool:
    """What is written is given once."""
    given = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    return not any(
        other is given.get(name) and other.numel() > 0 and other_name != name
        for name in written(op, arguments)
        for other_name, other in given.items()
    )


def is_allowed(op: str, arguments: Arguments) -> bool:
    """Whether the op takes these arguments."""
    if any(isinstance(x, Tensor) and x.requires_grad for x in arguments.values()):
        return False
    return CONTRACTS[op][1](op, arguments) and _memory_is_apart(op, arguments)
