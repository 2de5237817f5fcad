"""A request on its way through the engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.sampler import make_generator
from srt.sampling.sampling_params import SamplingParams


class FinishReason(str, Enum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop text."""

    LENGTH = "length"
    """max_new_tokens, or the end of the context."""


@dataclass(eq=False)
class Req:
    """One request.

    Attributes:
        index: Its place among the requests of the call.
        prompt_ids: Tokens of the prompt, at least one.
        params: Sampling parameters.
        detokenizer: Makes its text; None without a tokenizer.
        max_new_tokens: Most tokens to generate, with the context's end taken into account.
        output_ids: Tokens generated so far.
        cache_start: First slot of its range in the KV cache.
        cached_len: Prompt tokens computed so far.
        finish_reason: None while it runs.
        matched_stop: The token or text that ended it, or None.
        started_at: When its prefill began, by the performance counter, in seconds; likewise the
            next two.
    """

    index: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    cache_start: int = 0
    cached_len: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = make_generator(self.params)

    @property
    def num_slots(self) -> int:
        """Cache slots that it needs: the last token is generated but never computed on."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    @property
    def is_prefilled(self) -> bool:
        """Whether its whole prompt is in the cache."""
        return self.cached_len == len(self.prompt_ids)

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> str:
        """Takes the next token and decides whether the request ends; returns the text that the
        token releases.
        """
        now = time.perf_counter()
        if not self.output_ids:
            self.first_token_at = now
        self.output_ids.append(token_id)
        params = self.params
        text = ""
        if token_id in params.stop_token_ids or (
            token_id in eos_token_ids and not params.ignore_eos
        ):
            self.finish_reason, self.matched_stop = FinishReason.STOP, token_id
        elif self.detokenizer is not None:
            text = self.detokenizer.append(token_id)
        if self.finish_reason is None and len(self.output_ids) >= self.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.detokenizer is not None:
            if self.finish_reason is not None:
                text += self.detokenizer.finish()
            if self.detokenizer.matched_stop is not None:
                self.finish_reason = FinishReason.STOP
                self.matched_stop = self.detokenizer.matched_stop
        if self.finish_reason is not None:
            self.finished_at = now
        return text
