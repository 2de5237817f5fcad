"""Torch's inference mode, for functions that Ctrl-C may interrupt anywhere."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def in_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Runs a function in `torch.inference_mode()`, which ends with it whatever interrupts it where.

    With Torch's own context manager it may stay on for the thread: one that is interrupted before
    it has ended the mode does so when its traceback is freed, and if it was nested in another, it
    then brings back the mode of that other one. So here modes are not nested, and they are ended
    explicitly.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        mode = torch._C._InferenceMode(True)
        # Ending it twice does nothing; the first attempt may be interrupted.
        try:
            try:
                mode.__enter__()
                return function(*args, **kwargs)
            finally:
                mode.__exit__(None, None, None)
        finally:
            mode.__exit__(None, None, None)

    return wrapper
