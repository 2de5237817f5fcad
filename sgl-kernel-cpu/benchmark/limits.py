"""The machine's own limits, measured on the threads that run the ops, in the same run.

Read bandwidth over memory in huge pages, bandwidth of a copy (bytes read plus bytes written), and
the multiply-add peak of the tier's instructions: float32, and bfloat16 pairs where it has them.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from memory import huge_pages
from torch import Tensor
from turn import take_turn

import sgl_kernel  # noqa: F401  (loads the ops)

_OPS = torch.ops.sgl_kernel_benchmark
_READ_BYTES = 64 * 2**20
_MULTIPLY_SECONDS = 0.002


@dataclass(frozen=True)
class Limits:
    """Bytes/s and FLOP/s of all threads together."""

    threads: int
    read: float
    copy: float
    flops_f32: float
    flops_bf16: float

    def flops(self, dtype: torch.dtype) -> float:
        """The peak for activations of ``dtype``.

        A float16 value is exactly the sum of two bfloat16 values, so two bf16 products make one.
        """
        if dtype == torch.float32:
            return self.flops_f32
        return (
            self.flops_bf16 if dtype == torch.bfloat16 else max(self.flops_f32, self.flops_bf16 / 2)
        )

    def seconds(self, nbytes: float, flops: float, dtype: torch.dtype) -> float:
        """The roofline: the least time in which this can be moved and computed."""
        return max(nbytes / self.read, flops / self.flops(dtype))


@dataclass
class LimitProbe:
    """Takes samples of the limits; a run takes them between the methods that it times.

    ``nbytes``: memory that the reads walk through, a part at a time.
    """

    nbytes: int = 512 * 2**20
    samples: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = huge_pages(self.nbytes).view(torch.float32).fill_(1.0)
        self._source = source.split(min(_READ_BYTES, self.nbytes) // 4)
        self._target = torch.empty_like(self._source[0])
        self._steps: dict[bool, int] = {}
        self._next = 0
        self.reset()

    def reset(self) -> None:
        """Forget the samples taken."""
        self.samples = {"read": [], "copy": [], "f32": [], "bf16": []}

    def _part(self) -> Tensor:
        self._next = (self._next + 1) % len(self._source)
        return self._source[self._next]

    def _multiply(self, bf16: bool) -> float:
        if bf16 not in self._steps:
            seconds, _ = take_turn(partial(_OPS.multiply_probe, bf16, 10_000))
            self._steps[bf16] = max(1, int(10_000 * _MULTIPLY_SECONDS / seconds))
        seconds, done = take_turn(partial(_OPS.multiply_probe, bf16, self._steps[bf16]))
        return 2.0 * done / seconds

    def sample(self, copy: bool = False) -> None:
        """One sample of each limit, in a turn as methods have it; of the copy only if asked."""
        nbytes = self._source[0].nbytes
        seconds, _ = take_turn(lambda: _OPS.read_probe(self._part()))
        self.samples["read"].append(nbytes / seconds)
        if copy:
            seconds, _ = take_turn(lambda: _OPS.copy_probe(self._target, self._part()))
            self.samples["copy"].append(2 * nbytes / seconds)
        self.samples["f32"].append(self._multiply(False))
        self.samples["bf16"].append(self._multiply(True))

    def limits(self, best: bool = False) -> Limits:
        """Medians of the samples, or the best of them."""
        middle: Callable[[list[float]], float] = max if best else statistics.median
        f32 = middle(self.samples["f32"])
        return Limits(
            torch.get_num_threads(),
            middle(self.samples["read"]),
            middle(self.samples["copy"]) if self.samples["copy"] else 0.0,
            f32,
            max(f32, middle(self.samples["bf16"])),
        )
