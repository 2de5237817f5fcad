"""One record of each op of the kernel package, which the tests of all ops are run from.

The modules are families of ops that share a description. `FAMILIES` is by the modules of
`sgl_kernel` that declare the ops.
"""

from typing import Any

import torch
from torch import Tensor

from srt.test.kernels import attention, fused_qkv, gemm, heads, kv_cache, norms, rows
from srt.test.kernels.properties import Arguments
from srt.test.kernels.record import Records

FAMILIES: dict[str, Records] = {
    "gemm": gemm.RECORDS,
    "transformer": {**norms.RECORDS, **rows.RECORDS},
    "heads": {**heads.RECORDS, **kv_cache.RECORDS, **fused_qkv.RECORDS},
    "attention": attention.RECORDS,
}
RECORDS: Records = {op: record for family in FAMILIES.values() for op, record in family.items()}


def all_ops() -> list[str]:
    """Names of the registered ops, sorted."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.split("::")[1] for n in names if n.startswith("sgl_kernel::"))


def sample_calls(op: str) -> list[tuple[Any, ...]]:
    """Calls that walk the op's optional parts, as positional arguments."""
    return RECORDS[op].samples()


def written(op: str, arguments: Arguments) -> list[str]:
    """Names of the tensors that a call writes: what the schema says, but for what it cannot say."""
    if op == "rotary_embedding_cpu" and arguments["query"].dim() == 3:
        return []
    if op == "decode_attention_cpu" and arguments["key"] is None:
        return ["output"]
    schema = getattr(torch.ops.sgl_kernel, op).default._schema
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def is_allowed(op: str, arguments: Arguments) -> bool:
    """Whether the op takes these arguments."""
    given = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    if any(x.requires_grad for x in given.values()):
        return False
    if not RECORDS[op].is_allowed(arguments):
        return False
    # What is written is given once. But the caches may be one where what is stored is one.
    k, v = (given.get("k", given.get("key")), given.get("v", given.get("value")))
    one_store = k is not None and k is v and arguments["k_scale"] == arguments["v_scale"]
    return not any(
        other is given.get(name) and other.numel() > 0 and other_name != name
        for name in written(op, arguments)
        for other_name, other in given.items()
        if not (one_store and {name, other_name} == {"k_cache", "v_cache"})
    )
