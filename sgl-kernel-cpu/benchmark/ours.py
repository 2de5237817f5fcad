"""The ops of sgl_kernel, as methods."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from memory import huge_copies
from method import Activations, Method
from shapes import Shape
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, dequantise_blocks, random_weight, reference_mm

_BLOCK = [128, 128]
_CHECKED_ROWS = 3
_CHECKED_COLUMNS = 48


@dataclass
class Weights:
    """One weight of a shape, unpacked, and how many bytes its copies may take."""

    shape: Shape
    source: Tensor
    rotated_bytes: int

    def copies(self, weight: Tensor) -> list[Tensor]:
        """So many copies that a copy has left the caches when its turn comes again."""
        return huge_copies(weight, max(1, min(256, -(-self.rotated_bytes // weight.nbytes))))

    def packed_copies(self, weight: Tensor) -> list[Tensor]:
        """The same, packed."""
        return self.copies(sgl_kernel.convert_weight_packed(weight))


def make_weights(shape: Shape, rotated_bytes: int) -> Weights:
    """A random e4m3 weight; ``rotated_bytes`` = 0 keeps one copy, which may stay in cache."""
    size = (shape.batch, shape.n, shape.k) if shape.batch else (shape.n, shape.k)
    return Weights(shape, random_weight(torch.float8_e4m3fn, *size), rotated_bytes)


def sampled(m: int, n: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of a result that are compared with the reference: ends, and some between."""
    rows = torch.cat([torch.tensor([0, m - 1]), torch.randint(0, m, (_CHECKED_ROWS,))]).unique()
    ends = torch.arange(min(n, 8))
    columns = torch.cat([ends, n - 1 - ends, torch.randint(0, n, (_CHECKED_COLUMNS,))]).unique()
    return rows, columns


