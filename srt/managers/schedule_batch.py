"""A request on its way through the engine."""

import copy
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np

from srt.errors import SrtError
from srt.mem_cache.radix_cache import TokenArray, TreeNode
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.grammar import Grammar
from srt.sampling.logprobs import TokenLogprob
from srt.sampling.sampler import TokenSampler
from srt.sampling.sampling_params import SamplingParams

RequestId = int | str
"""A text that the caller chose, or a number that the engine gave."""


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
        grammar: What its output follows, or None.
        output_ids: Tokens generated so far.
        logprobs: Of each generated token, if asked for.
        prompt_logprobs: Of each prompt token given those before it, if asked for; None for the
            first.
        req_pool_idx: Its row of the request table while it runs.
        kv_len: Tokens, from the first on, whose keys and values are in the cache.
        tree_len: How many of their slots the prefix tree owns.
        allocated_len: Tokens that have a slot.
        last_node: Where its prefix ends in the tree; locked while it runs.
        cached_tokens: Prompt tokens that the prefix tree had when it began.
        finish_reason: None while it runs.
        matched_stop: The token or text that ended it, or None.
        error: Why it failed, or None.
        reader: Who gets what it generates; None for whoever drives the passes.
        started_at: When its prefill began, by the performance counter, in seconds; likewise the
            next two.
    """

    rid: RequestId
    prompt_ids: Sequence[int]
    params: SamplingParams
    detokenizer: IncrementalDetokenizer | None
    max_new_tokens: int
    label: str
    grammar: Grammar | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    req_pool_idx: int | None = None
    kv_len: int = 0
    tree_len: int = 0
    allocated_len: int = 0
    last_node: TreeNode | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    error: SrtError | None = None
    reader: "weakref.ref[Any] | None" = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    sampler: TokenSampler = field(init=False)
    _ids: TokenArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.sampler = TokenSampler(self.params, self.prompt_ids, self.grammar)
        self._ids = np.empty(self.num_slots + 1, dtype=np.int32)
        self._ids[: len(self.prompt_ids)] = self.prompt_ids

    @property
    def num_slots(self) -> int:
        """Cache slots that it needs: the last token is generated but never computed on."""
        return len(self.prompt_ids) + self.max_new_tokens - 1

    @property
    def is_ready(self) -> bool:
        """Whether it can begin: its grammar has been compiled."""
        return self.grammar is None or self.grammar.is_ready

    @property
    def seq_len(self) -> int:
        """Tokens of the prompt and generated so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def token_ids(self) -> TokenArray:
        """All tokens of the prompt and generated so far."""
        return self._ids[: self.seq_len]

    @property
    def remaining_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.max_new_tokens - len(self.output_ids)

    def next_token(
        self,
        computed: "ReqUpdate",
        token_id: int,
        eos_token_ids: frozenset[int],
        logprob: TokenLogprob | None = None,
    ) -> "ReqUpdate":
        """The update of the next token: the text that it releases, and whether the request ends.

        Args:
            computed: The update of the pass without the token.
            token_id: The token.
            eos_token_ids: Those that end an output.
            logprob: Its log-probability, if asked for.
        """
        params, text = self.params, ""
        finish: FinishReason | None = None
        matched: int | str | None = None
        detokenizer = copy.copy(self.detokenizer)
        if token_id in (params.stop_token_ids or ()) or (
            token_id in eos_token_ids and not params.ignore_eos
        ):
            finish, matched = FinishReason.STOP, token_id
        elif detokenizer is not None:
            text = detokenizer.append(token_id)
        if finish is None and len(self.output_ids) + 1 >= self.max_new_tokens:
            finish = FinishReason.LENGTH
        if detokenizer is not None:
            if finish is not None:
                text += detokenizer.finish()
            if detokenizer.matched_stop is not None:
                finish, matched = FinishReason.STOP, detokenizer.matched_stop
        return replace(
            computed,
            token_id=token_id,
            logprob=logprob,
            text=text,
            detokenizer=detokenizer,
            finish_reason=finish,
            matched_stop=matched,
        )

    def aborted(self, error: SrtError | None = None) -> "ReqUpdate":
        """Its end where it is, with the text that was still held back."""
        detokenizer, text = copy.copy(self.detokenizer), ""
        if detokenizer is not None:
            try:
                text = detokenizer.finish()
            except Exception:  # noqa: BLE001 - it ends even if its text is what fails
                detokenizer = self.detokenizer
        return ReqUpdate(
            self,
            text=text,
            detokenizer=detokenizer,
            finish_reason=FinishReason.ABORT,
            error=error,
        )


@dataclass(frozen=True, eq=False)
class ReqUpdate:
    """What a pass changes in one request. It is computed while the request stays as it is;
    :meth:`apply` changes the request, and may be repeated after an interruption.

    Attributes:
        req: The request, as it was before the pass.
        computed: Tokens that the pass put into the cache.
        prompt_logprobs: Log-probabilities of the tokens that these predict, if asked for.
        token_id: The token generated, or None.
        logprob: Its log-probability, if asked for.
        text: The text released, often empty.
        detokenizer: Its state afterwards.
        finish_reason: Why the request ends, or None; likewise the next two.
    """

    req: Req
    computed: int = 0
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    text: str = ""
    detokenizer: IncrementalDetokenizer | None = None
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    error: SrtError | None = None
    _kv_len: int = field(init=False)
    _count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kv_len", self.req.kv_len)
        object.__setattr__(self, "_count", len(self.req.output_ids))

    @property
    def is_last(self) -> bool:
        """Whether the request has ended with it."""
        return self.finish_reason is not None

    @property
    def has_output(self) -> bool:
        """Whether a reader is to get it: it has a token, or is an end without one."""
        return self.token_id is not None or self.is_last

    def apply(self) -> None:
        """Changes the request. Each step replaces something or nothing, so that all can be
        repeated.
        """
        req, now = self.req, time.perf_counter()
        req.kv_len = self._kv_len + self.computed
        if self.prompt_logprobs:
            # The first token has an entry, but none that predicts it.
            req.prompt_logprobs[self._kv_len + 1 if self._kv_len else 0 :] = self.prompt_logprobs
        if self.token_id is not None:
            req._ids[len(req.prompt_ids) + self._count] = self.token_id
            if self.logprob is not None:
                req.logprobs[self._count :] = [self.logprob]
            req.output_ids[self._count :] = [self.token_id]
            if self._count == 0:
                req.first_token_at = now
        if self.detokenizer is not None:
            req.detokenizer = self.detokenizer
        if self.finish_reason is not None:
            req.matched_stop, req.error = self.matched_stop, self.error
            req.finished_at = now
            req.finish_reason = self.finish_reason
