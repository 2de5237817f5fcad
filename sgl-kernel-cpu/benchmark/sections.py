"""What is measured beside the grid: the cost of a call, packing, and threads."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from limits import LimitProbe
from method import Activations
from ours import Weights
from shapes import SMALL_SHAPES, Shape
from torch import Tensor
from turn import take_turn

import sgl_kernel
from sgl_kernel.testing import random_weight

_OPS = torch.ops.sgl_kernel_benchmark


def _each(calls: int, run: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _each_after(calls: int, before: Callable[[], object], run: Callable[[], object]) -> float:
    """Seconds of ``run`` when ``before`` has just run, and of reading the clock (0.1 us)."""
    seconds = 0.0
    for _ in range(calls):
        before()
        start = time.perf_counter()
        run()
        seconds += time.perf_counter() - start
    return seconds / calls


@dataclass(frozen=True)
class Overhead:
    """Seconds of one small call and of its parts.

    ``kernel``: the GEMM alone on one thread, called from C++ in a loop; ``parts``: into how many
    equal parts the threads can split it. ``empty``: an op of the same schema that only allocates
    the output; ``empty_after``: the same after a call, whose weight has pushed the code of Python
    and of Torch's dispatch out of the first caches; ``empty_parallel``: one that starts the threads
    as well.
    """

    shape: str
    threads: int
    call: float
    kernel: float
    parts: float
    empty: float
    empty_after: float
    empty_parallel: float

    @property
    def excess(self) -> float:
        """What a call takes over its compute and an empty op where the call is."""
        return self.call - self.kernel / self.parts - self.empty_after


def measure_overhead(threads: Sequence[int], rounds: int) -> list[Overhead]:
    """Small shapes at M=1, weights in cache, for each number of threads."""
    found = []
    before = torch.get_num_threads()
    scale = torch.tensor(0.01)
    for count in threads:
        torch.set_num_threads(count)
        for shape in SMALL_SHAPES:
            x = torch.randn(1, shape.k, dtype=torch.bfloat16)
            w = sgl_kernel.convert_weight_packed(
                random_weight(torch.float8_e4m3fn, shape.n, shape.k)
            )
            out = torch.empty(1, shape.n, dtype=x.dtype)
            arguments = (x, w, scale, None, x.dtype, True)
            call = sgl_kernel.fp8_per_tensor_scaled_mm_cpu
            runs: dict[str, Callable[[], float]] = {
                "call": partial(_each, 100, partial(call, *arguments)),
                "kernel": partial(_OPS.kernel_seconds, out, x, w, scale, 100),
                "empty": partial(_each, 100, partial(_OPS.empty_mm, *arguments)),
                "empty_after": partial(
                    _each_after,
                    100,
                    partial(call, *arguments),
                    partial(_OPS.empty_mm, *arguments),
                ),
                "empty_parallel": partial(_each, 100, partial(_OPS.empty_parallel_mm, *arguments)),
            }
            samples: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(rounds):
                for name, run in runs.items():
                    samples[name].append(run())
            blocks = -(-shape.n // 32)
            median = {name: statistics.median(values) for name, values in samples.items()}
            found.append(
                Overhead(
                    f"N={shape.n} K={shape.k}",
                    count,
                    median["call"],
                    median["kernel"],
                    blocks / -(-blocks // count),
                    median["empty"],
                    median["empty_after"],
                    median["empty_parallel"],
                )
            )
    torch.set_num_threads(before)
    return found


@dataclass(frozen=True)
class Packing:
    """``convert_weight_packed`` of one weight; bytes read plus bytes written."""

    weight: str
    median: float
    gbytes_per_s: float
    of_copy: float


def measure_packing(shape: Shape, rounds: int, probe: LimitProbe) -> list[Packing]:
    """Packing, with copies of the machine between.

    Both weights have the bytes of the one in e4m3. glibc gives back what is larger than 32 MiB at
    once, and the next output would come from memory whose pages the kernel has to clear first.
    """
    found = []
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        weight = random_weight(dtype, shape.n // dtype.itemsize, shape.k)
        sources: list[Tensor] = [
            weight.clone() for _ in range(max(2, min(64, probe.nbytes // weight.nbytes)))
        ]
        probe.reset()
        packing = partial(_pack_next, cycle(sources))
        seconds = []
        for _ in range(rounds):
            probe.sample(copy=True)
            taken, _ = take_turn(packing)
            seconds.append(taken)
        median = statistics.median(seconds)
        rate = 2 * weight.nbytes / median
        name = f"{weight.shape[0]} x {shape.k}, {str(dtype).removeprefix('torch.')}"
        found.append(Packing(name, median, rate / 1e9, rate / probe.limits().copy))
    return found


def _pack_next(sources: Iterator[Tensor]) -> None:
    # What is returned would stay alive during the next call, whose output would then lie in fresh
    # memory.
    sgl_kernel.convert_weight_packed(next(sources))


@dataclass(frozen=True)
class Scaling:
    """Seconds on one thread and on all, and the median of the ratios of neighbours in time."""

    shape: str
    m: int
    one: float
    all: float
    speedup: float


def measure_scaling(
    shape: Shape, weights: Weights, rows: Sequence[int], threads: int, rounds: int
) -> list[Scaling]:
    """The per-tensor op on one thread and on all, in turn."""
    packed: list[Tensor] = weights.packed_copies(weights.source)
    scale = torch.tensor(0.01)
    found = []
    for m in rows:
        x = Activations(m, shape).bf16
        weight = cycle(packed)

        def run(x: Tensor = x, weight: Iterator[Tensor] = weight) -> Tensor:
            return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
                x, next(weight), scale, None, x.dtype, True
            )

        one: list[float] = []
        many: list[float] = []
        for _ in range(rounds):
            for count, samples in ((1, one), (threads, many)):
                torch.set_num_threads(count)
                samples.append(take_turn(run)[0])
        speedup = statistics.median(a / b for a, b in zip(one, many, strict=True))
        found.append(
            Scaling(shape.label, m, statistics.median(one), statistics.median(many), speedup)
        )
    return found
