"""Reads the JSON files beside a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.checkpoint.files import describe, lies_there, read_json
from srt.checkpoint.json_values import get_object
from srt.checkpoint.mistral_form import to_hf_config
from srt.errors import CheckpointError

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
MISTRAL_FILE = "params.json"


def read_config(directory: str | Path) -> dict[str, Any]:
    """`config.json` of a checkpoint directory.

    A ModelOpt checkpoint's `hf_quant_config.json` is put where other formats have it, under
    `quantization_config`. Mistral's own `params.json` is translated if there is no `config.json`.

    Raises:
        CheckpointError: The directory or its `config.json` is missing, or a file is damaged.
        UnsupportedConfigError: Mistral's `params.json` asks for something that is not supported.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(
            "no such checkpoint",
            file=directory,
            expected="a directory",
            found=describe(directory),
        )
    file = directory / CONFIG_FILE
    if is_mistral_form(directory):
        return to_hf_config(read_json(directory / MISTRAL_FILE), directory / MISTRAL_FILE)
    config = read_json(file)
    if lies_there(directory / MODELOPT_FILE) and not find_quantization(config, file):
        modelopt = directory / MODELOPT_FILE
        quantization = get_object(read_json(modelopt), "quantization", modelopt)
        config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return config


def is_mistral_form(directory: Path) -> bool:
    """Whether the checkpoint is to be read in Mistral's own form: it has a params.json, and no
    config.json or weights in Mistral's form only.
    """
    if not lies_there(directory / MISTRAL_FILE):
        return False
    only_mistral_weights = any(directory.glob("consolidated*.safetensors")) and not any(
        directory.glob("model*.safetensors")
    )
    return only_mistral_weights or not lies_there(directory / CONFIG_FILE)


def find_quantization(config: Mapping[str, Any], file: str | Path) -> Mapping[str, Any] | None:
    """The quantization block of `config`, the content of `file`; None if there is none.

    It is called `quantization_config`, or `compression_config` in older compressed-tensors files,
    and a multimodal model may have it in its `text_config`.

    Raises:
        CheckpointError: It is not an object.
    """
    for holder in (config, get_object(config, "text_config", file)):
        for key in ("quantization_config", "compression_config"):
            block = holder.get(key)
            if block:
                if not isinstance(block, Mapping):
                    raise CheckpointError(
                        f"{key} is not an object", file=file, expected="{...}", found=block
                    )
                return block
    return None


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
