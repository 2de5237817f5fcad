"""Recording what the operators of a function do, to run it again without Python.

A decode pass of a small model is a few milliseconds of kernels and some hundred operator calls. A
recorded pass is one call: all its steps run in one parallel region, in which threads take tasks as
they are free. The kernels are the same, and so is every bit of the result.
"""

import weakref
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

    Not for several threads at once: a replay writes what it also reads.
    """

    def __init__(self, handle: int, tensors: list[Tensor]) -> None:
        self._handle = handle
        self._tensors = tensors
        # Unlike __del__ it needs no module globals, which may be gone when the interpreter ends.
        release = weakref.finalize(self, graph_functions().free, handle)
        release.atexit = False

    def __len__(self) -> int:
        """Steps: an operator is one or a few."""
        size: int = graph_functions().size(self._handle)
        return size

    def __reduce__(self) -> Any:
        raise TypeError("a StepGraph belongs to its memory: it cannot be copied or pickled")

    def replay(self) -> None:
        """Does the work again on the inputs' present values, with Torch's present number of threads
        and the recording's ISA tier.

        Raises:
            RuntimeError: An index or length is out of range, as when the operator is called. What
                came before that operator is done.
            RecordingError: This thread is recording.
        """
        functions = graph_functions()
        error = functions.replay(self._handle)
        if error is not None:
            raise (RecordingError if functions.refused() else RuntimeError)(error.decode())


def record(function: Callable[[], T]) -> tuple[StepGraph, T]:
    """Call ``function`` and record what its operators do.

    It may call operators of this package, and those that only make views. Tensors that it makes are
    part of the graph: a replay overwrites them, the result included. Only what the calling thread
    does is recorded.

    Returns:
        The graph, and the function's result.

    Raises:
        RecordingError: Another operator was called, or one of ours whose work depends on more than
            the shapes of its arguments (``convert_weight_packed``, ``extend_attention_cpu``,
            ``fused_qkv_attention_cpu`` with ``extend_seq_lens``); or this thread records already.
    """
    functions = graph_functions()
    handle = functions.begin()
    if handle is None:
        raise RecordingError("this thread is recording already")
    graph = None
    try:
        recorder = _Recorder()
        graph = StepGraph(handle, recorder.tensors)
        with recorder:
            result = function()
    finally:
        functions.end()
        if graph is None:
            functions.free(handle)
    return graph, result


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
        ours = func.namespace == "sgl_kernel"
        if not ours and not func.is_view:
            raise RecordingError(f"{func} cannot be recorded")
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if ours and graph_functions().refused():
                raise RecordingError(str(error)) from error
            raise
        inputs, results = _tensors_in((args, kwargs)), _tensors_in(result)
        # In inference mode the likes of `to` and `reshape` come as one operator: a view, or a copy.
        if not (ours or _storages(results) <= _storages(inputs)):
            raise RecordingError(f"{func} that copies cannot be recorded")
        self.tensors += inputs + results
        return result


def _storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
