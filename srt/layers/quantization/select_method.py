"""From what a checkpoint holds of a linear layer to the method that holds and multiplies it."""

from __future__ import annotations

from collections.abc import Sequence

from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.checkpoint.formats.weight_format import (
    Fp8Weight,
    OnlineFp8Weight,
    PlainWeight,
    WeightFormat,
)
from srt.checkpoint.weight_scales import Layout
from srt.layers.quantization.fp8_linear import Fp8LinearMethod
from srt.layers.quantization.linear_method import LinearMethodBase
from srt.layers.quantization.mixed_linear import MixedLinearMethod
from srt.layers.quantization.online_fp8_linear import OnlineFp8LinearMethod
from srt.layers.quantization.unquant import UnquantizedLinearMethod


def get_linear_method(
    quant: QuantizationConfig | None, prefix: str, shard_ids: Sequence[str] = ()
) -> LinearMethodBase:
    """The method for a linear layer.

    Args:
        quant: The checkpoint's format; None if it has none.
        prefix: The layer's full module name.
        shard_ids: Names of the modules that are merged into it, which a checkpoint has beside it.
    """
    if quant is None:
        return UnquantizedLinearMethod()
    parent = prefix.rpartition(".")[0]
    names = [f"{parent}.{shard}" if parent else shard for shard in shard_ids]
    formats = quant.weight_formats(prefix, names)
    runs = _split_runs(formats)
    methods = [_method_for(run) for run in runs]
    if len(runs) == 1:
        return methods[0]
    shards = iter(shard_ids)
    return MixedLinearMethod(
        [(method, [next(shards) for _ in run]) for method, run in zip(methods, runs, strict=True)]
    )


def _split_runs(formats: Sequence[WeightFormat]) -> list[list[WeightFormat]]:
    """The formats of shards in runs that one product can take as they are: unquantized, with scales
    a tensor or a channel, or with grids of one block size.
    """
    runs: list[list[WeightFormat]] = []
    kind: object = None  # of the last run
    for shard in formats:
        if isinstance(shard, Fp8Weight):
            new: object = shard.block or shard.layout
            is_alike = isinstance(kind, (Layout, tuple)) and (
                new == kind or Layout.TENSOR in (new, kind)
            )
            if is_alike and new is Layout.TENSOR:
                new = kind  # one element fits beside anything in FP8
        else:
            new = type(shard)
            is_alike = new is kind
        if is_alike:
            runs[-1].append(shard)
        else:
            runs.append([shard])
        kind = new
    return runs


def _method_for(run: Sequence[WeightFormat]) -> LinearMethodBase:
    """The method for shards that one product takes."""
    first = run[0]
    if isinstance(first, PlainWeight):
        return UnquantizedLinearMethod()
    if isinstance(first, OnlineFp8Weight):
        return OnlineFp8LinearMethod(first.scheme, first.dtype)
    blocks = (shard.block for shard in run if isinstance(shard, Fp8Weight))
    return Fp8LinearMethod(next((block for block in blocks if block), None))
