"""Torch's tensors as the bytes that a checkpoint holds of them."""

import torch
from torch import Tensor

from srt.checkpoint.fingerprint import digest_bytes
from srt.checkpoint.writer import CheckpointWriter, TensorSpec
from srt.layers.dtypes import dtype_code


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements, row by row; a copy if it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_spec(name: str, tensor: Tensor) -> TensorSpec:
    """What a writer must know of a tensor that is going to be written."""
    return TensorSpec(name, dtype_code(tensor.dtype), tuple(tensor.shape))


def write_tensor(writer: CheckpointWriter, name: str, tensor: Tensor) -> None:
    """Writes one tensor, any strides; raises ValueError if it is not as announced."""
    writer.write(tensor_spec(name, tensor), tensor_bytes(tensor))


def digest_tensor(tensor: Tensor) -> str:
    """Hash of a tensor's bytes; neither dtype nor shape enters."""
    return digest_bytes(tensor_bytes(tensor))
