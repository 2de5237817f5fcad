"""Reads the header of one safetensors file: which tensors it holds, and of a damaged one, what is
wrong with it.

File format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON
header, data).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from srt.checkpoint.dtypes import DTYPES
from srt.checkpoint.files import check_regular, open_regular
from srt.checkpoint.tensor_meta import TensorMeta
from srt.errors import CheckpointError

# What the library reads of a header at most.
MAX_HEADER_BYTES = 100_000_000
_GIT_LFS_PREFIX = b"version https://git-lfs"


def read_header(file: Path) -> list[TensorMeta]:
    """Metadata of all tensors of `file`; the library validates it.

    Raises:
        CheckpointError: The file is missing or cannot be read, truncated or not a safetensors file,
            or a tensor has a dtype that is not in `DTYPES`.
    """
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
        if header_size > MAX_HEADER_BYTES:
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
