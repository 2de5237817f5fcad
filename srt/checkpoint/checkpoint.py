"""A safetensors checkpoint directory: one mapped view over its one or many files.

Opening reads headers only. Tensor bytes are mapped, never copied, so what a caller reads becomes
resident page by page; `Checkpoint.release` unmaps everything that no tensor refers to any more. A
loader that takes a layer's tensors, packs them, drops them and calls `release` therefore needs no
more memory than its own result plus one layer.

Torch is imported by `Checkpoint.get` alone: metadata is there within milliseconds.

File format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON
header, data). Directory layout: `model.safetensors`, or `model.safetensors.index.json` and the
shards that it names, as written by Hugging Face `save_pretrained`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from srt.checkpoint.files import (
    MAX_INDEX_BYTES,
    check_regular,
    describe,
    lies_there,
    open_regular,
    read_json,
)
from srt.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The same in Mistral's own form.
_MISTRAL_SINGLE_FILE = "consolidated.safetensors"
_MISTRAL_INDEX_FILE = "consolidated.safetensors.index.json"
_NAMES = ((SINGLE_FILE, INDEX_FILE), (_MISTRAL_SINGLE_FILE, _MISTRAL_INDEX_FILE))

# What the library reads of a header at most.
_MAX_HEADER_BYTES = 100_000_000
_GIT_LFS_PREFIX = b"version https://git-lfs"

# Safetensors dtype code -> (name of the torch dtype, bytes an element).
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}


@dataclass(frozen=True)
class TensorMeta:
    """What a file's header says about one tensor.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype: safetensors' dtype code, such as `F8_E4M3`, `BF16` or `F32`; see `torch_dtype`.
        shape: sizes; `()` for a scalar.
        file: the file that holds it.
        nbytes: bytes of data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the tensor that `Checkpoint.get` returns. Imports torch."""
        import torch

        dtype = getattr(torch, DTYPES[self.dtype][0])
        assert isinstance(dtype, torch.dtype)
        return dtype


class Checkpoint:
    """The tensors of a safetensors checkpoint directory. Use `Checkpoint.open`.

    Attributes:
        path: the directory.
        files: its weight files, in the order of their names.
        nbytes: bytes of all tensors (headers not counted).
    """

    def __init__(self, path: Path, files: tuple[Path, ...], metas: dict[str, TensorMeta]) -> None:
        self.path = path
        self.files = files
        self.nbytes = sum(meta.nbytes for meta in metas.values())
        self._metas = metas
        self._handles: dict[Path, Any] = {}
        self._closed = False

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Opens the checkpoint in directory `path`, reading and checking headers only.

        Raises:
            CheckpointError: the directory is missing or holds no safetensors weights; a shard that
                the index lists is absent; a file is truncated or not a safetensors file; a tensor
                is not in the file that the index names, is in two files, or has a dtype that is
                not in `DTYPES`.
        """
        directory = Path(path)
        files, weight_map = _find_files(directory)
        metas: dict[str, TensorMeta] = {}
        for file in files:
            for meta in _read_header(file):
                if meta.name in metas:
                    raise CheckpointError(
                        "tensor is in two files",
                        file=file,
                        tensor=meta.name,
                        expected="one file a tensor",
                        found=f"also in {metas[meta.name].file.name}",
                    )
                metas[meta.name] = meta
        for name, file_name in weight_map.items():
            held = metas.get(name)
            if held is None or held.file.name != file_name:
                raise CheckpointError(
                    "tensor is not in the file that the index names",
                    file=directory / file_name,
                    tensor=name,
                    expected=f"in {file_name}",
                    found="in no file" if held is None else f"in {held.file.name}",
                )
        return cls(directory, files, metas)

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._metas)

    def __contains__(self, name: object) -> bool:
        return name in self._metas

    def __iter__(self) -> Iterator[TensorMeta]:
        """All tensors' metadata, by file."""
        return iter(self._metas.values())

    def __len__(self) -> int:
        return len(self._metas)

    def meta(self, name: str) -> TensorMeta:
        """Metadata of tensor `name`; reads nothing from disk.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        try:
            return self._metas[name]
        except KeyError:
            raise CheckpointError("no such tensor", file=self.path, tensor=name) from None

    def get(self, name: str) -> torch.Tensor:
        """Tensor `name`, mapped from its file without a copy: read it, do not write to it.

        It stays valid after `release` and `close`, and keeps its whole file mapped while it lives;
        clone what is to be kept.

        Raises:
            CheckpointError: no such tensor, or its file has changed since it was opened.
            ValueError: the checkpoint is closed.
        """
        if self._closed:
            raise ValueError(f"checkpoint {self.path} is closed")
        meta = self.meta(name)
        try:
            handle = self._handles.get(meta.file)
            if handle is None:
                handle = self._handles[meta.file] = safe_open(meta.file, framework="pt")
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot read tensor ({error})", file=meta.file, tensor=name
            ) from error
        return tensor

    def release(self) -> None:
        """Unmaps every file of which no tensor is alive, so that its pages leave memory.

        The next `get` maps the file anew, which costs one read of its header.
        """
        self._handles.clear()

    def close(self) -> None:
        """Releases all files for good. Metadata stays available."""
        self.release()
        self._closed = True

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def has_weights(directory: Path) -> bool:
    """Whether the directory holds safetensors weights, sound or not."""
    return any(lies_there(directory / name) for names in _NAMES for name in names)


def _find_files(directory: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Weight files of `directory`, and the index's map from tensor to file name (empty if none).

    A `model.safetensors` wins over an index, as it does in transformers, and both over the files of
    Mistral's own form.
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


def _read_header(file: Path) -> list[TensorMeta]:
    """Metadata of all tensors of `file`; the library validates it."""
    check_regular(file)
    try:
        # "numpy" opens the file without importing torch; no data is read either way.
        with safe_open(file, framework="numpy") as handle:
            metas = []
            for name in handle.keys():  # noqa: SIM118  it is not a mapping
                entry = handle.get_slice(name)
                metas.append(_tensor_meta(file, name, entry.get_dtype(), entry.get_shape()))
    except (SafetensorError, OSError) as error:
        try:
            explanation = _explain_bad_file(file, error)
        except OSError as reason:
            raise CheckpointError("cannot read file", file=file, found=reason) from error
        raise explanation from error
    return metas


def _tensor_meta(file: Path, name: str, dtype: str, shape: list[int]) -> TensorMeta:
    if dtype not in DTYPES:
        raise CheckpointError(
            "unsupported dtype",
            file=file,
            tensor=name,
            expected=f"one of {', '.join(DTYPES)}",
            found=dtype,
        )
    return TensorMeta(name, dtype, tuple(shape), file, math.prod(shape) * DTYPES[dtype][1])


def _explain_bad_file(file: Path, error: Exception) -> CheckpointError:
    """The reason why the library refused `file`, with byte counts where these can be told."""
    size = file.stat().st_size
    with open_regular(file) as stream:
        prefix = stream.read(8)
        if (prefix + stream.read(len(_GIT_LFS_PREFIX))).startswith(_GIT_LFS_PREFIX):
            return CheckpointError(
                "not downloaded: the file is a Git LFS pointer",
                file=file,
                expected="safetensors data (run `git lfs pull`)",
                found=f"a pointer of {size} bytes",
            )
        header_size = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + header_size > size:
            return CheckpointError(
                "truncated or not a safetensors file",
                file=file,
                expected=f"{8 + header_size} bytes of header" if len(prefix) == 8 else "a header",
                found=f"{size} bytes in the whole file",
            )
        if header_size > _MAX_HEADER_BYTES:
            return CheckpointError(f"corrupt header ({error})", file=file)
        stream.seek(8)
        header = stream.read(header_size)
    try:
        entries = json.loads(header)
        data_size = max(
            (entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__"),
            default=0,
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return CheckpointError(f"corrupt header ({error})", file=file)
    expected = 8 + header_size + data_size
    if expected == size:
        return CheckpointError(f"corrupt header ({error})", file=file)
    return CheckpointError(
        "truncated" if size < expected else "longer than its header says",
        file=file,
        expected=f"{expected} bytes",
        found=f"{size} bytes",
    )
