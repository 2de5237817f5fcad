"""Recording what the operators of a function do, to run it again without Python.

A decode pass of a small model is a few milliseconds of kernels and some hundred operator calls. A
recorded pass is one call: all its steps run in one parallel region, in which threads take tasks as
they are free. The kernels are the same, and so is every bit of the result.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sgl_kernel._library import graph_functions

T = TypeVar("T")

_ALIGNMENT = 64


class RecordingError(RuntimeError):
    """A function does something that cannot be replayed; the message names it."""


class StepGraph:
    """The recorded work of a function. Reads and writes the memory that the tensors which the
    function used and made had then, and keeps it alive; a storage that is resized ends the graph.

    Not for several threads at once: a replay writes what it also reads.
    """

    def __init__(
        self,
        capsule: Any,
        kept: dict[int, torch.UntypedStorage],
        memory: torch.UntypedStorage | None = None,
    ) -> None:
        try:
            self._pointer = graph_functions().pointer(capsule)
        except ValueError:
            raise TypeError(
                f"a StepGraph is what sgl_kernel.record returns, it cannot be made of {capsule!r}"
            ) from None
        self._capsule = capsule  # frees the graph
        self._kept = kept
        # Of an arena; the graph itself knows places in it only.
        self._memory = memory
        self._memory_at = None if memory is None else (memory.data_ptr(), memory.nbytes())

    def __len__(self) -> int:
        """Steps: an operator is one or a few."""
        return graph_functions().size(self._pointer)

    def __reduce__(self) -> Any:
        raise TypeError("a StepGraph belongs to its memory: it cannot be copied or pickled")

    def replay(self) -> None:
        """Does the work again on the inputs' present values, with Torch's present number of threads
        and the recording's ISA tier.

        Raises:
            RuntimeError: An index or length is out of range, as when the operator is called. What
                came before that operator is done. Or memory that it uses was resized since it was
                recorded; then nothing is done.
            RecordingError: This thread is recording.
        """
        memory = self._memory
        if memory is not None and (memory.data_ptr(), memory.nbytes()) != self._memory_at:
            raise RuntimeError("StepGraph.replay: the memory of its arena was resized")
        functions = graph_functions()
        error = functions.replay(self._pointer)
        if error is not None:
            raise (RecordingError if functions.refused() else RuntimeError)(error.decode())


class Arena:
    """Memory for the tensors of graphs that never run at the same time: they overwrite each other,
    results included.

    Args:
        reserve: Bytes to ask for at first. The system gives memory when it is used, so that asking
            for more than the graphs need costs nothing.
    """

    def __init__(self, reserve: int = 0) -> None:
        self._memory = torch.empty(reserve, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """At least ``size`` bytes. Graphs that hold a smaller piece from before keep it."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory


def record(function: Callable[[], T], arena: Arena | None = None) -> tuple[StepGraph, T]:
    """Call ``function`` and record what its operators do.

    It may call operators of this package, and those that only make views. A replay overwrites the
    tensors that it makes, the result included. Only what the calling thread does is recorded.

    Args:
        function: is called twice where there is an arena: where its tensors can lie is known only
            after the first time.
        arena: memory for the tensors that it makes. They share it as far as they are not needed at
            the same time, so only those that ``function`` returns hold their values afterwards.
            None: each has memory of its own, which the graph keeps.

    Returns:
        The graph, and the function's result.

    Raises:
        RecordingError: Another operator was called, or one of ours whose work depends on more than
            the shapes of its arguments (``convert_weight_packed``, ``extend_attention_cpu``,
            ``fused_qkv_attention_cpu`` with ``extend_seq_lens``); or this thread records already;
            or ``function`` made other tensors, or used them otherwise, the second time; or it used
            a result of another graph of the arena.
    """
    graph, result, recorder = _record(function, [], [], None)
    if arena is None:
        return graph, result
    sizes, offsets = recorder.plan(result)
    end = max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
    memory = arena.take(end + _ALIGNMENT)
    base = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    del graph, result
    places = [base + offset for offset in offsets]
    graph, result, again = _record(function, places, sizes, memory)
    if again.plan(result) != (sizes, offsets):
        raise RecordingError(
            "the function made other tensors, or used them otherwise, when it was called again"
        )

    def owned(tensor: Tensor) -> Tensor:
        # What the operators made does not own its memory.
        start = tensor.data_ptr() - memory.data_ptr()
        if tensor.numel() == 0 or not 0 <= start < memory.numel():
            return tensor
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        piece = memory[start : start + (last + 1) * tensor.itemsize].view(tensor.dtype)
        return piece.as_strided(tensor.shape, tensor.stride())

    return graph, tree_map_only(Tensor, owned, result)


