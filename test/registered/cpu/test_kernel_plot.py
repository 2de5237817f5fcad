"""The plot of the kernels' benchmark: few curves, told apart, and what its legend says."""

import sys
from pathlib import Path
from typing import Any

import pytest

from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

BENCHMARK = Path(__file__).parents[3] / "sgl-kernel-cpu" / "benchmark"
LINEAR = (
    "fp8 per-tensor",
    "fp8 recorded",
    "fp8 per-tensor, bias",
    "fp8 per-tensor, fp16",
    "fp8 per-channel",
    "fp8 block 128x128",
    "bf16 packed",
)


def make_figure(monkeypatch: pytest.MonkeyPatch, ours: tuple[str, ...], peers: int) -> Any:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import plot
    from results import Result

    methods = [(name, True) for name in ours] + [(f"peer {i}", False) for i in range(peers)]
    results = [
        Result(shape, name, is_ours, 0, m, 64, 64, 2, 5, 1e-3, 0.1, 1.0, 1.0, 0.5, 1.0)
        for shape in ("qkv", "down", "o")
        for name, is_ours in methods
        for m in (1, 8)
    ]
    figure = plot.make_figure(results, "A CPU, tier amx, 2 threads")
    for name in ("plot", "results"):
        sys.modules.pop(name)
    return figure


@pytest.mark.parametrize(
    ("ours", "peers", "expected"),
    [
        (LINEAR, 0, ["fp8 per-tensor", "fp8 block 128x128", "bf16 packed"]),
        (LINEAR, 2, ["fp8 per-tensor", "fp8 block 128x128", "bf16 packed", "peer 0", "peer 1"]),
        (LINEAR, 9, ["fp8 per-tensor", "fp8 block 128x128", "bf16 packed", *"012"]),
        (("fp8 bmm", "bf16 bmm"), 1, ["fp8 bmm", "bf16 bmm", "peer 0"]),
    ],
)
def test_at_most_six_curves_that_differ(
    monkeypatch: pytest.MonkeyPatch, ours: tuple[str, ...], peers: int, expected: list[str]
) -> None:
    figure = make_figure(monkeypatch, ours, peers)
    assert figure.get_suptitle() == "A CPU, tier amx, 2 threads"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name.removeprefix("peer ") for name in names] == [
        *(name.removeprefix("peer ") for name in expected),
        "bound (roofline)",
        "spread of the rounds",
    ]
    for axis in figure.axes[:3]:
        curves = axis.lines[:-1]  # the last is the bound
        assert len(curves) == len(expected) <= 6
        assert len({(c.get_color(), c.get_marker()) for c in curves}) == len(curves)
        assert len({c.get_color() for c in curves}) == len({c.get_marker() for c in curves})
        assert len(axis.collections) == len(curves)  # their spreads
