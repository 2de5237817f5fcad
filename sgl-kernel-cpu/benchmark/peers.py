"""What else multiplies on a CPU, as methods: Torch, NumPy, OpenVINO."""

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from method import Activations, Method
from ours import Weights, sampled
from torch import Tensor
from torch.nn.functional import linear

# Of the result's norm. The peers round weights, activations or sums to fewer bits than we do.
_TOLERANCE = 0.03


def _near(weight: Tensor, name: str) -> Callable[[Activations, Tensor], None]:
    def check(x: Activations, result: Tensor) -> None:
        rows, columns = sampled(x.m, weight.shape[-2])
        a, b = x.f32[..., rows, :].double(), weight[..., columns, :].double()
        expected = a @ b.mT
        error = (result[..., rows, :][..., columns].double() - expected).norm() / expected.norm()
        if not error <= _TOLERANCE:
            raise AssertionError(f"{name}, M={x.m}: error {error:.3g} of the result's norm")

    return check


def _quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [n, k] and float32 scales [n] whose product is near the weight."""
    scales = weight.abs().amax(dim=1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def peer_methods(weights: Weights, threads: int) -> list[Method]:
    """The peers that can be imported, each over its own copies of the weight."""
    batched = weights.shape.batch > 0
    source = weights.source
    exact = source.float()
    bf16 = weights.copies(source.to(torch.bfloat16))
    f32 = weights.copies(exact)
    arrays = [w.numpy() for w in f32]
    raw = weights.copies(source)
    multiply = (lambda x, w: torch.bmm(x, w.mT)) if batched else linear

    def method(
        name: str,
        nbytes: int,
        dtype: torch.dtype,
        run: Callable[[Activations, int], object],
        weight: Tensor,
    ) -> Method:
        return Method(name, False, nbytes, dtype, run, _near(weight, name))

    found = [
        method(
            "torch f32",
            f32[0].nbytes,
            torch.float32,
            lambda x, i: multiply(x.f32, f32[i % len(f32)]),
            exact,
        ),
        method(
            "torch bf16",
            bf16[0].nbytes,
            torch.bfloat16,
            lambda x, i: multiply(x.bf16, bf16[i % len(bf16)]),
            exact,
        ),
        method(
            "numpy f32",
            f32[0].nbytes,
            torch.float32,
            lambda x, i: x.numpy @ arrays[i % len(arrays)].swapaxes(-1, -2),
            exact,
        ),
        method(
            "dequantise, torch bf16",
            raw[0].nbytes,
            torch.bfloat16,
            lambda x, i: multiply(x.bf16, raw[i % len(raw)].to(torch.bfloat16)),
            exact,
        ),
    ]
    if batched:
        return found
    codes, scales = _quantise_int8(exact)
    int8, bf16_scales = weights.copies(codes), scales.to(torch.bfloat16)
    found.append(
        method(
            "torch int8pack",
            int8[0].nbytes + bf16_scales.nbytes,
            torch.bfloat16,
            lambda x, i: torch._weight_int8pack_mm(x.bf16, int8[i % len(int8)], bf16_scales),
            codes.float() * bf16_scales.float()[:, None],
        )
    )
    if find_spec("openvino") is not None:
        from openvino_peer import openvino_methods

        found += [
            method(name, nbytes, torch.float32, run, exact)
            for name, nbytes, run in openvino_methods(
                weights, np.asarray(exact), codes.numpy(), scales.numpy(), threads
            )
        ]
    return found