def _record(
    function: Callable[[], T], places: Sequence[int], sizes: Sequence[int], memory: Tensor | None
) -> tuple[StepGraph, T, "_Recorder"]:
    """``places`` for the first tensors that it makes, of ``sizes`` bytes, lie in ``memory``."""
    functions = graph_functions()
    if functions.recording():
        raise RecordingError("this thread is recording already")
    recorder = _Recorder(memory)
    storage = None if memory is None else memory.untyped_storage()
    graph = StepGraph(functions.new(), recorder.kept, storage)

    def body() -> T:
        with recorder:
            return function()

    pairs = (_Place * len(places))(*map(_Place, places, sizes))
    modes = _Modes()
    # The thread records during this one call, however it ends. Torch's modes are entered and left
    # in Python, where a KeyboardInterrupt can come between any two instructions, here as well.
    try:
        try:
            result = functions.record(graph._capsule, pairs, len(pairs), body)
        except BaseException:
            modes.restore()
            raise
    except BaseException:
        modes.restore()
        raise
    return graph, result, recorder


class _Place(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class _Modes:
    """Torch's dispatch modes of this thread, as they are when this is made: how many there are, and
    what Torch has noted about them. Where there are none, a note that says otherwise is what two
    interrupts in a row have left of a mode, and is put right.
    """

    def __init__(self) -> None:
        self._depth = torch._C._len_torch_dispatch_stack()
        self._notes = {
            name: value and self._depth > 0
            for name, value in vars(_python_dispatch).items()
            if name.startswith("_is_in_") and isinstance(value, bool)
        }
        self.restore()

    def restore(self) -> None:
        """Leaves the modes that were entered since then."""
        while torch._C._len_torch_dispatch_stack() > self._depth:
            torch._C._pop_torch_dispatch_stack(None)
        vars(_python_dispatch).update(self._notes)
        # What the compiler looks at, in versions of Torch that have it.
        note = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
        if note is not None:
            note(self._notes["_is_in_any_mode_without_ignore_compile_internals"])


class _Recorder(TorchDispatchMode):
    """Refuses operators that would be missing in a replay, and sees who uses which tensor."""

    def __init__(self, memory: Tensor | None) -> None:
        super().__init__()
        self._memory = None if memory is None else _storage(memory)
        # Not the tensors, which may be given other memory: modules do that to change their dtype.
        self.kept: dict[int, torch.UntypedStorage] = {}
        self._calls = 0
        # [bytes, call that made it, last call that used it], in the order in which they were made.
        self._made: list[list[int]] = []
        self._place: dict[int, int] = {}  # in that list, by storage

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
        if not graph_functions().recording():  # a mode that an interrupt has left behind
            return func(*args, **(kwargs or {}))
        ours = func.namespace == "sgl_kernel"
        if not ours and not func.is_view:
            raise RecordingError(f"{func} cannot be recorded")
        inputs = _tensors_in((args, kwargs))
        if self._memory is not None and self._memory in map(_storage, inputs):
            raise RecordingError(
                f"{func} uses a tensor of the arena that the graph is to overwrite: copy it first"
            )
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if ours and graph_functions().refused():
                raise RecordingError(str(error)) from error
            raise
        results = _tensors_in(result)
        # In inference mode the likes of `to` and `reshape` come as one operator: a view, or a copy.
        if not (ours or {*map(_storage, results)} <= {*map(_storage, inputs)}):
            raise RecordingError(f"{func} that copies cannot be recorded")
        self._calls += 1
        self._use(inputs, self._calls)
        if ours:
            for tensor in results:
                self._place[_storage(tensor)] = len(self._made)
                self._made.append([tensor.nbytes, self._calls, self._calls])
        self.keep(inputs + results)
        return result

    def keep(self, tensors: list[Tensor]) -> None:
        """Keeps their memory alive, with that of all tensors seen."""
        self.kept |= {_storage(tensor): tensor.untyped_storage() for tensor in tensors}

    def plan(self, result: Any) -> tuple[list[int], list[int]]:
        """Bytes of the tensors made and where they can lie in one piece of memory: each as low as
        those allow that are needed while it is. The result is needed to the end.
        """
        self._use(_tensors_in(result), self._calls + 1)
        offsets: list[int] = []
        placed: list[tuple[int, int, int]] = []  # offset, end, last call
        for size, born, last in self._made:
            placed = sorted(other for other in placed if other[2] >= born)
            offset = 0
            for start, end, _ in placed:
                if offset + size <= start:
                    break
                offset = max(offset, -(-end // _ALIGNMENT) * _ALIGNMENT)
            placed.append((offset, offset + size, last))
            offsets.append(offset)
        return [size for size, _, _ in self._made], offsets

    def _use(self, tensors: list[Tensor], call: int) -> None:
        for tensor in tensors:
            place = self._place.get(_storage(tensor))
            if place is not None:
                self._made[place][2] = call


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
