"""Recording what the operators of a function do, to run it again without Python.

A decode pass of a small model is a few milliseconds of kernels and some hundred operator calls. A
recorded pass is one call: all its steps run in one parallel region, in which threads take tasks as
they are free. The kernels are the same, and so is every bit of the result.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sgl_kernel._library import graph_functions

T = TypeVar("T")


class RecordingError(RuntimeError):
    """A function does something that cannot be replayed; the message names it."""


class StepGraph:
    """The recorded work of a function. Reads and writes the memory of the tensors that the function
    used and made, and keeps them alive.
    """

    def __init__(self, handle: int, tensors: list[Tensor]) -> None:
        self._handle = handle
        self._tensors = tensors

    def __len__(self) -> int:
        """Steps: an operator is one or a few."""
        size: int = graph_functions().size(self._handle)
        return size

    def replay(self) -> None:
        """Does the work again, on the inputs' present values, with Torch's present number of threads
        and the ISA tier of the recording.

        Raises:
            RuntimeError: An index or length is out of range, as when the operator is called.
        """
        error = graph_functions().replay(self._handle)
        if error is not None:
            raise RuntimeError(error.decode())

    def __del__(self) -> None:
        graph_functions().free(self._handle)


def record(function: Callable[[], T]) -> tuple[StepGraph, T]:
    """Call ``function`` and record what its operators do.

    It may call operators of this package, and those that only make views. Tensors that it makes are
    part of the graph: a replay overwrites them, the result included.

    Returns:
        The graph, and the function's result.

    Raises:
        RecordingError: Another operator was called, or one of ours whose work depends on more than
            the shapes of its arguments.
    """
    functions = graph_functions()
    handle = functions.begin()
    if handle is None:
        raise RecordingError("this thread is recording already")
    recorder = _Recorder()
    try:
        with recorder:
            result = function()
    except BaseException:
        functions.end()
        functions.free(handle)
        raise
    functions.end()
    return StepGraph(handle, recorder.tensors), result


class _Recorder(TorchDispatchMode):
    """Refuses operators that would be missing in a replay, and collects tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else Torch imports its compiler at the first call: a second and 150 MB.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace != "sgl_kernel" and not func.is_view:
            raise RecordingError(f"{func} cannot be recorded")
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self.tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return result
