"""The forms in which callers give prompts, brought into one: several inputs, and whether a single
one was meant.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from srt.errors import RequestError
from srt.sampling.sampling_params import SamplingParams
from srt.values import describe, is_integer

TokenIds = Sequence[int] | NDArray[np.integer[Any]] | Tensor
"""Token ids of one input; arrays and tensors may have two dimensions and be several inputs."""


SamplingParamsInput = SamplingParams | Mapping[str, Any]
"""Sampling parameters of one input, also by name."""


def as_texts(prompt: object) -> tuple[list[str], bool]:
    """One text or a list of them.

    Raises:
        RequestError: Something else.
    """
    if isinstance(prompt, str):
        return [prompt], True
    values = _to_list(prompt)
    if values is None or not all(isinstance(text, str) for text in values):
        raise RequestError(f"prompt: expected a text or a list of texts, found {describe(prompt)}")
    return values, False


def as_token_ids(input_ids: object) -> tuple[list[list[int]], bool]:
    """Token ids or a list of such: lists, tuples, or arrays and tensors of one or two dimensions
    and any integer dtype.

    Raises:
        RequestError: Something else.
    """
    if isinstance(input_ids, np.ndarray) and input_ids.ndim == 1 and input_ids.dtype.kind in "iu":
        return [input_ids.tolist()], True
    values = _to_list(input_ids)
    if values is not None:
        rows = [_to_list(value) for value in values]
        if all(row is not None and _are_integers(row) for row in rows) and rows:
            return [[int(token) for token in row or ()] for row in rows], False
        if _are_integers(values):
            return [[int(token) for token in values]], True
    raise RequestError(
        f"input_ids: expected token ids or a list of lists of them, found {describe(input_ids)}"
    )


def as_conversations(messages: object) -> tuple[list[list[Any]], bool]:
    """A list of messages or several such lists; the messages are not looked at.

    Raises:
        RequestError: Something else.
    """
    values = _to_list(messages)
    if values is not None:
        if not values or isinstance(values[0], Mapping):
            return [values], True
        conversations = [_to_list(value) for value in values]
        if all(conversation is not None for conversation in conversations):
            return [conversation or [] for conversation in conversations], False
    raise RequestError(
        "messages: expected a list of messages ({'role': ..., 'content': ...}) or several such "
        f"lists, found {describe(messages)}"
    )


def _to_list(value: object) -> list[Any] | None:
    """The elements of a sequence, or of an array's or a tensor's first dimension; else None."""
    if isinstance(value, (str, bytes, bytearray, Mapping)):
        return None
    if isinstance(value, Sequence):
        return list(value)
    if hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0:
        return list(value.tolist())
    return None


def _are_integers(values: list[Any]) -> bool:
    return all(is_integer(value) for value in values)
