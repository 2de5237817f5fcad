"""The machine's own limits: what a kernel can at best reach, measured in the same run."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sgl_kernel._library import fma_probe, read_probe


@dataclass(frozen=True)
class Limits:
    """Read bandwidth in bytes/s and float32 multiply-add peak in FLOP/s, all threads together."""

    threads: int
    bandwidth: float
    flops: float


def _together(threads: int, work: Callable[[int], float]) -> float:
    """Run ``work(thread)`` on all threads at once; amount done by all, per second."""
    barrier = threading.Barrier(threads + 1)
    done = [0.0] * threads

    def run(thread: int) -> None:
        barrier.wait()
        done[thread] = work(thread)
        barrier.wait()

    pool = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in pool:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - start
    for thread in pool:
        thread.join()
    return sum(done) / seconds


def measure_limits(threads: int, repetitions: int = 5) -> Limits:
    """Best of several runs: a limit is what the machine can do when nothing disturbs it."""
    floats = 64 * 2**20  # 256 MiB a thread: larger than any cache share
    buffers = [torch.ones(floats) for _ in range(threads)]

    def read(thread: int) -> float:
        read_probe(buffers[thread])
        return buffers[thread].nbytes

    def multiply(_: int) -> float:
        return 2.0 * fma_probe(2_000_000)

    return Limits(
        threads,
        max(_together(threads, read) for _ in range(repetitions)),
        max(_together(threads, multiply) for _ in range(repetitions)),
    )
