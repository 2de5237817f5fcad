"""Reads the JSON files that lie beside a checkpoint's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from srt.errors import CheckpointError

CONFIG_FILE = "config.json"


def read_json(file: Path) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Raises:
        CheckpointError: The file is missing, is not JSON, or holds something else than an object.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError("file is missing", file=file) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"cannot read JSON: {error}", file=file) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            "not a JSON object", file=file, expected="an object", found=type(content).__name__
        )
    return content


def read_config(directory: str | Path) -> dict[str, Any]:
    """Content of `config.json` in a checkpoint directory.

    Raises:
        CheckpointError: The directory or the file is missing, or the file is damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(
            "no such model directory",
            file=directory,
            expected="a directory",
            found="a file" if directory.exists() else "nothing",
        )
    return read_json(directory / CONFIG_FILE)