def _exact(
    weight: Tensor, scale: Tensor | None, bias: Tensor | None, name: str
) -> Callable[[Activations, Tensor], None]:
    """A check against float64 within the bound of float32 arithmetic.

    Args:
        weight: [n, k] or [batch, n, k]; float64 where block scales are multiplied into it.
        scale: of one element, [n], [batch], or None.
    """

    def check(x: Activations, result: Tensor) -> None:
        n = weight.shape[-2]
        rows, columns = sampled(x.m, n)
        factor = scale
        if scale is not None and scale.numel() > 1:
            factor = scale[columns] if weight.dim() == 2 else scale.view(-1, 1, 1)
        expected, bound = reference_mm(
            x.bf16[..., rows, :],
            weight[..., columns, :],
            factor,
            None if bias is None else bias[columns],
            segments=-(-weight.shape[-1] // _BLOCK[1]),
        )
        check_close(result[..., rows, :][..., columns], expected, bound, f"{name}, M={x.m}")

    return check


class RecordedProducts:
    """Per-tensor products in recorded passes, as the runtime decodes. Between them are neither
    Python nor Torch's dispatch, whose code each large weight pushes out of the caches: fetching it
    again takes some 0.1 ms a call.

    Args:
        packed: the copies of the weight; a pass takes ``products`` of them.
    """

    MOST_PRODUCTS = 8
    MOST_ROWS = 16  # a pass of more takes longer than a turn should

    def __init__(self, packed: list[Tensor], scale: Tensor) -> None:
        self.products = min(self.MOST_PRODUCTS, len(packed))
        self._packed, self._scale = packed, scale
        self._x: Tensor | None = None
        self._passes: list[tuple[sgl_kernel.StepGraph, list[Tensor]]] = []

    def __call__(self, x: Activations, i: int) -> list[Tensor]:
        """Replay the i-th pass on ``x``; returns its products, each [m, n]."""
        if self._x is not x.bf16:
            starts = range(0, len(self._packed) - self.products + 1, self.products)
            self._passes = [self._record(x.bf16, start) for start in starts]
            self._x = x.bf16
        graph, results = self._passes[i % len(self._passes)]
        graph.replay()
        return results

    def _record(self, x: Tensor, start: int) -> tuple[sgl_kernel.StepGraph, list[Tensor]]:
        def multiply() -> list[Tensor]:
            return [
                sgl_kernel.fp8_per_tensor_scaled_mm_cpu(x, weight, self._scale, None, x.dtype, True)
                for weight in self._packed[start : start + self.products]
            ]

        return sgl_kernel.record(multiply)


def linear_methods(weights: Weights) -> list[Method]:
    """Per tensor (also recorded, with float16 activations, with a bias), per channel, block,
    bf16.
    """
    n, k = weights.shape.n, weights.shape.k
    scale = torch.tensor(0.01)
    channels = torch.rand(n) * 0.01 + 0.005
    blocks = torch.rand(-(-n // _BLOCK[0]), -(-k // _BLOCK[1])) * 0.01 + 0.005
    bias = torch.randn(n)
    packed = weights.packed_copies(weights.source)
    dense = weights.source.to(torch.bfloat16)
    packed_bf16 = weights.packed_copies(dense)
    bf16, fp16 = torch.bfloat16, torch.float16

    def per_tensor(x: Tensor, i: int, bias: Tensor | None = None) -> Tensor:
        return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
            x, packed[i % len(packed)], scale, bias, x.dtype, True
        )

    def per_channel(x: Activations, i: int) -> Tensor:
        return sgl_kernel.fp8_per_channel_scaled_mm_cpu(
            x.bf16, packed[i % len(packed)], channels, None, bf16, True
        )

    def per_block(x: Activations, i: int) -> Tensor:
        return sgl_kernel.fp8_scaled_mm_cpu(
            x.bf16, packed[i % len(packed)], blocks, _BLOCK, None, bf16, True
        )

    def plain(x: Activations, i: int) -> Tensor:
        return sgl_kernel.weight_packed_linear(
            x.bf16, packed_bf16[i % len(packed_bf16)], None, True
        )

    recorded = RecordedProducts(packed, scale)
    size = packed[0].nbytes
    dequantised = dequantise_blocks(weights.source, blocks, _BLOCK)
    w = weights.source

    def method(
        name: str,
        nbytes: int,
        dtype: torch.dtype,
        run: Callable[[Activations, int], object],
        reference: tuple[Tensor, Tensor | None, Tensor | None],
    ) -> Method:
        return Method(name, True, nbytes, dtype, run, _exact(*reference, name))

    return [
        method(
            "fp8 per-tensor", size + 4, bf16, lambda x, i: per_tensor(x.bf16, i), (w, scale, None)
        ),
        Method(
            "fp8 recorded",
            True,
            size + 4,
            bf16,
            recorded,
            _exact(w, scale, None, "fp8 recorded"),
            recorded.products,
            recorded.MOST_ROWS,
        ),
        method(
            "fp8 per-tensor, bias",
            size + 4 + bias.nbytes,
            bf16,
            lambda x, i: per_tensor(x.bf16, i, bias),
            (w, scale, bias),
        ),
        method(
            "fp8 per-tensor, fp16",
            size + 4,
            fp16,
            lambda x, i: per_tensor(x.fp16, i),
            (w, scale, None),
        ),
        method("fp8 per-channel", size + channels.nbytes, bf16, per_channel, (w, channels, None)),
        method(
            "fp8 block 128x128", size + blocks.nbytes, bf16, per_block, (dequantised, None, None)
        ),
        method("bf16 packed", packed_bf16[0].nbytes, bf16, plain, (dense, None, None)),
    ]


def bmm_methods(weights: Weights) -> list[Method]:
    """``bmm_cpu`` with an e4m3 and with a bf16 weight."""
    shape = weights.shape
    scale = torch.rand(shape.batch) * 0.01 + 0.005
    packed = weights.packed_copies(weights.source)
    dense = weights.source.to(torch.bfloat16)
    packed_bf16 = weights.packed_copies(dense)

    def multiply(x: Activations, mat2: Tensor, scale: Tensor | None) -> Tensor:
        out = torch.empty(shape.batch, x.m, shape.n, dtype=torch.bfloat16)
        sgl_kernel.bmm_cpu(out, x.bf16, mat2, True, scale)
        return out

    return [
        Method(
            "fp8 bmm",
            True,
            packed[0].nbytes + scale.nbytes,
            torch.bfloat16,
            lambda x, i: multiply(x, packed[i % len(packed)], scale),
            _exact(weights.source, scale, None, "fp8 bmm"),
        ),
        Method(
            "bf16 bmm",
            True,
            packed_bf16[0].nbytes,
            torch.bfloat16,
            lambda x, i: multiply(x, packed_bf16[i % len(packed_bf16)], None),
            _exact(dense, None, None, "bf16 bmm"),
        ),
    ]
