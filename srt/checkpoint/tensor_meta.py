"""What a weight file's header says about one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from srt.checkpoint.dtypes import DTYPES


@dataclass(frozen=True)
class TensorMeta:
    """What a file's header says about one tensor.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype: safetensors' dtype code, one of `DTYPES`.
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
    def dtype_name(self) -> str:
        """The dtype's name, such as `float8_e4m3fn`."""
        return DTYPES[self.dtype][0]
