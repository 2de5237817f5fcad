"""Fake kernels: the shape and dtype of each op's result, for torch.compile and FakeTensor.

Importing sgl_kernel registers none. Whoever traces calls :func:`register` before::

    import sgl_kernel

    sgl_kernel.fakes.register()

The fake kernel of an op is the body of its declaration, see :func:`sgl_kernel._op.op`. Fakes check
what they can see so that a wrong graph fails while it is traced. Raw ``meta`` tensors are refused
like any other device: a CPU kernel has nothing to say about them.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from sgl_kernel import attention, gemm, heads, transformer
from sgl_kernel._op import declarations

_registering = threading.Lock()


def register() -> None:
    """Register the fake kernel of every op. Further calls do nothing."""
    with _registering:
        _register_once()


@functools.cache
def _register_once() -> None:
    for family in (gemm, transformer, heads, attention):
        for name, declaration in declarations(family).items():
            torch.library.register_fake(f"sgl_kernel::{name}", _checked(declaration))


def _checked(declaration: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a declaration, behind the checks that every op makes of every tensor."""
    signature = inspect.signature(declaration)

    @functools.wraps(declaration)
    def fake(*args: Any, **kwargs: Any) -> Any:
        for argument, value in signature.bind(*args, **kwargs).arguments.items():
            if isinstance(value, Tensor):
                _check(f"sgl_kernel::{declaration.__name__}: {argument}", value)
        return declaration(*args, **kwargs)

    return fake


def _check(what: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{what}: expected a tensor without gradient, or a call under torch.no_grad(), got one "
            "that requires grad: the op has none"
        )
    if tensor.device.type != "cpu" and not is_fake(tensor):
        raise RuntimeError(f"{what}: expected a tensor on cpu, got {tensor.device.type}")
