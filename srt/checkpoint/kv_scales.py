"""Scales for an FP8 KV cache that a checkpoint may carry, by layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_names import canonical_name

# In the attention, in its projections (ModelOpt), or as these projections' outputs' (early
# compressed-tensors): the last group tells keys from values; `kv_scale` is for both.
_NAME = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:.+\.)?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$"
)


@dataclass(frozen=True)
class KVScales:
    """Tensors of one element each that multiply the stored keys and values of a layer; None where
    the checkpoint has none.
    """

    k: TensorMeta | None = None
    v: TensorMeta | None = None

    @property
    def tensors(self) -> list[TensorMeta]:
        """Those that there are."""
        return [meta for meta in (self.k, self.v) if meta is not None]


def is_kv_scale(name: str) -> bool:
    """Whether the tensor of this canonical name is a scale for the KV cache."""
    return _NAME.match(name) is not None


def find_kv_scales(metas: Iterable[TensorMeta]) -> dict[int, KVScales]:
    """The scales of each layer that has any, by the layer's number. Reads headers only."""
    scales: dict[int, KVScales] = {}
    for meta in metas:
        match = _NAME.match(canonical_name(meta.name))
        if match is None:
            continue
        layer, part = int(match[1]), match[2] or match[3]
        changes = {key: meta for key in ("k", "v") if key in part}
        scales[layer] = replace(scales.get(layer, KVScales()), **changes)
    return scales
