"""The order of rows in checkpoints of Mistral's own form.

Mistral rotates neighbouring elements of a head (2i, 2i + 1), transformers and this runtime element
i of its first half with element i of the second. So the rows of the query and key projections are
in another order there.
"""

from torch import Tensor

from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_names import split_tensor_name
from srt.errors import CheckpointError

_ROTATED = ("attention.wq", "attention.wk")


def to_hf_rows(
    meta: TensorMeta, tensor: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> Tensor:
    """`tensor` with its rows in transformers' order; itself unless its name in the checkpoint is
    that of Mistral's query or key projection.

    Weights `[N, K]`, biases and per-channel scales `[N, ...]` are reordered; a scale of one element
    holds for all rows.

    Raises:
        CheckpointError: The tensor does not have one row for each of the projection's outputs, as a
            grid of scales has not.
    """
    module, _ = split_tensor_name(meta.name)
    if not module.endswith(_ROTATED) or tensor.numel() == 1:
        return tensor
    heads = num_heads if module.endswith(_ROTATED[0]) else num_kv_heads
    if tensor.shape[0] != heads * head_dim:
        raise CheckpointError(
            "rows of this tensor cannot be brought into transformers' order",
            file=meta.file,
            tensor=meta.name,
            expected=f"{heads * head_dim} rows, or one element",
            found=list(meta.shape),
        )
    split = tensor.reshape(heads, head_dim // 2, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
