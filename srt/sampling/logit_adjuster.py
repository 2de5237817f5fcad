"""What a request's parameters do to the model's logits before a token is chosen: penalties, biases
and the least length.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from srt.sampling.checks import FLOAT32_MAX
from srt.sampling.sampling_params import SamplingParams


class LogitAdjuster:
    """Adjusts the logits of one request.

    In this order: the repetition penalty, as transformers defines it; presence and frequency
    penalties, as OpenAI does; biases; and while the output is shorter than `min_new_tokens`, tokens
    that would end it become impossible. Each is computed for the tokens that it concerns,
    in float64, and rounded once.

    Args:
        params: The request's parameters.
        prompt_ids: Its prompt.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self._repetition = params.distribution().repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._min_new_tokens = params.min_new_tokens
        bias = params.logit_bias or {}
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float64)
        penalised = self._repetition != 1 or self._presence != 0 or self._frequency != 0
        # The prompt's tokens count for the repetition penalty only.
        counted = prompt_ids if self._repetition != 1 else ()
        self._counts = _TokenCounts(counted) if penalised else None

    def concerns(self, length: int) -> bool:
        """Whether it changes logits after `length` generated tokens."""
        return self._counts is not None or self._bias.size > 0 or length < self._min_new_tokens

    def adjust(
        self, logits: Tensor, output_ids: Sequence[int], ending_ids: Iterable[int]
    ) -> Tensor:
        """Adjusted logits in memory of their own.

        Args:
            logits: `[vocab_size]` float32.
            output_ids: Tokens generated so far.
            ending_ids: Tokens that would end the request.
        """
        values = logits.numpy().copy()
        if self._counts is not None:
            ids, counts = self._counts.take(output_ids)
            new = values[ids].astype(np.float64)
            if self._repetition != 1:
                new = np.where(new > 0, new / self._repetition, new * self._repetition)
            new -= self._frequency * counts + self._presence * (counts > 0)
            _store(values, ids, new)
        if self._bias.size:
            _store(values, self._bias_ids, values[self._bias_ids] + self._bias)
        if len(output_ids) < self._min_new_tokens:
            values[[token for token in ending_ids if 0 <= token < values.size]] = -math.inf
        return torch.from_numpy(values)


def _store(values: NDArray[np.float32], ids: NDArray[np.int64], new: NDArray[np.float64]) -> None:
    """Writes float64 numbers as float32. Those that are too large become the largest number, so
    that they can still be compared; those below all numbers become impossible.
    """
    with np.errstate(over="ignore"):
        values[ids] = np.minimum(new, FLOAT32_MAX)


class _TokenCounts:
    """How often each token was generated, brought up to date by what is new.

    Args:
        prompt_ids: Tokens that are listed although they were not generated.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._prompt_ids = tuple(dict.fromkeys(prompt_ids))
        self._reset()

    def _reset(self) -> None:
        self._places = {token: place for place, token in enumerate(self._prompt_ids)}
        capacity = 2 * len(self._prompt_ids) + 64
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(self._prompt_ids)] = self._prompt_ids
        self._counts = np.zeros(capacity, dtype=np.int64)
        # Generated tokens that are counted; None while it changes.
        self._length: int | None = 0

    def take(self, output_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and how often `output_ids` has each, both `[n]`."""
        counted = self._length
        if counted is None or counted > len(output_ids):  # interrupted, or tokens were taken back
            self._reset()
            counted = 0
        self._length = None
        for token in output_ids[counted:]:
            place = self._places.setdefault(token, len(self._places))
            if place == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self._length = len(output_ids)
        count = len(self._places)
        return self._ids[:count], self._counts[:count]
