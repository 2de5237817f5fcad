"""Graphs in an arena: tensors share memory as far as their lives allow, nothing else changes."""

import gc

import pytest
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel import Arena, RecordingError, record
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

ROWS, SIZE, LAYERS = 3, 96, 12
WEIGHT = torch.rand(SIZE)
ONES, TWOS = torch.ones(16), torch.full((16,), 2.0)


def layers(x: Tensor, count: int = LAYERS) -> tuple[Tensor, Tensor]:
    """A residual stream that lives through all layers, and activations that live through one."""
    residual = sgl_kernel.rmsnorm_cpu(x, WEIGHT, 1e-5, torch.float32)
    early = sgl_kernel.rmsnorm_cpu(residual, WEIGHT, 1e-5)
    branch = early
    for _ in range(count):
        wide = sgl_kernel.rmsnorm_cpu(branch.view(-1, SIZE), WEIGHT, 1e-5, torch.float16)
        branch = sgl_kernel.add_rmsnorm_cpu(wide, residual, WEIGHT, 1e-5, torch.float32)
    return branch, early[1:]


def test_a_replay_gives_the_bits_of_a_call_in_less_memory() -> None:
    x = torch.randn(ROWS, SIZE)
    arena = Arena()
    graph, (branch, early) = record(lambda: layers(x), arena)
    for _ in range(3):
        expected = layers(x)
        assert torch.equal(branch, expected[0])
        assert torch.equal(early, expected[1])
        x.copy_(torch.randn(ROWS, SIZE))
        graph.replay()
    row_bytes = 4 * ROWS * SIZE
    # Residual, what is returned, and what one layer needs.
    assert arena.take(0).numel() <= 5 * (row_bytes + 64)


def test_graphs_share_an_arena_and_take_turns() -> None:
    arena = Arena(reserve=1 << 20)
    inputs = [torch.randn(rows, SIZE) for rows in (1, 5, 2)]
    recorded = [record(lambda x=x: layers(x), arena) for x in inputs]  # type: ignore[misc]
    assert arena.take(0).numel() == 1 << 20
    for turn in range(3):
        for x, (graph, (branch, early)) in zip(inputs, recorded, strict=True):
            x.add_(turn)
            graph.replay()
            expected = layers(x)
            assert torch.equal(branch, expected[0])
            assert torch.equal(early, expected[1])


def test_an_arena_that_grows_leaves_older_graphs_their_memory() -> None:
    arena = Arena()
    small, large = torch.randn(1, SIZE), torch.randn(50, SIZE)
    first, (result, _) = record(lambda: layers(small), arena)
    record(lambda: layers(large), arena)
    del arena
    gc.collect()
    first.replay()
    assert torch.equal(result, layers(small)[0])


def test_results_outlive_graph_and_arena() -> None:
    x = torch.randn(ROWS, SIZE)
    graph, (branch, early) = record(lambda: layers(x), Arena())
    expected = layers(x)
    del graph
    gc.collect()
    filler = [torch.full((ROWS * SIZE,), torch.nan) for _ in range(100)]
    assert torch.equal(branch, expected[0])
    assert torch.equal(early, expected[1])
    assert len(filler) == 100


def test_tensors_without_elements() -> None:
    x = torch.randn(0, SIZE)
    graph, (branch, _) = record(lambda: (sgl_kernel.silu_and_mul_cpu(x), x), Arena())
    graph.replay()
    assert branch.shape == (0, SIZE // 2)


def test_a_function_that_does_something_else_the_second_time_is_refused() -> None:
    x = torch.randn(ROWS, SIZE)
    counts = iter([3, 4])
    with pytest.raises(RecordingError, match="made other tensors"):
        record(lambda: layers(x, next(counts)), Arena())
    graph, result = record(lambda: layers(x))
    assert len(graph) == 2 + 2 * LAYERS
    assert torch.equal(result[0], layers(x)[0])


def test_tensors_that_live_longer_the_second_time_are_refused() -> None:
    x = torch.randn(ROWS, SIZE)
    late = iter([False, True])

    def function() -> Tensor:
        first = sgl_kernel.rmsnorm_cpu(x, WEIGHT, 1e-5)
        second = sgl_kernel.rmsnorm_cpu(first, WEIGHT, 1e-5)
        third = sgl_kernel.rmsnorm_cpu(second, WEIGHT, 1e-5)
        return sgl_kernel.rmsnorm_cpu(first if next(late) else third, WEIGHT, 1e-5)

    with pytest.raises(RecordingError, match="made other tensors, or used them otherwise"):
        record(function, Arena())


@pytest.mark.parametrize("rows", [(1, 4), (4, 1)])
def test_tensors_of_another_size_the_second_time_are_refused(rows: tuple[int, int]) -> None:
    """Before anything is written where there is no room."""
    x = torch.randn(4, 1 << 16)
    counts = iter(rows)
    with pytest.raises(RecordingError, match="expected the same tensors at both calls, got"):
        record(lambda: sgl_kernel.silu_and_mul_cpu(x[: next(counts)]), Arena())
    assert len(record(lambda: sgl_kernel.silu_and_mul_cpu(x), Arena())[0]) == 1


@pytest.mark.parametrize("seed", range(20))
def test_tensors_that_are_needed_at_the_same_time_lie_apart(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    x = torch.randn(4, 16)
    picks = []
    for count in range(2, 32):
        b = number(count)
        picks.append(((b + 1 + number(count - 1)) % count, b))

    def function() -> list[Tensor]:
        """Every tensor is made of two that came before, one of which it changes."""
        made = [sgl_kernel.rmsnorm_cpu(x, weight, 1e-5) for weight in (ONES, TWOS)]
        for a, b in picks:
            made.append(sgl_kernel.add_rmsnorm_cpu(made[a], made[b], ONES, 1e-5))
        return [made[-1], made[7]]

    graph, results = record(function, Arena())
    for _ in range(2):
        x.copy_(torch.randn(4, 16, generator=generator))
        graph.replay()
        for got, expected in zip(results, function(), strict=True):
            assert torch.equal(got, expected)
