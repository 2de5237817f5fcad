"""Random calls of every op against float64, on every tier that this machine has.

The calls are the same in every run, so a failure is never a matter of luck; Hypothesis shrinks it
and prints the call to repeat it with. `srt/test/kernels/` draws and checks them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import sgl_kernel
from sgl_kernel.testing import isa
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels import FAMILIES
from srt.test.kernels.record import KernelCall, fuzz

register_cpu_ci(est_time=20, suite="per-commit")

TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]


@pytest.fixture(scope="module", autouse=True)
def _restore_tier() -> Iterator[None]:
    with isa(TIERS[-1]):
        yield


def run_calls(family: str, examples: int) -> None:
    """Draw that many calls of the family's ops and check them on every tier."""
    calls: st.SearchStrategy[Any] = st.one_of(*(op.calls for op in FAMILIES[family].values()))

    @fuzz(examples)
    @given(calls)
    def run(call: KernelCall) -> None:
        for tier in TIERS:
            sgl_kernel.set_isa(tier)
            call.check(tier)

    check: Callable[[], None] = run
    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls_agree_with_float64(family: str) -> None:
    run_calls(family, 100)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_calls_agree_with_float64(family: str) -> None:
    run_calls(family, 2000)
