"""Decides what the next forward pass computes.

Running requests come first: while prompts are being prefilled, chunk by chunk, every chunk is
followed by a decode pass. A request is admitted when its tokens fit into the KV cache with some
room to spare for what runs; if the room is gone all the same, the request that came last steps back
(retraction): its slots become free, and later all its tokens are computed again like a prompt,
which gives the same bits.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from srt.errors import RequestError, SrtError
from srt.managers.kv_manager import KVManager
from srt.managers.schedule_batch import Req, RequestId
from srt.model_executor.model_runner import ExtendInput, ModelRunner
from srt.sampling.logprobs import TokenLogprob, token_logprobs
from srt.sampling.sampler import sample

# Slots kept free at admission for each running request's next tokens. More makes retraction rarer
# and leaves more of the cache idle.
_DECODE_RESERVE = 32
# Waiting requests looked at for admission: one that waits for another's prefix may be overtaken.
_LOOKAHEAD = 64
# Tokens of a prefix that another request is about to compute, for which it is worth waiting.
_WORTH_WAITING = 32
# Prompt tokens of one pass whose logits are all wanted: each takes 4 * vocab_size bytes.
_PROMPT_LOGPROB_CHUNK = 64


@dataclass(frozen=True)
class TokenEvent:
    """A request has got a token, or has ended without one.

    Attributes:
        req: The request.
        token_id: The token; None if it was aborted.
        text: What it releases, often empty.
    """

    req: Req
    token_id: int | None
    text: str


class Scheduler:
    """Runs requests to their ends. `add` and `abort` may be called from any thread, all else from
    one.

    Args:
        runner: Model and KV cache.
        chunked_prefill_size: Most prompt tokens of one forward pass.
        enable_radix_cache: Keep the keys and values of ended requests for those with the same
            prefix.
    """

    def __init__(
        self, runner: ModelRunner, chunked_prefill_size: int, *, enable_radix_cache: bool = True
    ) -> None:
        self._runner = runner
        self._chunk = chunked_prefill_size
        self._kv = KVManager(runner, enable_radix_cache)
        self._inbox: deque[Req] = deque()
        self._aborted: deque[RequestId] = deque()
        self._waiting: deque[Req] = deque()
        self._prefilling: list[Req] = []
        self._decoding: list[Req] = []
        self._decoded_last = False
        self.num_retractions = 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended yet."""
        return bool(self._inbox or self._waiting or self._prefilling or self._decoding)

    @property
    def kv(self) -> KVManager:
        """Who owns which cache slots."""
        return self._kv

    def add(self, reqs: Iterable[Req]) -> None:
        """Queues requests, all or none.

        Raises:
            RequestError: A request does not fit into the KV cache even when nothing else runs.
        """
        reqs = list(reqs)
        size = self._kv.size
        for req in reqs:
            if req.num_slots > size:
                raise RequestError(
                    f"{req.label} does not fit into the KV cache: "
                    f"{len(req.prompt_ids)} prompt tokens and {req.max_new_tokens} new ones need "
                    f"{req.num_slots} slots, the cache has {size}"
                )
        self._inbox.extend(reqs)

    def abort(self, rids: Iterable[RequestId]) -> None:
        """Ends requests where they are, before the next pass; ids that are not running are
        ignored.
        """
        self._aborted.extend(rids)

    def drop(self, rids: Iterable[RequestId]) -> None:
        """Ends requests at once, without an event."""
        self.abort(rids)
        self._take_inbox()
        self._take_aborted()

    def step(self) -> list[TokenEvent]:
        """At most one forward pass; returns what came out of it."""
        self._take_inbox()
        events = self._take_aborted()
        self._admit()
        if self._decoding and not (self._prefilling and self._decoded_last):
            self._decoded_last = True
            return events + self._decode()
        self._decoded_last = False
        return events + (self._extend() if self._prefilling else [])

    def _take_inbox(self) -> None:
        while self._inbox:
            self._waiting.append(self._inbox.popleft())

    def _take_aborted(self) -> list[TokenEvent]:
        if not self._aborted:
            return []
        rids = set()
        while self._aborted:
            rids.add(self._aborted.popleft())
        events = []
        for req in [r for r in self._waiting if r.rid in rids]:
            self._waiting.remove(req)
            events.append(TokenEvent(req, None, req.abort()))
        for running in (self._prefilling, self._decoding):
            for req in [r for r in running if r.rid in rids]:
                running.remove(req)
                self._kv.release(req)
                events.append(TokenEvent(req, None, req.abort()))
        return events

    def _admit(self) -> None:
        index = 0
        while index < min(len(self._waiting), _LOOKAHEAD) and self._kv.has_row:
            req = self._waiting[index]
            matched = self._kv.match(req)
            if self._is_being_computed(req, matched):
                index += 1
                continue
            running = [*self._prefilling, *self._decoding]
            reserve = sum(min(r.remaining_tokens, _DECODE_RESERVE) for r in running)
            if not self._kv.admit(req, reserve):
                break
            del self._waiting[index]
            self._prefilling.append(req)

    def _is_being_computed(self, req: Req, matched: int) -> bool:
        """Whether a prompt that is being prefilled has much of this one's prefix."""
        return any(
            self._kv.common_prefix(req, other) - matched >= _WORTH_WAITING
            for other in self._prefilling
        )

    def _extend(self) -> list[TokenEvent]:
        reqs, inputs = [], []
        budget = self._chunk
        for req in self._prefilling:
            if budget == 0:
                break
            wants_all = req.params.return_prompt_logprob and not req.output_ids
            count = min(budget, req.seq_len - req.kv_len)
            count = min(count, _PROMPT_LOGPROB_CHUNK) if wants_all else count
            tokens = req.token_ids[req.kv_len : req.kv_len + count]
            assert req.row is not None
            inputs.append(ExtendInput(tokens, req.kv_len, req.row, wants_all))
            reqs.append(req)
            budget -= count
        logits = self._runner.extend(inputs)
        sampled: list[Req] = []
        rows: list[int] = []
        end = 0
        for req, part in zip(reqs, inputs, strict=True):
            start, end = end, end + (len(part.token_ids) if part.all_logits else 1)
            if part.all_logits:
                self._take_prompt_logprobs(req, logits[start:end])
            req.kv_len += len(part.token_ids)
            self._kv.share(req)
            if req.is_prefilled:
                self._prefilling.remove(req)
                self._decoding.append(req)
                sampled.append(req)
                rows.append(end - 1)
        if not sampled:
            return []
        if len(rows) != logits.shape[0]:
            logits = logits[torch.tensor(rows)]
        return self._sample(logits, sampled)

    def _take_prompt_logprobs(self, req: Req, logits: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow those of a pass."""
        if req.kv_len == 0:
            req.prompt_logprobs.append(None)
        following = list(req.prompt_ids[req.kv_len + 1 : req.kv_len + 1 + logits.shape[0]])
        req.prompt_logprobs += token_logprobs(
            logits[: len(following)], following, req.params.top_logprobs_num
        )

    def _decode(self) -> list[TokenEvent]:
        self._make_room()
        if not self._decoding:
            return []
        reqs = list(self._decoding)
        self._kv.grow(reqs)
        logits = self._runner.decode(
            [req.output_ids[-1] for req in reqs],
            [req.row for req in reqs if req.row is not None],
            [req.seq_len for req in reqs],
        )
        for req in reqs:
            req.kv_len += 1
        return self._sample(logits, reqs)

    def _make_room(self) -> None:
        """Retracts the requests that came last until every other can get its next token."""
        while not self._kv.can_grow(len(self._decoding)):
            last = max((*self._prefilling, *self._decoding), key=lambda req: req.started_at)
            for running in (self._prefilling, self._decoding):
                if last in running:
                    running.remove(last)
            self._kv.release(last)
            self._waiting.appendleft(last)
            self.num_retractions += 1

    def _sample(self, logits: Tensor, reqs: list[Req]) -> list[TokenEvent]:
        tokens = sample(logits, [req.sampler for req in reqs], [req.output_ids for req in reqs])
        eos = self._runner.config.eos_token_ids
        events = []
        for row, (req, token) in enumerate(zip(reqs, tokens, strict=True)):
            if token is None:
                error = SrtError(
                    f"{req.label}: logits are not finite: the activations left the range of "
                    "their dtype; run with dtype bfloat16, which has that of float32"
                )
                events.append(TokenEvent(req, None, req.abort(error)))
            else:
                if req.params.return_logprob:
                    req.logprobs += _logprob(logits[row], token, req)
                events.append(TokenEvent(req, token, req.append(token, eos)))
            if req.finish_reason is not None:
                self._decoding.remove(req)
                self._kv.release(req)
        return events


def _logprob(logits: Tensor, token_id: int, req: Req) -> list[TokenLogprob]:
    return token_logprobs(logits.unsqueeze(0), [token_id], req.params.top_logprobs_num)
