"""Random calls of every op against float64, on every tier that this machine has.

The calls are the same in every run, so a failure is never a matter of luck; Hypothesis shrinks it
and prints the call to repeat it with. `srt/test/kernel_fuzz*.py` draw and check them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import sgl_kernel
from sgl_kernel.testing import isa
from srt.test.ci_register import register_cpu_ci
from srt.test.kernel_calls import all_ops
from srt.test.kernel_fuzz import Family, KernelCall, fuzz
from srt.test.kernel_fuzz_attention import ATTENTION
from srt.test.kernel_fuzz_heads import HEADS
from srt.test.kernel_fuzz_products import PRODUCTS
from srt.test.kernel_fuzz_rows import ROWS

register_cpu_ci(est_time=20, suite="per-commit")

TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]
FAMILIES: dict[str, Family] = {
    "products": PRODUCTS,
    "rows": ROWS,
    "heads": HEADS,
    "attention": ATTENTION,
}


@pytest.fixture(scope="module", autouse=True)
def _restore_tier() -> Iterator[None]:
    with isa(TIERS[-1]):
        yield


def test_every_op_is_in_a_family() -> None:
    fuzzed = [op for family in FAMILIES.values() for op in family]
    assert sorted(fuzzed) == all_ops(), "add the op to a family in srt/test/kernel_fuzz_*.py"


def run_calls(family: str, examples: int) -> None:
    """Draw that many calls of the family's ops and check them on every tier."""
    calls: st.SearchStrategy[Any] = st.one_of(*FAMILIES[family].values())

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
