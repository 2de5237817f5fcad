"""How long a sequence a model is made for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Far above real ones.
LONGEST_CONTEXT = 1 << 31
_LENGTH = "max_position_embeddings"
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def get_context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence; None where the configuration does not tell.

    It is `max_position_embeddings`, unless the rotation is stretched beyond it: configurations
    disagree on whether that key is the length before or after. By YaRN a model is made for
    `factor` times `original_max_position_embeddings` positions, and by linear scaling for `factor`
    times the original length, which is `max_position_embeddings` where nothing else is given. So
    do vLLM and SGLang with linear scaling, and vLLM with YaRN. The longer of both counts.
    `llama3` and `dynamic` leave `max_position_embeddings` as it is: the former is the length after,
    the latter would change frequencies with the length of the sequence. Whether the result is to be
    believed (LONGEST_CONTEXT) is left to the caller.

    Args:
        config: A text model's configuration: content of config.json (or of its `text_config`), or
            a transformers configuration as a dictionary.
    """
    length = _positive(config.get(_LENGTH))
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if length is None or not isinstance(rope, Mapping):
        return length
    kind = rope.get("rope_type") or rope.get("type")
    factor = _factor(rope.get("factor"))
    if kind not in ("yarn", "linear") or factor is None:
        return length
    original = _positive(rope.get(_ORIGINAL_LENGTH)) or _positive(config.get(_ORIGINAL_LENGTH))
    if original is None:
        original = length
    try:
        return max(length, int(original * factor))
    except OverflowError:  # more than the largest float
        return max(length, original, LONGEST_CONTEXT + 1)


def _positive(value: object) -> int | None:
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_size and isinstance(value, int) else None


def _factor(value: object) -> float | None:
    """`value` if it is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if 0 < value < math.inf else None
