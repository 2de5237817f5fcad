"""Torch's dtypes of the codes that a checkpoint's headers have."""

from collections.abc import Mapping

import torch

from srt.checkpoint.dtypes import DTYPES

# Dtype code -> Torch's dtype.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    code: getattr(torch, name) for code, (name, _) in DTYPES.items()
}
_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}


def dtype_code(dtype: torch.dtype) -> str:
    """The code by which a checkpoint's header names a dtype of Torch."""
    return _CODES[dtype]
