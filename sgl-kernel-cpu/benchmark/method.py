"""A way to multiply, its inputs, and the interleaved timing of many of them."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from limits import LimitProbe
from shapes import Shape
from torch import Tensor
from turn import take_turn


class Activations:
    """mat1 of [m, k], or [batch, m, k], in every dtype that a method may want: the same values.

    float16 and bfloat16 hold them exactly: normal numbers of 8 significant bits.
    """

    def __init__(self, m: int, shape: Shape) -> None:
        size = (shape.batch, m, shape.k) if shape.batch else (m, shape.k)
        x = torch.randn(size).to(torch.bfloat16)
        x[x.abs() < 2.0**-10] = 0
        self.m = m
        self.bf16, self.fp16, self.f32 = x, x.to(torch.float16), x.float()
        self.numpy = self.f32.numpy()


@dataclass
class Method:
    """One way to multiply by the weight of one shape.

    ``run(x, i)`` uses the i-th copy of the weight and returns [m, n] or [batch, m, n].
    ``check(x, result)`` raises ``AssertionError`` for a wrong result.

    A run may make several ``products``, each with another copy of the weight. It then returns a
    list of them, ``check`` gets each, and what is timed is divided by their number. ``most_rows``
    is the largest m that it takes part at: a run must stay short.
    """

    name: str
    ours: bool
    weight_bytes: int
    dtype: torch.dtype
    run: Callable[[Activations, int], object]
    check: Callable[[Activations, Tensor], None]
    products: int = 1
    most_rows: int | None = None

    def bytes_moved(self, m: int, shape: Shape) -> int:
        """Weights and scales, mat1 and out: each once."""
        elements = m * (shape.k + shape.n) * max(1, shape.batch)
        return self.weight_bytes + elements * self.dtype.itemsize


@dataclass
class Timing:
    """Seconds of one product in each round that the method took part in, by round."""

    method: Method
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        values = sorted(self.seconds.values())
        if len(values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return (high - low) / self.median

    def ratio(self, other: "Timing") -> float:
        """Our time over the other's: the median over the rounds that both took part in."""
        both = self.seconds.keys() & other.seconds.keys()
        return statistics.median(self.seconds[r] / other.seconds[r] for r in both)


def _check(method: Method, x: Activations, result: object) -> None:
    for product in result if isinstance(result, list) else [result]:
        method.check(x, product if isinstance(product, Tensor) else torch.as_tensor(product))


def measure(
    methods: Sequence[Method], x: Activations, rounds: int, seconds: float, probe: LimitProbe
) -> list[Timing]:
    """Time every method, in turn, round after round; the limits take their turn as well.

    Whatever changes the machine's speed meets all of them. Each result is checked before anything
    is timed, and the last one timed is checked again.

    Args:
        rounds: turns of each method.
        seconds: what a method may take in all; past that it sits out, after two turns at least.
    """
    timings = [Timing(method) for method in methods]
    for method in methods:
        _check(method, x, method.run(x, 0))  # also allocates scratch, starts threads
    copies = itertools.count(1)
    spent = [0.0] * len(methods)
    last: list[object] = [None] * len(methods)
    for turn in range(rounds):
        probe.sample()
        # In another order each time, so that no method always follows the same one.
        for index in random.sample(range(len(methods)), len(methods)):
            if turn >= 2 and spent[index] > seconds:
                continue
            start = time.perf_counter()
            method = methods[index]
            taken, last[index] = take_turn(partial(_next, method.run, x, copies))
            timings[index].seconds[turn] = taken / method.products
            spent[index] += time.perf_counter() - start
    for method, result in zip(methods, last, strict=True):
        _check(method, x, result)
    return timings


def _next(
    run: Callable[[Activations, int], object], x: Activations, copies: Iterator[int]
) -> object:
    return run(x, next(copies))
