"""A request on its way through the engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from srt.errors import SrtError
from srt.mem_cache.radix_cache import TokenArray, TreeNode
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.logprobs import TokenLogprob
from srt.sampling.sampler import TokenSampler
from srt.sampling.sampling_params import SamplingParams

RequestId = int | str


class FinishReason(str, Enum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop text."""

    LENGTH = "length"
    """max_new_tokens, or the end of the context."""

    ABORT = "abort"
    """The caller gave it up, or it failed (`Req.error`)."""


@dataclass(eq=False)
class Req:
    """One request.

    Attributes:
        rid: Its name among the engine's requests.
        prompt_ids: Tokens of the prompt, at least one.
        params: Sampling parameters.
        detokenizer: Makes its text; None without a tokenizer.
        max_new_tokens: Most tokens to generate, with the context's end taken into account.
        label: What errors call it.
        output_ids: Tokens generated so far.
        logprobs: Of each generated token, if asked for.
        prompt_logprobs: Of each prompt token given those before it, if asked for; None for the
            first.
        row: Its row of the request table while it runs.
        kv_len: Tokens, from the first on, whose keys and values are in the cache.
        tree_len: How many of their slots the prefix tree owns.
        allocated_len: Tokens that have a slot.
        last_node: Where its prefix ends in the tree; locked while it runs.
        cached_tokens: Prompt tokens that the prefix tree had when it began.
        finish_reason: None while it runs.
        matched_stop: The token or text that ended it, or None.
        error: Why it failed, or None.
        started_at: When its prefill began, by the performance counter, in seconds; likewise the
            next two.
    """

    rid: RequestId
    prompt_ids: Sequence[int]
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    max_new_tokens: int
    label: str
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    row: int | None = None
    kv_len: int = 0
    tree_len: int = 0
    allocated_len: int = 0
    last_node: TreeNode | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    error: SrtError | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    sampler: TokenSampler = field(init=False)
    _ids: TokenArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.sampler = TokenSampler(self.params)
        self._ids = np.empty(self.num_slots + 1, dtype=np.int32)
        self._ids[: len(self.prompt_ids)] = self.prompt_ids

    @property
    def num_slots(self) -> int:
        """Cache slots that it needs: the last token is generated but never computed on."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    @property
    def seq_len(self) -> int:
        """Tokens of the prompt and generated so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> TokenArray:
        """All tokens of the prompt and generated so far."""
        return self._ids[: self.seq_len]

    @property
    def is_prefilled(self) -> bool:
        """Whether all its tokens are in the cache, so that the next one can be chosen."""
        return self.kv_len == self.seq_len

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.max_new_tokens - len(self.output_ids)

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> str:
        """Takes the next token and decides whether the request ends; returns the text that the
        token releases.
        """
        now = time.perf_counter()
        if not self.output_ids:
            self.first_token_at = now
        self._ids[self.seq_len] = token_id
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

    def abort(self, error: SrtError | None = None) -> str:
        """Ends it where it is; returns the text that was still held back."""
        self.finish_reason, self.error = FinishReason.ABORT, error
        self.finished_at = time.perf_counter()
        return "" if self.detokenizer is None else self.detokenizer.finish()
