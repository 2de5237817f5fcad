"""Tensors side by side in huge pages."""

import mmap
from typing import Any

import pytest
import torch

from srt.test.ci_register import register_cpu_ci
from srt.utils.huge_pages import HugePageArena

register_cpu_ci(est_time=3, suite="per-commit")

SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 5), torch.float32),
    ((7,), torch.bfloat16),
    ((), torch.float32),
    ((0, 4), torch.float16),
    ((33, 31), torch.float8_e4m3fn),
    ((5000, 5000), torch.float32),  # more than a chunk
    ((40 << 20,), torch.uint8),
    ((40 << 20,), torch.uint8),
]


def fill(arena: HugePageArena) -> None:
    tensors = [arena.empty(shape, dtype) for shape, dtype in SHAPES]
    for i, (tensor, (shape, dtype)) in enumerate(zip(tensors, SHAPES, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        tensor.view(-1)[:100].fill_(i)
        tensor.view(-1)[-100:].fill_(i)
    for i, tensor in enumerate(tensors):
        flat = tensor.view(-1).float() if tensor.numel() < 1000 else tensor.view(-1)[-100:].float()
        assert (flat == i).all()


def test_tensors_have_memory_of_their_own() -> None:
    fill(HugePageArena())


def test_a_large_tensor_begins_at_a_huge_page() -> None:
    assert HugePageArena().empty((65 << 20,), torch.uint8).data_ptr() % (2 << 20) == 0


def test_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    fill(HugePageArena())
