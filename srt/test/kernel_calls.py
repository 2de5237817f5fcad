"""Calls of every op of the kernel package, which walk its optional parts."""

import itertools
from typing import Any

import torch

from sgl_kernel.testing import random_weight

E4M3 = torch.float8_e4m3fn


def all_ops() -> list[str]:
    """Names of the registered ops, sorted."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n.split("::")[1] for n in names if n.startswith("sgl_kernel::"))


def _transformer_calls(op: str) -> list[tuple[Any, ...]]:
    """For the ops between a transformer's products."""
    x, weight, at = torch.randn(3, 8).half(), torch.rand(8), torch.tensor([2, 0, 1])
    heads, angles = torch.randn(3, 4, 8).half(), torch.rand(5, 8)
    q, k, v = heads[:, :2], heads[:, 2:3], heads[:, 3:]
    cache, codes = torch.zeros(4, 1, 8).half(), torch.zeros(4, 1, 8).to(E4M3)
    fused = (at, angles, True, 2, 1)
    table = torch.tensor([[2, 0, 1, 3], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    one, two, lengths = torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([4, 1])
    request, options = (
        (one, lengths[:1], lengths[:1] - 1),
        (20.0, 3, torch.rand(2).half(), 0.5, 2.0),
    )
    codes_of = codes, codes.clone()
    cache_of = cache, cache.clone()
    calls: dict[str, list[tuple[Any, ...]]] = {
        "rmsnorm_cpu": [
            (x, weight, 1e-5),
            (heads[:, 1:], weight, 1e-5, torch.float32),
            (x[0], weight, 1e-5),
        ],
        "fused_add_rmsnorm_cpu": [
            (x, x.float(), weight, 1e-5),
            (heads[:, 1:], torch.randn(3, 3, 8), weight, 1e-5),
        ],
        "add_rmsnorm_cpu": [
            (x, x.float(), weight, 1e-5),
            (x.float(), x.float(), weight, 1e-5, torch.float16),
        ],
        "packed_embedding_cpu": [
            (at, x.bfloat16(), False),
            (at.int(), x.bfloat16(), True, torch.float32),
            (at, x, True),
        ],
        "concat_columns_cpu": [(x, x[:, :3]), (heads[:, 0], heads[:, 1], heads[:, 3])],
        "silu_and_mul_cpu": [(x,), (x.float(), torch.bfloat16), (heads[:, 1:],)],
        "topk_softmax_cpu": [(x, x, 2, True), (x, x, 2, False, weight)],
        "rotary_embedding_cpu": [
            (at, q, k, 8, angles, True),
            (at, x, x.clone(), 4, angles[:, :4], False),
            (at, q[None] + 0, k[None] + 0, 8, angles, True),
        ],
        "fused_qk_rmsnorm_cpu": [
            (q, k, weight, weight.half(), 1e-6),
            (q[None], k[None], weight, weight, 1e-6),
        ],
        "store_cache_cpu": [
            (k, v, cache, cache.clone(), at),
            (k, v, codes, codes.clone(), at.int(), 8, 0.5, 2.0),
            (k.to(E4M3), v.byte(), codes.view(torch.uint8), codes.clone(), at),
        ],
        "decode_attention_cpu": [
            (q[:2], *cache_of, q[:2] + 0, *[None] * 4, table, two, lengths, 0.5, 0.0),
            (
                q[:2],
                *codes_of,
                q[:2] + 0,
                k[:2],
                v[:2],
                at[:2],
                x,
                table,
                two,
                lengths,
                0.5,
                *options,
            ),
        ],
        "extend_attention_cpu": [
            (q, None, None, q + 0, *cache_of, table, *request, one, 3, 0.5, 0.0),
            (q, k, v, q + 0, *codes_of, table, *request, one, 3, 0.5, *options),
        ],
        "fused_qkv_attention_cpu": [
            (
                heads.flatten(1),
                *fused,
                None,
                None,
                0.0,
                *cache_of,
                at,
                table,
                at,
                torch.tensor([4, 0, 1]),
                None,
                0.5,
            ),
            (
                heads.flatten(1),
                *fused,
                weight,
                weight,
                1e-06,
                *codes_of,
                at,
                table,
                *request,
                0.5,
                *options,
                torch.rand(5),
            ),
        ],
        "fused_qk_norm_rope_store_cpu": [
            (heads.flatten(1), *fused, None, None, 0.0, cache, cache.clone(), at),
            (heads.flatten(1), *fused, weight, weight, 1e-6, codes, codes.clone(), at, 0.5, 2.0),
            (heads.flatten(1), *fused, None, None, 0.0, *cache_of, at, 1.0, 1.0, torch.rand(5)),
        ],
    }
    return calls.get(op, [])


def sample_calls(op: str) -> list[tuple[Any, ...]]:
    """Positional arguments, with values of Torch's global generator."""
    bf16, f32 = torch.bfloat16, torch.float32
    calls: list[tuple[Any, ...]] = []
    for m, packed in itertools.product((1, 5), (False, True)):
        x, w, b = torch.randn(m, 32).to(bf16), random_weight(E4M3, 48, 32), torch.randn(48)
        if op == "fp8_per_tensor_scaled_mm_cpu":
            calls += [(x, w, torch.tensor(0.5), b, bf16, packed)]
            calls += [(x, w, torch.ones(1, 1), None, f32, packed)]
        elif op == "fp8_per_channel_scaled_mm_cpu":
            calls += [(x, w, torch.rand(48), None, bf16, packed)]
            calls += [(x.half(), w, torch.rand(48, 1), b, f32, packed)]
        elif op == "fp8_scaled_mm_cpu":
            calls += [(x, w, torch.rand(2, 2), [32, 16], b, bf16, packed)]
            calls += [(x.half(), w, torch.rand(1, 1), [128, 128], None, f32, packed)]
        elif op == "weight_packed_linear":
            calls += [(x, w.to(bf16), b, packed)]
            calls += [(x, w.to(bf16), None, packed, f32)]
            calls += [(x.half(), w.half(), None, packed), (x.view(m, 1, 32), w.half(), b, packed)]
        elif op == "bmm_cpu":
            out = torch.empty(2, m, 48, dtype=bf16)
            x3, w3 = torch.randn(2, m, 32).to(bf16), random_weight(E4M3, 2, 48, 32)
            calls += [(out, x3, w3, packed, torch.rand(2))]
            calls += [(out.float(), x3, w3.to(bf16), packed, None)]
            calls += [(out, x3, w3.half(), packed, None)]
        elif op == "convert_weight_packed":
            calls += [(w,), (w.to(bf16),), (w.half(),), (random_weight(E4M3, 2, 48, 32),)]
    calls += _transformer_calls(op)
    assert calls, f"no sample call for {op}: add one"
    return calls
