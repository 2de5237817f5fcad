"""Fake kernels: the shape and dtype of each op's result, for torch.compile and FakeTensor.

They check what they can see so that a wrong graph fails while it is traced. Raw ``meta`` tensors
are refused like any other device: a CPU kernel has nothing to say about them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from sgl_kernel._fakes_attention import ATTENTION_FAKES
from sgl_kernel._fakes_transformer import TRANSFORMER_FAKES


def _check(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"sgl_kernel::{op}: {name}: expected a tensor without gradient, or a call under "
                "torch.no_grad(), got one that requires grad: the op has none"
            )
        if tensor is not None and tensor.device.type != "cpu" and not is_fake(tensor):
            raise RuntimeError(
                f"sgl_kernel::{op}: {name}: expected a tensor on cpu, got {tensor.device.type}"
            )


def _linear(
    op: str, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, **others: Tensor | None
) -> Tensor:
    _check(op, mat1=mat1, mat2=mat2, **others)
    torch._check(
        mat1.dim() >= 2, lambda: f"sgl_kernel::{op}: mat1: expected [..., M, K] (2-D or more)"
    )
    torch._check(mat2.dim() == 2, lambda: f"sgl_kernel::{op}: mat2: expected [N, K] (2-D)")
    torch._check(
        mat1.size(-1) == mat2.size(1),
        lambda: (
            f"sgl_kernel::{op}: mat1: expected size {mat2.size(1)} (K of mat2) in dimension "
            f"{mat1.dim() - 1}, got {mat1.size(-1)}"
        ),
    )
    return mat1.new_empty((*mat1.shape[:-1], mat2.size(0)), dtype=out_dtype)


def _convert_weight_packed(weight: Tensor) -> Tensor:
    _check("convert_weight_packed", weight=weight)
    return weight.new_empty(weight.shape)


def _fp8_scaled_mm_cpu(
    mat1: Tensor,
    mat2: Tensor,
    scales2: Tensor,
    block_size: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    is_vnni: bool,
) -> Tensor:
    return _linear("fp8_scaled_mm_cpu", mat1, mat2, out_dtype, scales2=scales2, bias=bias)


def _one_scale_a_column_or_less(op: str) -> Callable[..., Tensor]:
    """The per-tensor and the per-channel op differ only in the shape of their scales."""

    def fake(
        mat1: Tensor,
        mat2: Tensor,
        scales2: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        is_vnni: bool,
    ) -> Tensor:
        return _linear(op, mat1, mat2, out_dtype, scales2=scales2, bias=bias)

    return fake


def _weight_packed_linear(
    mat1: Tensor,
    mat2: Tensor,
    bias: Tensor | None,
    is_vnni: bool,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return _linear("weight_packed_linear", mat1, mat2, out_dtype or mat1.dtype, bias=bias)


def _bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    _check("bmm_cpu", out=out, mat1=mat1, mat2=mat2, scale=scale)


def _on_cpu(op: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake kernel behind the check that every tensor is on the CPU or fake."""
    names = list(inspect.signature(fake).parameters)

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        _check(op, **{name: x for name, x in given.items() if isinstance(x, Tensor)})
        return fake(*args, **kwargs)

    return checked


def register_fakes() -> None:
    """Register the fake kernel of every op. Called once, when the package is imported."""
    fakes: dict[str, Callable[..., Any]] = {
        "convert_weight_packed": _convert_weight_packed,
        "fp8_scaled_mm_cpu": _fp8_scaled_mm_cpu,
        **{
            op: _one_scale_a_column_or_less(op)
            for op in ("fp8_per_tensor_scaled_mm_cpu", "fp8_per_channel_scaled_mm_cpu")
        },
        "weight_packed_linear": _weight_packed_linear,
        "bmm_cpu": _bmm_cpu,
        **{op: _on_cpu(op, fake) for op, fake in {**TRANSFORMER_FAKES, **ATTENTION_FAKES}.items()},
    }
    for op, fake in fakes.items():
        torch.library.register_fake(f"sgl_kernel::{op}", fake)
