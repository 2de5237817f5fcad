"""Which files of a directory hold weights.

Directory layout: `model.safetensors`, or `model.safetensors.index.json` and the shards that it
names, as written by Hugging Face `save_pretrained`; or the same under the names of Mistral's own
form.
"""

from __future__ import annotations

from pathlib import Path

from srt.checkpoint.files import MAX_INDEX_BYTES, describe, lies_there, read_json
from srt.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The same in Mistral's own form.
_MISTRAL_SINGLE_FILE = "consolidated.safetensors"
_MISTRAL_INDEX_FILE = "consolidated.safetensors.index.json"
_NAMES = ((SINGLE_FILE, INDEX_FILE), (_MISTRAL_SINGLE_FILE, _MISTRAL_INDEX_FILE))


def has_weights(directory: Path) -> bool:
    """Whether the directory holds safetensors weights, sound or not."""
    return any(lies_there(directory / name) for names in _NAMES for name in names)


def find_weight_files(directory: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Weight files of `directory`, and the index's map from tensor to file name (empty if none).

    A `model.safetensors` wins over an index, as it does in transformers, and both over the files of
    Mistral's own form.

    Raises:
        CheckpointError: The directory is missing or holds no safetensors weights, its index is
            damaged, or a shard that this lists is absent.
    """
    if not directory.is_dir():
        raise CheckpointError(
            "no such checkpoint directory",
            file=directory,
            expected="a directory",
            found=describe(directory),
        )
    for single_name, index_name in _NAMES:
        if lies_there(directory / single_name):
            return (directory / single_name,), {}
        if lies_there(directory / index_name):
            index = directory / index_name
            break
    else:
        weights = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
        others = sorted(f.name for f in directory.iterdir() if f.suffix in weights)
        raise CheckpointError(
            "no safetensors weights",
            file=directory,
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            found=", ".join(others) or "no weight file",
        )
    weight_map = read_index(index)
    files = tuple(directory / name for name in sorted(set(weight_map.values())))
    for file in files:
        if not lies_there(file):
            held = sum(name == file.name for name in weight_map.values())
            raise CheckpointError(
                f"shard listed in {index.name} is absent",
                file=file,
                expected=f"a file with {held} tensors",
                found="no such file",
            )
    return files, weight_map


def read_index(index: Path) -> dict[str, str]:
    """The map from tensor to file name of an index, `{"weight_map": {...}}`.

    Raises:
        CheckpointError: The file is missing or damaged, or a name leaves its directory.
    """
    content = read_json(index, MAX_INDEX_BYTES)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "the index lists no tensors",
            file=index,
            expected='"weight_map": {tensor: file}',
            found=f"keys {sorted(content)}",
        )
    for name, file_name in weight_map.items():
        # An index comes from outside: it may name files of its own directory only.
        if (
            not isinstance(file_name, str)
            or "/" in file_name
            or "\0" in file_name
            or file_name in ("", ".", "..")
        ):
            raise CheckpointError(
                "the index names a file outside its directory",
                file=index,
                tensor=name,
                expected="a plain file name",
                found=repr(file_name),
            )
    return weight_map
