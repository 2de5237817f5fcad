"""Parameters that know which checkpoint tensors fill them.

A merged layer (qkv, gate and up) is one parameter whose rows come from several tensors, its shards.
A parameter checks each tensor's header before any data is read (:meth:`ModelParameter.check`) and
the values while copying them (:meth:`ModelParameter.load`).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from srt.checkpoint.dtypes import BYTE_DTYPE, FLOAT_DTYPES, SCALE_DTYPES, join_names
from srt.checkpoint.tensor_meta import TensorMeta
from srt.errors import CheckpointError
from srt.utils.arithmetic import ceil_div
from srt.utils.huge_pages import HugePageArena

# A shard's name within a merged layer; None is the whole parameter.
ShardId = str | None


class ModelParameter(nn.Parameter):
    """A parameter `[N, ...]` of floating-point values, filled by one tensor or by one tensor a
    shard.

    Args:
        data: Storage; on the meta device until :meth:`materialize`.
        shard_sizes: Rows of each shard in order, for merged layers; they add up to N.
        source_dtypes: Codes of the dtypes that a checkpoint may hold; other than `data`'s are
            converted.
    """

    shards: dict[str, slice]
    source_dtypes: tuple[str, ...]

    def __new__(
        cls,
        data: Tensor,
        shard_sizes: Mapping[str, int] | None = None,
        source_dtypes: tuple[str, ...] = FLOAT_DTYPES,
    ) -> "ModelParameter":
        self = super().__new__(cls, data, requires_grad=False)
        self.source_dtypes = source_dtypes
        self.shards = {}
        start = 0
        for shard_id, size in (shard_sizes or {}).items():
            self.shards[shard_id] = slice(start, start + size)
            start += size
        return self

    def materialize(self, arena: HugePageArena) -> "ModelParameter":
        """The same parameter with memory of its own from `arena`, not yet initialised."""
        sizes = {shard_id: rows.stop - rows.start for shard_id, rows in self.shards.items()}
        return type(self)(arena.empty(tuple(self.shape), self.dtype), sizes, self.source_dtypes)

    def shard_shape(self, shard_id: ShardId) -> tuple[int, ...]:
        """Shape of the tensor that fills the shard."""
        if shard_id is None:
            return tuple(self.shape)
        rows = self.shards[shard_id]
        return (rows.stop - rows.start, *self.shape[1:])

    def check(self, meta: TensorMeta, shard_id: ShardId) -> None:
        """Raises CheckpointError unless a tensor with this header can fill the shard."""
        self._check_dtype(meta)
        expected = self.shard_shape(shard_id)
        if meta.shape != expected:
            raise CheckpointError(
                "a tensor has the wrong shape",
                file=meta.file,
                tensor=meta.name,
                expected=list(expected),
                found=list(meta.shape),
            )

    def load(self, source: Tensor, meta: TensorMeta, shard_id: ShardId) -> None:
        """Copies `source`, which passed :meth:`check`, into the shard's rows.

        Raises:
            CheckpointError: The values are not usable.
        """
        self._rows(shard_id).copy_(source)

    def _rows(self, shard_id: ShardId) -> Tensor:
        return self.data if shard_id is None else self.data[self.shards[shard_id]]

    def _check_dtype(self, meta: TensorMeta) -> None:
        if meta.dtype not in self.source_dtypes:
            raise CheckpointError(
                "a tensor has the wrong dtype",
                file=meta.file,
                tensor=meta.name,
                expected=join_names(self.source_dtypes),
                found=meta.dtype_name,
            )


class Fp8WeightParameter(ModelParameter):
    """An FP8 weight `[N, K]`, float8_e4m3fn, without NaN."""

    def load(self, source: Tensor, meta: TensorMeta, shard_id: ShardId) -> None:
        # NaN is 0x7F or 0xFF: the largest byte when read as signed or as unsigned. Two reductions
        # need no temporary.
        if source.numel() and (
            source.view(torch.int8).amax() == 0x7F or source.view(torch.uint8).amax() == 0xFF
        ):
            row = next(
                i for i, values in enumerate(source) if values.to(torch.float32).isnan().any()
            )
            raise CheckpointError(
                "an FP8 weight holds NaN",
                file=meta.file,
                tensor=meta.name,
                expected="finite values",
                found=f"NaN in row {row}",
            )
        super().load(source, meta, shard_id)


class WeightScaleParameter(ModelParameter):
    """Scales of a weight `[N, K]`, float32: element (n, k) of the weight is multiplied by
    `scale[n // row_block, k // column_block]`.

    A shard's source says what it says whatever the shards beside it do, so `row_block` divides the
    rows of a source block and the places where shards begin; a source scale is repeated for all
    the rows it covers. Sources are

    - one element, of any rank: for all rows of its shard (per tensor);
    - `[rows]` or `[rows, 1]`: one for each row (per channel);
    - `[shards]` for a whole merged layer: one for each of its shards;
    - with `source_block` (block_n, block_k): `[ceil(rows / block_n), ceil(K / block_k)]`, or the
      same with sizes of 1 in between, `[n, 1, k, 1]`.

    All dtypes of scales convert to float32 exactly. Whether a configuration says that bytes are
    exponents of two is checked where its format is known.

    Args:
        weight_shape: (N, K).
        shard_sizes: Rows of each shard in order.
        source_block: Block that a source's grid is divided into; None if no source is a grid.
        row_block: Rows of the weight that one row of the parameter stands for.
        data: Storage; None allocates it.
    """

    weight_shape: tuple[int, int]
    source_block: tuple[int, int] | None
    row_block: int

    def __new__(
        cls,
        weight_shape: tuple[int, int],
        shard_sizes: Mapping[str, int] | None = None,
        source_block: tuple[int, int] | None = None,
        row_block: int = 1,
        data: Tensor | None = None,
    ) -> "WeightScaleParameter":
        if data is None:
            columns = ceil_div(weight_shape[1], source_block[1]) if source_block else 1
            data = torch.empty(ceil_div(weight_shape[0], row_block), columns, dtype=torch.float32)
        self = super().__new__(cls, data, shard_sizes, (*SCALE_DTYPES, BYTE_DTYPE))
        assert isinstance(self, WeightScaleParameter)
        self.weight_shape, self.source_block, self.row_block = weight_shape, source_block, row_block
        return self

    def materialize(self, arena: HugePageArena) -> "WeightScaleParameter":
        sizes = {shard_id: rows.stop - rows.start for shard_id, rows in self.shards.items()}
        data = arena.empty(tuple(self.shape), self.dtype)
        return WeightScaleParameter(
            self.weight_shape, sizes, self.source_block, self.row_block, data
        )

    def shard_shape(self, shard_id: ShardId) -> tuple[int, ...]:
        """Shape of a grid for the shard, or of its per-channel scale if there are no grids."""
        rows = self._weight_rows(shard_id)
        if self.source_block is None:
            return (rows.stop - rows.start,)
        block_n, block_k = self.source_block
        return (ceil_div(rows.stop - rows.start, block_n), ceil_div(self.weight_shape[1], block_k))

    def check(self, meta: TensorMeta, shard_id: ShardId) -> None:
        self._check_dtype(meta)
        rows = self._weight_rows(shard_id)
        n = rows.stop - rows.start
        allowed: list[tuple[int, ...]] = [(n,), (n, 1)]
        if self.source_block is not None:
            grid = self.shard_shape(shard_id)
            allowed += [grid, (grid[0], 1, grid[1], 1)]
        if shard_id is None and len(self.shards) > 1:
            allowed.append((len(self.shards),))
        if math.prod(meta.shape) != 1 and meta.shape not in allowed:
            expected = ", ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
            raise CheckpointError(
                "a weight scale has the wrong shape",
                file=meta.file,
                tensor=meta.name,
                expected=f"one element, {expected}",
                found=list(meta.shape),
            )

    def load(self, source: Tensor, meta: TensorMeta, shard_id: ShardId) -> None:
        if source.dtype == torch.uint8:
            source = source.view(torch.float8_e8m0fnu)
        scales = source.to(torch.float32)
        bad = ~(scales.isfinite() & (scales > 0))
        if bad.any():
            index = bad.nonzero()[0].tolist()
            raise CheckpointError(
                "a weight scale is not a positive finite number",
                file=meta.file,
                tensor=meta.name,
                expected="finite values above zero",
                found=f"{scales[tuple(index)].item()} at index {index}",
            )
        self.place(scales, shard_id)

    def place(self, scales: Tensor, shard_id: ShardId) -> None:
        """Writes float32 `scales` of any of the shapes above for a shard, unchecked."""
        rows = self._weight_rows(shard_id)
        # The first row of the shard's weight that each row of the parameter stands for.
        first = torch.arange(0, rows.stop - rows.start, self.row_block, device="cpu")
        target = self.data[rows.start // self.row_block :][: len(first)]
        target.copy_(self._grid(scales, rows)[first])

    def _grid(self, scales: Tensor, rows: slice) -> Tensor:
        """`scales` of a source as `[rows, 1 or columns]`, without memory for what repeats."""
        n = rows.stop - rows.start
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(n, 1)
        if scales.shape in ((n,), (n, 1)):
            return scales.reshape(n, 1)
        if scales.shape == (len(self.shards),):
            sizes = torch.tensor([r.stop - r.start for r in self.shards.values()])
            return scales.repeat_interleave(sizes).reshape(n, 1)
        assert self.source_block is not None
        grid = scales.reshape(scales.shape[0], -1)
        return grid.repeat_interleave(self.source_block[0], dim=0)

    def _weight_rows(self, shard_id: ShardId) -> slice:
        return slice(0, self.weight_shape[0]) if shard_id is None else self.shards[shard_id]
