"""The memory that running a checkpoint takes, by its headers and its configuration."""

from collections.abc import Iterable, Mapping
from typing import Any

from srt.checkpoint.context_length import get_context_length
from srt.checkpoint.kv_layout import get_kv_layout
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_names import split_tensor_name
from srt.checkpoint.weight_scales import WEIGHT_SCALE_NAMES
from srt.inspection.findings import MemoryUse
from srt.inspection.scheme_names import FLOATS
from srt.utils.host_memory import read_host_memory

# Far above what any file or memory holds.
_LARGEST = 1 << 80


def count_parameters(used: Iterable[TensorMeta]) -> int:
    """Elements of all weights; scales are no parameters."""
    return sum(meta.numel for meta in used if not _is_scale(meta))


def memory_use(config: Mapping[str, Any], used: Iterable[TensorMeta] | None) -> MemoryUse:
    """What running takes, by the configuration of the text model and the tensors that it uses; None
    for these where there are no weights.
    """
    context = positive(get_context_length(config))
    try:
        per_token = positive(get_kv_layout(config).bytes_per_token(2))
    except (KeyError, TypeError, ZeroDivisionError):
        per_token = None
    return MemoryUse(
        weights=None if used is None else sum(_held_bytes(meta) for meta in used),
        kv_per_token=per_token,
        context_length=context,
        kv_context=per_token * context if per_token and context else None,
        available=read_host_memory().available,
    )


def positive(value: object) -> int | None:
    """`value` if it is a size, else None: a damaged configuration must not stop an inspection, nor
    numbers of thousands of digits what prints it.
    """
    return value if isinstance(value, int) and 0 < value < _LARGEST else None


def _is_scale(meta: TensorMeta) -> bool:
    return split_tensor_name(meta.name)[1] in WEIGHT_SCALE_NAMES


def _held_bytes(meta: TensorMeta) -> int:
    """Bytes that a tensor takes for running: scales become f32, other wide floats 16 bits."""
    if _is_scale(meta):
        return 4 * meta.numel
    return 2 * meta.numel if meta.dtype in FLOATS else meta.nbytes
