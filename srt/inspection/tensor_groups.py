"""Tensors of a checkpoint, counted together where they are alike but for the layer's number.

Works on headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_scales import find_scale
from srt.inspection.scheme_names import modules_with_weight, name_scheme


@dataclass(frozen=True)
class DtypeUse:
    """Tensors of one dtype: how many, their elements and bytes."""

    dtype: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class ModuleGroup:
    """Modules that are alike but for the layer's number.

    Attributes:
        name: module name with `*` for the numbers, such as `model.layers.*.mlp.up_proj`.
        count: how many there are.
        scheme: `fp8 per-tensor`, `fp8 per-channel`, `fp8 per-block`, `unquantized`, or the name of
            a scheme that does not run here, such as `NVFP4` or `int4 GPTQ`.
        dtype: safetensors dtype code of the weight.
        shape: the weight's.
        scale_shape: the weight scale's, None if there is none.
        scale_dtype: the weight scale's, None if there is none.
    """

    name: str
    count: int
    scheme: str
    dtype: str
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...] | None
    scale_dtype: str | None


@dataclass(frozen=True)
class IgnoredGroup:
    """Tensors that are in the checkpoint and not used, or not by default, and why."""

    name: str
    count: int
    nbytes: int
    reason: str


def count_dtypes(metas: Iterable[TensorMeta]) -> list[DtypeUse]:
    """Tensors by dtype, the dtype with most bytes first."""
    uses: dict[str, DtypeUse] = {}
    for meta in metas:
        use = uses.get(meta.dtype, DtypeUse(meta.dtype, 0, 0, 0))
        uses[meta.dtype] = DtypeUse(
            meta.dtype, use.tensors + 1, use.elements + meta.numel, use.nbytes + meta.nbytes
        )
    return sorted(uses.values(), key=lambda use: -use.nbytes)


def count_ignored(metas: Iterable[TensorMeta], reasons: Mapping[str, str]) -> list[IgnoredGroup]:
    """Those of `metas` whose names have a reason, layers counted together."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for meta in metas:
        if meta.name in reasons:
            key = (_pattern(meta.name), reasons[meta.name])
            counts[key] += 1
            sizes[key] += meta.nbytes
    return [IgnoredGroup(name, n, sizes[name, why], why) for (name, why), n in counts.items()]


def count_modules(
    metas: Iterable[TensorMeta],
    block_size: Callable[[str], tuple[int, int] | None],
    quantization: Mapping[str, Any] | None = None,
) -> list[ModuleGroup]:
    """Modules that have a weight, in the order of their names, layers counted together;
    `block_size` tells the size of blocks that the configuration gives a module, `quantization` is
    the configuration's block.
    """
    counts: Counter[ModuleGroup] = Counter()
    for module, weight, tensors in modules_with_weight(metas):
        scale = find_scale(tensors)
        group = ModuleGroup(
            name=_pattern(module),
            count=0,
            scheme=name_scheme(tensors, block_size(module), quantization),
            dtype=weight.dtype,
            shape=weight.shape,
            scale_shape=scale.shape if scale else None,
            scale_dtype=scale.dtype if scale else None,
        )
        counts[group] += 1
    return [replace(group, count=count) for group, count in counts.items()]


def _pattern(name: str) -> str:
    """`name` with `*` for its numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
