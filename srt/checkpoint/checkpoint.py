"""The tensors of a safetensors checkpoint directory, over its one or many files, by their headers.

Nothing else of a file is read: metadata is there within milliseconds, without Torch. What maps the
tensors themselves is `srt.model_loader.mapped_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from srt.checkpoint.headers import read_header
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_files import find_weight_files
from srt.errors import CheckpointError

C = TypeVar("C", bound="Checkpoint")


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

    @classmethod
    def open(cls: type[C], path: str | Path) -> C:
        """Opens the checkpoint in directory `path`, reading and checking headers only.

        Raises:
            CheckpointError: the directory is missing or holds no safetensors weights; a shard that
                the index lists is absent; a file is truncated or not a safetensors file; a tensor
                is not in the file that the index names, is in two files, or has a dtype that is
                not in `DTYPES`.
        """
        directory = Path(path)
        files, weight_map = find_weight_files(directory)
        metas: dict[str, TensorMeta] = {}
        for file in files:
            for meta in read_header(file):
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
