"""Parameters that know which checkpoint tensors fill them.

A merged layer (qkv, gate and up) is one parameter whose rows come from several tensors, its shards.
A parameter checks each tensor's header before any data is read (:meth:`ModelParameter.check`) and
the values while copying them (:meth:`ModelParameter.load`).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from srt.errors import CheckpointError
from srt.model_loader.checkpoint import TensorMeta

# A shard's name within a merged layer; None is the whole parameter.
ShardId = str | None

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ModelParameter(nn.Parameter):
    """A parameter `[N, ...]` of floating-point values, filled by one tensor or by one tensor a
    shard.

    Args:
        data: Storage; on the meta device until :meth:`materialize`.
        shard_sizes: Rows of each shard in order, for merged layers; they add up to N.
        source_dtypes: Dtypes that a checkpoint may hold; other than `data`'s are converted.
    """

    shards: dict[str, slice]
    source_dtypes: tuple[torch.dtype, ...]

    def __new__(
        cls,
        data: Tensor,
        shard_sizes: Mapping[str, int] | None = None,
        source_dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
    ) -> "ModelParameter":
        self = super().__new__(cls, data, requires_grad=False)
        self.source_dtypes = source_dtypes
        self.shards = {}
        start = 0
        for shard_id, size in (shard_sizes or {}).items():
            self.shards[shard_id] = slice(start, start + size)
            start += size
        return self

    def materialize(self) -> "ModelParameter":
        """The same parameter with memory of its own on the CPU, not yet initialised."""
        sizes = {shard_id: rows.stop - rows.start for shard_id, rows in self.shards.items()}
        return type(self)(torch.empty_like(self, device="cpu"), sizes, self.source_dtypes)

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
        if meta.torch_dtype not in self.source_dtypes:
            raise CheckpointError(
                "a tensor has the wrong dtype",
                file=meta.file,
                tensor=meta.name,
                expected=" or ".join(
                    str(dtype).removeprefix("torch.") for dtype in self.source_dtypes
                ),
                found=str(meta.torch_dtype).removeprefix("torch."),
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
    """Scales `[N]`, float32, by which each output row of a weight is multiplied.

    A source holds one element, of any rank, for all rows of its shard (per tensor), or one for each
    row, as `[N]` or `[N, 1]` (per channel). All dtypes of FLOAT_DTYPES convert to float32 exactly.
    """

    def check(self, meta: TensorMeta, shard_id: ShardId) -> None:
        self._check_dtype(meta)
        (rows,) = self.shard_shape(shard_id)
        if math.prod(meta.shape) != 1 and meta.shape not in ((rows,), (rows, 1)):
            raise CheckpointError(
                "a weight scale has the wrong shape",
                file=meta.file,
                tensor=meta.name,
                expected=f"one element, [{rows}] or [{rows}, 1]",
                found=list(meta.shape),
            )

    def load(self, source: Tensor, meta: TensorMeta, shard_id: ShardId) -> None:
        scales = source.to(torch.float32).reshape(-1)
        bad = ~(scales.isfinite() & (scales > 0))
        if bad.any():
            index = int(bad.nonzero()[0])
            raise CheckpointError(
                "a weight scale is not a positive finite number",
                file=meta.file,
                tensor=meta.name,
                expected="finite values above zero",
                found=f"{scales[index].item()} at index {index}",
            )
        self._rows(shard_id).copy_(scales.expand(self._rows(shard_id).shape))
