"""An op in Python is one declaration, from which its typed wrapper and its fake kernel come."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from sgl_kernel._library import REBUILD

P = ParamSpec("P")
R = TypeVar("R")


def op(declaration: Callable[P, R]) -> Callable[P, R]:
    """Make a declaration the wrapper of the op of its name.

    A declaration reads like a function. Its signature is the op's schema in Python's types, its
    docstring says what the op does, and its body is the op's fake kernel: it makes a result of the
    right shape and dtype, and computes nothing. Calling the wrapper calls the op; the body runs
    only where something is traced, and only after :func:`sgl_kernel.fakes.register`.

    Raises:
        ImportError: the library has no op of that name.
    """
    name = declaration.__name__
    if not hasattr(torch.ops.sgl_kernel, name):
        raise ImportError(f"sgl_kernel: the library has no op {name}; {REBUILD}")
    # Looked up once: each dot of torch.ops costs as much as a small op's checks.
    overload = getattr(torch.ops.sgl_kernel, name).default

    @functools.wraps(declaration)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return overload(*args, **kwargs)

    return call


def declarations(family: ModuleType) -> dict[str, Callable[..., Any]]:
    """The declarations of a module that consists of ops, by name."""
    return {name: vars(family)[name].__wrapped__ for name in family.__all__}
