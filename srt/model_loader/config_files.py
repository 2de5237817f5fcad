"""Reads the JSON files beside a checkpoint's weights. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.errors import CheckpointError, UnsupportedConfigError

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
MISTRAL_FILE = "params.json"


def read_json(file: Path) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Raises:
        CheckpointError: The file is missing, is not JSON, or holds something else than an object.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError("no such file", file=file) from None
    except (ValueError, OSError) as error:
        raise CheckpointError("cannot read JSON", file=file, found=error) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            "not a JSON object", file=file, expected="{...}", found=type(content).__name__
        )
    return content


def read_config(directory: str | Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory.

    A ModelOpt checkpoint's `hf_quant_config.json` is put where other formats have it, under
    `quantization_config`.

    Raises:
        CheckpointError: The directory or its `config.json` is missing, or a file is damaged.
        UnsupportedConfigError: The directory is in Mistral's own form.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(
            "no such checkpoint",
            file=directory,
            expected="a directory",
            found="a file" if directory.exists() else "nothing",
        )
    file = directory / CONFIG_FILE
    if not file.is_file() and (directory / MISTRAL_FILE).is_file():
        raise UnsupportedConfigError(
            f"{directory} is in Mistral's own form ({MISTRAL_FILE}), which is not supported; "
            f"expected {CONFIG_FILE}"
        )
    config = read_json(file)
    if (directory / MODELOPT_FILE).is_file() and not config.get("quantization_config"):
        quantization = read_json(directory / MODELOPT_FILE).get("quantization") or {}
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return config


def get_architecture(config: Mapping[str, Any], file: Path) -> str:
    """The one architecture that `config`, the content of `file`, names.

    Raises:
        CheckpointError: It names none, or several.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            "the configuration does not name one architecture",
            file=file,
            expected='"architectures": ["..."]',
            found="no such key" if names is None else names,
        )
    return names[0]
