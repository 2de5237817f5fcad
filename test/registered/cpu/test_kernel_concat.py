"""The op that puts results side by side: the columns as they are, recorded and replayed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel import record
from srt.test.ci_register import register_cpu_ci
from srt.test.torch_threads import torch_threads

register_cpu_ci(est_time=3, suite="per-commit")


def parts(rows: int, columns: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, n, generator=generator).to(dtype) for n in columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [(1, 1), (33, 64), (7, 0), (96, 32, 31), (0, 5, 0)])
@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_columns(rows: int, columns: tuple[int, ...], dtype: torch.dtype) -> None:
    given = parts(rows, columns, dtype)
    out = sgl_kernel.concat_columns_cpu(*given)
    assert out.is_contiguous()
    assert torch.equal(out, torch.cat(given, 1))


def test_bits_are_copied() -> None:
    """NaN with its payload, infinities, both zeros; rows of slices of a larger tensor."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(256, 256)
    wide = bits.view(torch.bfloat16)
    out = sgl_kernel.concat_columns_cpu(wide[::2, 100:], wide[1::2, :100])
    expected = torch.cat([bits[::2, 100:], bits[1::2, :100]], 1)
    assert torch.equal(out.view(torch.int16), expected)


def test_threads() -> None:
    given = parts(700, (513, 700, 1), torch.float32)
    for count in (1, 2, 3):
        with torch_threads(count):
            assert torch.equal(sgl_kernel.concat_columns_cpu(*given), torch.cat(given, 1))


def test_replay_follows_its_inputs() -> None:
    first, second = parts(3, (5, 4), torch.float16)
    graph, out = record(lambda: sgl_kernel.concat_columns_cpu(first, second))
    first.fill_(1)
    second.fill_(2)
    graph.replay()
    assert torch.equal(out, torch.cat([first, second], 1))


X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0], X), r"first: expected \[M, N\]"),
        ((X, X[:2]), r"second: expected size 3 \(M of first\) in dimension 0, got 2"),
        ((X, X, X.half()), "third: expected dtype float32, got float16"),
        ((X.int(), X), "first: expected dtype float32 or bfloat16 or float16"),
        ((X, X.t().contiguous().t()), "second: expected unit stride"),
        ((X, X.to("meta")), "second: expected a tensor on cpu"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"concat_columns_cpu: {message}"):
        torch.ops.sgl_kernel.concat_columns_cpu(*arguments)
