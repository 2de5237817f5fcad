"""Cases of bench_transformer.py: what a decoder layer computes between its products."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Model:
    """A decoder layer's sizes."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "smollm2": Model(576, 1536, 9, 3, 64),
    "llama-1b": Model(2048, 8192, 32, 8, 64),
    "llama-8b": Model(4096, 14336, 32, 8, 128),
}


@dataclass
class Method:
    """A way to compute a case: ``run`` is timed, ``check`` raises if its result is wrong."""

    name: str
    run: Callable[[], "Tensor"]
    expected: "Tensor"
    tolerance: float

    def check(self) -> None:
        """Compares with float64, element by element, scaled by the largest."""
        got = self.run().double().flatten()
        error = (got - self.expected.double().flatten()).abs().max().item()
        if not error <= self.tolerance * self.expected.abs().max().item():
            raise AssertionError(f"{self.name}: error {error:.3g}")


@dataclass
class Case:
    """Methods that compute the same, ours first."""

    name: str
    nbytes: float
    flops: float
    dtype: "torch.dtype"
    methods: list[Method] = field(default_factory=list)


def row_cases(model: Model, tokens: int) -> list[Callable[[], Case]]:
    """Norms and the gate, float16 with a float32 residual."""
    return [partial(_norm, model, tokens), partial(_gate, model, tokens)]


def _norm(model: Model, tokens: int) -> Case:
    import torch
    from torch.nn.functional import rms_norm

    import sgl_kernel

    shape = (model.hidden,)
    branch, weight = torch.randn(tokens, *shape).half(), torch.rand(shape)
    # Each grows from call to call; what is checked is the first one's result.
    ours_residual, torch_residual = torch.zeros(2, tokens, *shape)

    def ours() -> "Tensor":
        return sgl_kernel.add_rmsnorm_cpu(branch, ours_residual, weight, 1e-5)

    def torch_ops() -> "Tensor":
        return rms_norm(torch_residual.add_(branch), shape, weight, 1e-5).half()

    expected = rms_norm(branch.double(), shape, weight.double(), 1e-5)
    return Case(
        f"add, norm [{tokens}]",
        tokens * model.hidden * 12.0,
        0.0,
        torch.float16,
        [
            Method("add_rmsnorm_cpu", ours, expected, 1e-3),
            Method("torch", torch_ops, expected, 1e-3),
        ],
    )


def _gate(model: Model, tokens: int) -> Case:
    import torch
    from torch.nn.functional import silu

    import sgl_kernel

    x = torch.randn(tokens, 2 * model.inner).half()
    gate, up = x.chunk(2, dim=1)
    expected = silu(gate.double()) * up.double()
    return Case(
        f"silu and mul [{tokens}]",
        tokens * model.inner * 6.0,
        0.0,
        torch.float16,
        [
            Method("silu_and_mul_cpu", lambda: sgl_kernel.silu_and_mul_cpu(x), expected, 1e-3),
            Method("torch", lambda: silu(gate) * up, expected, 2e-3),
        ],
    )


def attention_cases(
    model: Model, contexts: Sequence[int], prefills: Sequence[int], rotated_bytes: int
) -> list[Callable[[], Case]]:
    """Decode over each context in each cache dtype, and prefill from nothing in both dtypes."""
    import torch

    half, bf16, e4m3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
    return [
        *(
            partial(_decode, model, context, act, cache, rotated_bytes)
            for context in contexts
            for act, cache in ((half, half), (bf16, bf16), (half, e4m3))
        ),
        *(partial(_prefill, model, tokens, act) for tokens in prefills for act in (half, bf16)),
    ]


def _copies(tensor: "Tensor", rotated_bytes: int) -> Iterator["Tensor"]:
    count = max(1, min(64, rotated_bytes // tensor.nbytes))
    return itertools.cycle([tensor.clone() for _ in range(count)])


def _reference(q: "Tensor", k: "Tensor", v: "Tensor", scale: float) -> "Tensor":
    """Causal attention of the last tokens in float64; [T, heads, head_dim] each."""
    import torch

    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def _decode(
    model: Model, context: int, act: "torch.dtype", dtype: "torch.dtype", rotated_bytes: int
) -> Case:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import sgl_kernel

    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    scale = dim**-0.5
    q, out = torch.randn(1, heads, dim).to(act), torch.empty(1, heads, dim, dtype=act)
    cache = torch.randn(2, context, kv_heads, dim).to(dtype)
    caches = _copies(cache, rotated_bytes)
    table = torch.arange(context, dtype=torch.int32).unsqueeze(0)
    request, length = torch.tensor([0]), torch.tensor([context])

    def ours() -> "Tensor":
        k, v = next(caches)
        sgl_kernel.decode_attention_cpu(
            q, k, v, out, None, None, None, None, table, request, length, scale, 0.0
        )
        return out

    expected = _reference(q, cache[0], cache[1], scale)
    tolerance = 2e-2 if act == torch.bfloat16 else 2e-3
    name = str(dtype).removeprefix("torch.")
    case = Case(
        f"decode, {context} of {name}",
        float(cache.nbytes),
        4.0 * heads * dim * context,
        act,
        [Method("decode_attention_cpu", ours, expected, tolerance)],
    )
    if dtype == act:
        dense = _copies(cache.permute(0, 2, 1, 3).contiguous(), rotated_bytes)
        grouped = q.view(1, kv_heads, heads // kv_heads, dim)

        def torch_op() -> "Tensor":
            k, v = next(dense).unsqueeze(1)
            return scaled_dot_product_attention(grouped, k, v, scale=scale)

        case.methods.append(Method("torch SDPA", torch_op, expected, tolerance))
    return case


def _prefill(model: Model, tokens: int, act: "torch.dtype") -> Case:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import sgl_kernel

    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    scale = dim**-0.5
    q = torch.randn(tokens, heads, dim).to(act)
    k, v = torch.randn(2, tokens, kv_heads, dim).to(act)
    out = torch.empty_like(q)
    table = torch.arange(tokens, dtype=torch.int32).unsqueeze(0)
    request, length = torch.tensor([0]), torch.tensor([tokens])

    def ours() -> "Tensor":
        sgl_kernel.extend_attention_cpu(
            q, None, None, out, k, v, table, request, length, length, request, tokens, scale, 0.0
        )
        return out

    def torch_op() -> "Tensor":
        queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        result = scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return result.squeeze(0).transpose(0, 1)

    expected = _reference(q, k, v, scale)
    tolerance = 2e-2 if act == torch.bfloat16 else 2e-3
    name = str(act).removeprefix("torch.")
    return Case(
        f"prefill {tokens}, {name}",
        float(2 * k.nbytes + 2 * q.nbytes),
        2.0 * heads * dim * tokens * (tokens + 1),
        act,
        [
            Method("extend_attention_cpu", ours, expected, tolerance),
            Method("torch SDPA", torch_op, expected, tolerance),
        ],
    )
