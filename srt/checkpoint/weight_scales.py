"""What the tensors of a module tell of its weight: FP8 or not, and which elements share a scale.

Works on headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_names import split_tensor_name
from srt.utils.arithmetic import ceil_div

# The last is DeepSeek-V4's.
WEIGHT_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "qscale_weight", "scale")
# Of asymmetric weights.
ZERO_POINT_NAME = "weight_zero_point"
# For 8-bit activations and KV caches.
UNUSED_SCALE_NAMES = (
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "output_scale",
    "qscale_act",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "prob_scale",
    "prob_output_scale",
    "input_zero_point",
    "output_zero_point",
)


class Layout(Enum):
    """What a checkpoint's tensors say of a module's weight."""

    PLAIN = "unquantized"
    TENSOR = "per-tensor"
    CHANNEL = "per-channel"
    BLOCK = "per-block"


def scale_layout(
    weight: TensorMeta, scale: TensorMeta, block: tuple[int, int] | None
) -> Layout | None:
    """What the shape of `scale` says; None if it fits neither `weight` nor `block`.

    One element is per tensor, whatever its rank, `[N]` and `[N, 1]` are per channel, a grid of
    `[ceil(N / block_n), ceil(K / block_k)]`, also with sizes of 1 in between, is per block.
    """
    if scale.numel == 1:
        return Layout.TENSOR
    if len(weight.shape) != 2:
        return None
    n, k = weight.shape
    if scale.shape in ((n,), (n, 1)):
        return Layout.CHANNEL
    if block is not None:
        rows, columns = ceil_div(n, block[0]), ceil_div(k, block[1])
        if scale.shape in ((rows, columns), (rows, 1, columns, 1)):
            return Layout.BLOCK
    return None


def group_modules(metas: Iterable[TensorMeta]) -> dict[str, dict[str, TensorMeta]]:
    """Tensors by module, as the checkpoint spells it, and by the name of their parameter."""
    modules: dict[str, dict[str, TensorMeta]] = {}
    for meta in metas:
        module, parameter = split_tensor_name(meta.name)
        modules.setdefault(module, {})[parameter] = meta
    return modules


def find_scale(tensors: Mapping[str, TensorMeta]) -> TensorMeta | None:
    """The weight's scale among the tensors of a module, by any of its names."""
    return next((tensors[name] for name in WEIGHT_SCALE_NAMES if name in tensors), None)


def is_scale_per_shard(scale: TensorMeta) -> bool:
    """Whether a scale may hold one element for each shard of a merged layer: two for gate and up,
    three for q, k and v.
    """
    return scale.shape in ((2,), (3,))
