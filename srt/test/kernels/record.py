"""What the tests know about an op beside its schema, and what its random calls are made of.

A random call is a frozen dataclass, which Hypothesis prints when it fails, with a `seed` that fills
its tensors; `check(tier)` makes it with the kernels of that tier, which is in use already, and
compares with float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from srt.test.kernels.properties import FLOATS, INDICES, Arguments

SEEDS = st.integers(0, 2**32 - 1)
INDEX_DTYPES = st.sampled_from(INDICES[::-1])


class KernelCall(Protocol):
    """One call of an op."""

    def check(self, tier: str) -> None:
        """Raise AssertionError unless the op does what it should."""


@dataclass(frozen=True)
class OpRecord:
    """What the tests of all ops are run from."""

    # Calls that walk the op's optional parts, as positional arguments with values of Torch's global
    # generator. Fake kernel, opcheck, record and replay are tested with them.
    samples: Callable[[], list[tuple[Any, ...]]]
    # The contract: a call that the op accepts, by the dtypes of activations and result, and whether
    # it accepts other arguments. That memory is apart and that nothing requires grad is looked at
    # for all ops alike.
    arguments: Callable[[torch.dtype, torch.dtype], Arguments]
    is_allowed: Callable[[Arguments], bool]
    # Random calls that know what float64 gives.
    calls: st.SearchStrategy[Any]
    # Dtypes of activations.
    dtypes: tuple[torch.dtype, ...] = FLOATS


Records = dict[str, OpRecord]


def fuzz(examples: int) -> settings:
    """Settings of a fuzz test: the same calls in every run."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,  # nor does a busy machine fail
        suppress_health_check=[HealthCheck.too_slow],
    )


def sizes(least: int, most: int) -> st.SearchStrategy[int]:
    """Mostly small ones, and those around the multiples of 32 that kernels have blocks of."""
    edges = [s for m in range(32, most, 32) for s in (m - 1, m, m + 1)]
    small = st.integers(least, min(most, 20))
    return small | st.sampled_from(edges) if edges else small


def margins() -> st.SearchStrategy[tuple[int, int]]:
    """Elements before and after each row."""
    return st.tuples(st.integers(0, 9), st.integers(0, 40))


def rows_in_nan(
    sizes: tuple[int, ...], dtype: torch.dtype, margin: tuple[int, int], transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """A buffer of NaN, and the part of it that has these sizes and leaves margins around each row.

    Args:
        sizes: `[..., width]`.
        dtype: Any floating-point dtype.
        margin: Elements before and after each row.
        transposed: The outer dimensions lie in the opposite order in memory.
    """
    *outer, width = sizes
    before, after = margin
    in_memory = outer[::-1] if transposed else outer
    buffer = torch.full((*in_memory, before + width + after), math.nan).to(dtype)
    rows = buffer[..., before : before + width]
    if transposed:
        rows = rows.permute(*range(len(outer))[::-1], len(outer))
    return buffer, rows


def check_margins(buffer: Tensor, rows: Tensor) -> None:
    """Raise AssertionError if something beside the rows of `rows_in_nan` was written."""
    assert buffer.isnan().sum() == buffer.numel() - rows.numel(), "wrote into a margin"
