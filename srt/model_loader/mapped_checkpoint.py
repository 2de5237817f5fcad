"""A checkpoint whose tensors can be read: Torch's view over its mapped files.

Tensor bytes are mapped, never copied, so what a caller reads becomes resident page by page;
`MappedCheckpoint.release` unmaps everything that no tensor refers to any more. A loader that takes
a layer's tensors, packs them, drops them and calls `release` therefore needs no more memory than
its own result plus one layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from srt.checkpoint.checkpoint import Checkpoint
from srt.checkpoint.tensor_meta import TensorMeta
from srt.errors import CheckpointError
from srt.model_loader.tensors import digest_tensor

# Mapped bytes that may stay resident before they are released.
_RELEASE_BYTES = 16 << 20


class MappedCheckpoint(Checkpoint):
    """The tensors of a safetensors checkpoint directory, mapped. Use `MappedCheckpoint.open`."""

    def __init__(self, path: Path, files: tuple[Path, ...], metas: dict[str, TensorMeta]) -> None:
        super().__init__(path, files, metas)
        self._handles: dict[Path, Any] = {}
        self._finished = 0
        self._closed = False

    def get(self, name: str) -> Tensor:
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
            tensor: Tensor = handle.get_tensor(name)
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
        self._finished = 0

    def finish(self, nbytes: int) -> None:
        """To be told when tensors of so many bytes are no longer used: releases once that is worth
        the cost.
        """
        self._finished += nbytes
        if self._finished >= _RELEASE_BYTES:
            self.release()

    def close(self) -> None:
        """Releases all files for good. Metadata stays available."""
        self.release()
        self._closed = True

    def __enter__(self) -> MappedCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def digest_tensors(checkpoint: MappedCheckpoint, names: Iterable[str]) -> dict[str, str]:
    """Hash of each named tensor; the checkpoint's pages are released on the way.

    Raises:
        CheckpointError: A tensor is missing or cannot be read.
    """
    digests = {}
    for name in names:
        digests[name] = digest_tensor(checkpoint.get(name))
        checkpoint.finish(checkpoint.meta(name).nbytes)
    return digests
