"""Values of JSON files that come from outside, checked as they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.errors import CheckpointError


def get_object(block: Mapping[str, Any], key: str, file: str | Path) -> Mapping[str, Any]:
    """The object under `key` of `block`, a part of `file`; empty if there is none, or null.

    Raises:
        CheckpointError: There is something else.
    """
    value = block.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{key} is not an object", file=file, expected="{...}", found=value)
    return value


def get_number(block: Mapping[str, Any], key: str, file: Path) -> float:
    """The number under `key` of `block`, a part of `file`.

    Raises:
        CheckpointError: There is none.
    """
    value = block.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(
            f"{file.name} lacks {key}" if value is None else f"{file.name} has a bad {key}",
            file=file,
            expected="a number",
            found="nothing" if value is None else value,
        )
    return value
