"""The products and the packing of weights: sample calls, contracts, random calls."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from torch import Tensor

import sgl_kernel
from sgl_kernel.testing import check_close, random_weight, reference_mm
from srt.test.kernels.properties import (
    ACTS,
    BF16,
    E4M3,
    F16,
    F32,
    FLOATS,
    Arguments,
    is_dense,
    is_vector,
    ones,
    overlaps_itself,
    rows_are_dense,
)
from srt.test.kernels.record import (
    SEEDS,
    OpRecord,
    Records,
    check_margins,
    margins,
    rows_in_nan,
    sizes,
)

PER_TENSOR, PER_CHANNEL, BLOCK, LINEAR, BMM = (
    "fp8_per_tensor_scaled_mm_cpu",
    "fp8_per_channel_scaled_mm_cpu",
    "fp8_scaled_mm_cpu",
    "weight_packed_linear",
    "bmm_cpu",
)
B, M, N, K = 2, 3, 5, 4


def _samples(op: str) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    for m, packed in itertools.product((1, 5), (False, True)):
        x, w, b = torch.randn(m, 32).to(BF16), random_weight(E4M3, 48, 32), torch.randn(48)
        if op == PER_TENSOR:
            calls += [(x, w, torch.tensor(0.5), b, BF16, packed)]
            calls += [(x, w, torch.ones(1, 1), None, F32, packed)]
        elif op == PER_CHANNEL:
            calls += [(x, w, torch.rand(48), None, BF16, packed)]
            calls += [(x.half(), w, torch.rand(48, 1), b, F32, packed)]
        elif op == BLOCK:
            calls += [(x, w, torch.rand(2, 2), [32, 16], b, BF16, packed)]
            calls += [(x.half(), w, torch.rand(1, 1), [128, 128], None, F32, packed)]
        elif op == LINEAR:
            calls += [(x, w.to(BF16), b, packed)]
            calls += [(x, w.to(BF16), None, packed, F32)]
            calls += [(x.half(), w.half(), None, packed), (x.view(m, 1, 32), w.half(), b, packed)]
        else:
            out = torch.empty(2, m, 48, dtype=BF16)
            x3, w3 = torch.randn(2, m, 32).to(BF16), random_weight(E4M3, 2, 48, 32)
            calls += [(out, x3, w3, packed, torch.rand(2))]
            calls += [(out.float(), x3, w3.to(BF16), packed, None)]
            calls += [(out, x3, w3.half(), packed, None)]
    return calls


def _packing_samples() -> list[tuple[Any, ...]]:
    w = random_weight(E4M3, 48, 32)
    return [(w,), (w.to(BF16),), (w.half(),), (random_weight(E4M3, 2, 48, 32),)]


def _packing_is_allowed(arguments: Arguments) -> bool:
    weight = arguments["weight"]
    return is_dense(weight, (E4M3, *ACTS), 2, 3) and min(weight.shape[-2:]) >= 1


def _arguments(op: str, act_dtype: torch.dtype, out_dtype: torch.dtype) -> Arguments:
    if op == BMM:
        return {
            "out": ones(B, M, N, dtype=out_dtype),
            "mat1": ones(B, M, K, dtype=act_dtype),
            "mat2": ones(B, N, K, dtype=E4M3),
            "is_vnni": True,
            "scale": ones(B),
        }
    arguments: Arguments = {
        "mat1": ones(M, K, dtype=act_dtype),
        "mat2": ones(N, K, dtype=act_dtype if op == LINEAR else E4M3),
        "bias": ones(N),
        "out_dtype": out_dtype,
        "is_vnni": True,
    }
    if op == PER_TENSOR:
        arguments["scales2"] = ones()
    elif op == PER_CHANNEL:
        arguments["scales2"] = ones(N)
    elif op == BLOCK:
        arguments["scales2"] = ones(3, 2)
        arguments["block_size"] = [2, 3]
    return arguments


def _scale_is_allowed(op: str, scale: Tensor | None, arguments: Arguments) -> bool:
    n, k = arguments["mat2"].shape[-2:]
    if not is_dense(scale, (F32,)):
        return False
    assert scale is not None
    if op == PER_TENSOR:
        return scale.numel() == 1
    if op == BMM:
        one_each = scale.numel() == 1 or scale.shape == arguments["mat2"].shape[:1]
        return one_each and scale.is_contiguous()
    if op == PER_CHANNEL:
        return scale.shape in ((n,), (n, 1)) and scale.is_contiguous()
    size = arguments["block_size"]
    if len(size) != 2 or min(size) < 1:
        return False
    return scale.shape == (-(-n // size[0]), -(-k // size[1])) and scale.is_contiguous()


def _is_allowed(op: str, arguments: Arguments) -> bool:
    mat1, mat2, bias = arguments["mat1"], arguments["mat2"], arguments.get("bias")
    is_bmm = op == BMM
    rank = 3 if is_bmm else 2
    weights = {BMM: (E4M3, *ACTS), LINEAR: ACTS}.get(op, (E4M3,))
    if not (
        is_dense(mat1, ACTS)
        and (mat1.dim() == 3 if is_bmm else mat1.dim() >= 2)
        and is_dense(mat2, weights, rank)
        and min(mat2.shape[-2:]) >= 1
        and mat1.shape[-1] == mat2.shape[-1]
        and (not is_bmm or mat1.shape[0] == mat2.shape[0])
        and rows_are_dense(mat1)
        and mat2.is_contiguous()
    ):
        return False
    n = mat2.shape[-2]
    if is_bmm:
        out = arguments["out"]
        is_fp8 = mat2.dtype == E4M3
        if not is_fp8 and arguments["scale"] is not None:
            return False
        return (
            is_dense(out, (mat1.dtype, F32), 3)
            and out.shape == (*mat1.shape[:2], n)
            and rows_are_dense(out)
            and not overlaps_itself(out)
            and (not is_fp8 or _scale_is_allowed(op, arguments["scale"], arguments))
        )
    if bias is not None and not is_vector(bias, FLOATS, n):
        return False
    out_dtypes = (mat1.dtype, F32)
    if op == LINEAR:
        return arguments["out_dtype"] in (*out_dtypes, None)
    return arguments["out_dtype"] in out_dtypes and _scale_is_allowed(
        op, arguments["scales2"], arguments
    )


@dataclass(frozen=True)
class ProductCall:
    """A product with any of the weights, scales and biases that its op takes."""

    op: str
    rows: tuple[int, ...]  # leading sizes of mat1, [B, M] for bmm_cpu
    n: int
    k: int
    act_dtype: torch.dtype
    weight_dtype: torch.dtype
    out_dtype: torch.dtype | None
    packed: bool
    bias_dtype: torch.dtype | None
    block: tuple[int, int]  # bn, bk; the whole weight or a row of it unless the op takes blocks
    scale_form: int  # which of the accepted shapes the scale has
    scale_exponent: int
    margin: tuple[int, int]  # of each row of mat1, and of bmm_cpu's out
    transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        torch.manual_seed(self.seed)
        is_bmm = self.op == BMM
        _, mat1 = rows_in_nan((*self.rows, self.k), self.act_dtype, self.margin, self.transposed)
        mat1.copy_(torch.randn(mat1.shape))
        batch = self.rows[:1] if is_bmm else ()
        weight = random_weight(self.weight_dtype, *batch, self.n, self.k)
        bias = None
        if self.bias_dtype is not None:
            bias = (torch.randn(self.n) * 4).to(self.bias_dtype)
        scales, scale_of_weight = self._scales()
        expected, bound = reference_mm(mat1, weight.double() * scale_of_weight, None, bias)

        stored = sgl_kernel.convert_weight_packed(weight) if self.packed else weight
        op: Callable[..., Any] = getattr(sgl_kernel, self.op)
        out_dtype = self.out_dtype or self.act_dtype
        if is_bmm:
            size = (*self.rows, self.n)
            buffer, got = rows_in_nan(size, out_dtype, self.margin, self.transposed)
            op(got, mat1, stored, self.packed, scales)
            check_margins(buffer, got)
        else:
            rest = {
                BLOCK: (scales, list(self.block), bias, out_dtype, self.packed),
                LINEAR: (bias, self.packed, self.out_dtype),
            }.get(self.op, (scales, bias, out_dtype, self.packed))
            got = op(mat1, stored, *rest)
        assert got.dtype == out_dtype
        check_close(got, expected, bound, tier)

    def _scales(self) -> tuple[Tensor | None, Tensor]:
        """A scale in a shape that the op takes, and each weight's scale."""
        if self.weight_dtype != E4M3:
            return None, torch.ones(())
        block_n, block_k = self.block
        batches = self.rows[0] if self.op == BMM and self.scale_form == 0 else 1
        scales = torch.rand(batches, -(-self.n // block_n), -(-self.k // block_k)) + 0.5
        scales *= 2.0**self.scale_exponent
        if self.op == BLOCK:
            accepted: tuple[int, ...] = scales.shape[1:]
        elif self.op == PER_CHANNEL:
            accepted = ((self.n,), (self.n, 1), (self.n, 1))[self.scale_form]
        else:
            accepted = ((batches,), (), (1, 1))[self.scale_form]
        rows, columns = torch.arange(self.n) // block_n, torch.arange(self.k) // block_k
        of_weight = scales[:, rows][..., columns]
        return scales.view(accepted), of_weight if self.op == BMM else of_weight[0]


@st.composite
def products(draw: st.DrawFn, op: str) -> ProductCall:
    """Calls of the op."""
    act_dtype = draw(st.sampled_from((BF16, F16)))
    n, k = draw(sizes(1, 200)), draw(sizes(1, 300))
    block = (1, k) if op == PER_CHANNEL else (n, k)
    if op == BLOCK:
        # It may be larger than the weight, and as large as an int64 holds.
        edges = sizes(1, 260) | st.just(2**63 - 1)
        block = draw(edges), draw(edges)
    weight_dtypes = {LINEAR: (BF16, F16), BMM: (E4M3, BF16, F16)}.get(op, (E4M3,))
    out_dtypes = (act_dtype, F32, None) if op == LINEAR else (act_dtype, F32)
    leading = draw(st.lists(st.integers(1, 3), min_size=op == BMM, max_size=1 if op == BMM else 3))
    return ProductCall(
        op=op,
        rows=(*leading, draw(sizes(0, 70 if len(leading) < 2 else 9))),
        n=n,
        k=k,
        act_dtype=act_dtype,
        weight_dtype=draw(st.sampled_from(weight_dtypes)),
        out_dtype=draw(st.sampled_from(out_dtypes)),
        packed=draw(st.booleans()),
        bias_dtype=None if op == BMM else draw(st.sampled_from((None, *FLOATS))),
        block=block,
        scale_form=draw(st.integers(0, 2)),
        scale_exponent=draw(st.integers(-12, 0)),
        margin=draw(margins()),
        transposed=draw(st.booleans()),
        seed=draw(SEEDS),
    )


@dataclass(frozen=True)
class PackCall:
    """A weight that is packed and read back."""

    batch: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    seed: int

    def check(self, tier: str) -> None:
        """Rows read back are the weight's, bit for bit; packing is the same on every tier."""
        torch.manual_seed(self.seed)
        weight = random_weight(self.dtype, *self.batch, self.n, self.k)
        if self.transposed:
            weight = weight.mT.contiguous().mT
        packed = sgl_kernel.convert_weight_packed(weight)
        assert packed.shape == weight.shape and packed.dtype == self.dtype
        assert packed.is_contiguous()
        bits = torch.uint8 if self.dtype == E4M3 else torch.int16
        rows = torch.arange(self.n)
        for one, of in zip(
            packed.view(-1, self.n, self.k), weight.reshape(-1, self.n, self.k), strict=True
        ):
            assert torch.equal(sgl_kernel.unpack_rows(one, rows).view(bits), of.view(bits)), tier


def packings() -> st.SearchStrategy[PackCall]:
    """Calls of convert_weight_packed."""
    batch = st.lists(st.integers(0, 3), max_size=1).map(tuple)
    dtypes = st.sampled_from((E4M3, BF16, F16))
    return st.builds(PackCall, batch, sizes(1, 200), sizes(1, 200), dtypes, st.booleans(), SEEDS)


def _product(op: str) -> OpRecord:
    return OpRecord(
        samples=functools.partial(_samples, op),
        arguments=functools.partial(_arguments, op),
        is_allowed=functools.partial(_is_allowed, op),
        calls=products(op),
        dtypes=ACTS,
    )


RECORDS: Records = {
    **{op: _product(op) for op in (PER_TENSOR, PER_CHANNEL, BLOCK, LINEAR, BMM)},
    "convert_weight_packed": OpRecord(
        samples=_packing_samples,
        arguments=lambda _, __: {"weight": ones(N, K, dtype=E4M3)},
        is_allowed=_packing_is_allowed,
        calls=packings(),
        dtypes=ACTS,
    ),
}
