"""Writes a safetensors checkpoint tensor by tensor, in shards, without holding a shard in memory.
Takes bytes; `srt.model_loader.tensors` has the function that gives it Torch's tensors.

The library's own writer needs all tensors of a file at once. Names, dtypes and shapes are known
beforehand here, so a file's header is written first and each tensor's bytes go to their place when
they come. File and index layout are Hugging Face's (`save_pretrained`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from srt.checkpoint.dtypes import DTYPES
from srt.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE

# Hugging Face's default is 5 GB as well: hosts and file systems stay clear of their limits.
MAX_SHARD_SIZE = 5_000_000_000
# Bytes of a cache line: kernels read mapped weights that begin at one faster.
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is going to be written: its name, dtype code (one of `DTYPES`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{DTYPES[self.dtype][0]} {list(self.shape)}"


@dataclass(frozen=True)
class _Slot:
    """Where a tensor's bytes go."""

    spec: TensorSpec
    file: Path
    offset: int


class CheckpointWriter:
    """Writes tensors announced by `specs` into `directory`, in any order.

    A context manager: leaving it without an error checks that every tensor was written and writes
    the index if there is more than one shard.

    Args:
        directory: an existing directory; its files of the same names are overwritten.
        specs: all tensors to come. Shards are filled in this order.
        max_shard_size: bytes of tensor data a shard; a larger tensor gets a shard of its own.

    Raises:
        ValueError: `specs` is empty or has a name twice; `write` gets a tensor that was not
            announced, was written before, or has another dtype or shape than announced; a tensor
            is missing at the end.
    """

    def __init__(
        self, directory: Path, specs: Iterable[TensorSpec], max_shard_size: int = MAX_SHARD_SIZE
    ) -> None:
        self._directory = directory
        shards = _split(list(specs), max_shard_size)
        self._slots: dict[str, _Slot] = {}
        self._files: dict[Path, BinaryIO] = {}
        for i, shard in enumerate(shards, start=1):
            name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            file = directory / (SINGLE_FILE if len(shards) == 1 else name)
            self._start_file(file, shard)
        self._missing = set(self._slots)

    def _start_file(self, file: Path, shard: list[TensorSpec]) -> None:
        # First what fills whole cache lines, which keeps these tensors aligned to such; then widest
        # elements first, as the library does, so that all are aligned to their dtype.
        ordered = sorted(shard, key=lambda spec: (spec.nbytes % _ALIGNMENT != 0, -spec.itemsize))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts: list[int] = []
        end = 0
        for spec in ordered:
            if spec.name in header or spec.name in self._slots:
                raise ValueError(f"tensor {spec.name} is announced twice")
            starts.append(end)
            end += spec.nbytes
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [starts[-1], end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-(8 + len(encoded)) % _ALIGNMENT)
        stream = file.open("wb")
        self._files[file] = stream
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        data = stream.tell()
        stream.truncate(data + end)
        for spec, start in zip(ordered, starts, strict=True):
            self._slots[spec.name] = _Slot(spec, file, data + start)

    def write(self, spec: TensorSpec, data: memoryview) -> None:
        """Writes one tensor; raises ValueError if it is not as announced.

        Args:
            spec: What it is.
            data: Its elements, row by row.
        """
        name = spec.name
        slot = self._slots.get(name)
        if slot is None or name not in self._missing:
            raise ValueError(f"tensor {name} was {'written before' if slot else 'not announced'}")
        if spec != slot.spec or data.nbytes != spec.nbytes:
            raise ValueError(
                f"tensor {name}: expected {slot.spec}, got {spec} of {data.nbytes} bytes"
            )
        stream = self._files[slot.file]
        stream.seek(slot.offset)
        stream.write(data)
        self._missing.remove(name)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as closing:  # all of them, whatever one of them raises
            if error is not None:
                closing.enter_context(suppress(OSError))  # `error` is the reason
            for stream in self._files.values():
                closing.callback(stream.close)
        if error is not None:
            return
        if self._missing:
            raise ValueError(f"tensors were announced but not written: {sorted(self._missing)}")
        if len(self._files) > 1:
            self._write_index()

    def _write_index(self) -> None:
        index = {
            "metadata": {"total_size": sum(slot.spec.nbytes for slot in self._slots.values())},
            "weight_map": {name: slot.file.name for name, slot in sorted(self._slots.items())},
        }
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _split(specs: list[TensorSpec], max_shard_size: int) -> list[list[TensorSpec]]:
    """Consecutive runs of `specs` of at most `max_shard_size` bytes each."""
    if not specs:
        raise ValueError("a checkpoint needs at least one tensor")
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards
