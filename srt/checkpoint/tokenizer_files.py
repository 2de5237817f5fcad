"""A checkpoint's tokenizer files, checked and without what would run, or read, anything else.

transformers is shown a directory of its own that holds the files it may read: the large ones as
links to what has been checked, the configurations written anew without the keys that name code of
the checkpoint, other files, or arguments of classes that are no tokenizers. Chat templates are read
here and never by transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.files import (
    MAX_TOKENIZER_BYTES,
    check_regular,
    lies_there,
    read_json,
    read_text,
)
from srt.errors import CheckpointError

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEKKEN_FILE = "tekken.json"
# One of these makes a tokenizer; tekken.json is one of Mistral's own form.
_MAIN_FILES = (TOKENIZER_FILE, "tokenizer.model", TOKENIZER_CONFIG_FILE, "vocab.json")
_LARGE_FILES = (
    TOKENIZER_FILE,
    TEKKEN_FILE,
    "tokenizer.model",
    "tokenizer.model.v1",
    "tokenizer.model.v2",
    "tokenizer.model.v3",
    "tokenizer.model.v7",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_SMALL_FILES = ("special_tokens_map.json", "added_tokens.json")
# What decides in config.json which tokenizer transformers makes.
_CONFIG_KEYS = ("model_type", "tokenizer_class", "transformers_version")
# Of tokenizer_config.json: code, files, and arguments that only a caller has a use for.
_REMOVED_KEYS = (
    "auto_map",
    "backend",
    "chat_template",
    "fast_tokenizer_files",
    "from_slow",
    "init_inputs",
    "is_local",
    "local_files_only",
    "merges",
    "name_or_path",
    "tokenizer_object",
    "trust_remote_code",
    "vocab",
)

_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"
_TEMPLATE_DIRECTORY = "additional_chat_templates"
_DEFAULT = "default"


def has_tokenizer(directory: Path) -> bool:
    """Whether the checkpoint has a tokenizer, sound or not."""
    return any(lies_there(directory / name) for name in _MAIN_FILES)


def requested_code(content: Mapping[str, Any], file: Path) -> str | None:
    """What `auto_map` in the content of `file` asks to run, as one line; None if nothing."""
    auto_map = content.get("auto_map")
    if not auto_map:
        return None
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    classes = dict.fromkeys(str(name)[:100] for name in _names(list(values)))
    return f"{file.name}: auto_map asks to run code of the checkpoint ({', '.join(classes)})"


def _names(value: Any) -> Iterator[Any]:
    for inner in value:
        if isinstance(inner, list):
            yield from _names(inner)
        elif inner is not None:
            yield inner


def stage_tokenizer(directory: Path, target: Path) -> dict[str, Any]:
    """Fills `target`, an empty directory, with what transformers may see of the tokenizer in
    `directory`; returns the content of its tokenizer_config.json, cleaned.

    Raises:
        CheckpointError: A file is damaged, too large, or no regular file.
    """
    for name in _LARGE_FILES:
        if lies_there(directory / name):
            check_regular(directory / name, MAX_TOKENIZER_BYTES)
            (target / name).symlink_to((directory / name).resolve())
    for name in _SMALL_FILES:
        if lies_there(directory / name):
            _write(target / name, read_json(directory / name))
    config_file = directory / CONFIG_FILE
    config = read_json(config_file) if lies_there(config_file) else {}
    kept = {key: config[key] for key in _CONFIG_KEYS if isinstance(config.get(key), str)}
    _write(target / CONFIG_FILE, kept)
    file = directory / TOKENIZER_CONFIG_FILE
    settings = _read_settings(file) if lies_there(file) else {}
    _write(target / TOKENIZER_CONFIG_FILE, settings)
    return settings


def _read_settings(file: Path) -> dict[str, Any]:
    settings = read_json(file)
    name = settings.get("tokenizer_class")
    if name is not None and not isinstance(name, str):
        raise CheckpointError(
            "tokenizer_class is not a name", file=file, expected="a string", found=name
        )
    return {
        key: value
        for key, value in settings.items()
        if key not in _REMOVED_KEYS and not key.startswith("_") and not key.endswith("_file")
    }


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content))


def read_chat_template(directory: Path) -> str | dict[str, str] | None:
    """The chat template of a checkpoint; several by their names where none of them is the default;
    None if there is none.

    In the order of precedence: chat_template.jinja and additional_chat_templates/, chat_template
    of tokenizer_config.json, chat_template.json.

    Raises:
        CheckpointError: A file is damaged, too large, or no regular file, or holds something else
            than text where a template should be.
    """
    templates = _read_template_files(directory)
    for name in (TOKENIZER_CONFIG_FILE, _TEMPLATE_JSON):
        file = directory / name
        if not templates and lies_there(file):
            templates = _templates_of(read_json(file).get("chat_template"), file)
    if not templates:
        return None
    if _DEFAULT in templates:
        return templates[_DEFAULT]
    return templates if len(templates) > 1 else next(iter(templates.values()))


def _read_template_files(directory: Path) -> dict[str, str]:
    templates = {}
    if lies_there(directory / _TEMPLATE_FILE):
        templates[_DEFAULT] = read_text(directory / _TEMPLATE_FILE)
    for file in sorted((directory / _TEMPLATE_DIRECTORY).glob("*.jinja")):
        templates.setdefault(file.stem, read_text(file))
    return templates


def _templates_of(value: object, file: Path) -> dict[str, str]:
    """Of the value of chat_template: a text, or a list of {"name", "template"}."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    entries = value if isinstance(value, list) else [value]
    templates = {}
    for entry in entries:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("name", "template")
        ):
            raise CheckpointError(
                "chat_template is not a template",
                file=file,
                expected='text, or a list of {"name": ..., "template": ...}',
                found=value,
            )
        templates[entry["name"]] = entry["template"]
    return templates
