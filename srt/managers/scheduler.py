"""Decides what the next forward pass computes: prompts first, in chunks, then one token of every
running request.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from srt.errors import RequestError
from srt.managers.schedule_batch import Req
from srt.model_executor.model_runner import DecodeInput, ExtendInput, ModelRunner
from srt.sampling.sampler import sample


@dataclass(frozen=True)
class TokenEvent:
    """A request has got a token: `text` is what it releases, often empty."""

    req: Req
    token_id: int
    text: str


class Scheduler:
    """Runs a set of requests to their ends.

    Args:
        runner: Model and KV cache.
        chunked_prefill_size: Most prompt tokens of one forward pass.
    """

    def __init__(self, runner: ModelRunner, chunked_prefill_size: int) -> None:
        self._runner = runner
        self._chunk = chunked_prefill_size
        self._waiting: deque[Req] = deque()
        self._running: list[Req] = []

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended yet."""
        return bool(self._waiting or self._running)

    def add(self, reqs: Iterable[Req]) -> None:
        """Queues requests, all or none.

        Raises:
            RequestError: A request does not fit into the KV cache even when nothing else runs.
        """
        reqs = list(reqs)
        for req in reqs:
            if req.num_slots > self._runner.allocator.size:
                raise RequestError(
                    f"request {req.index} does not fit into the KV cache: "
                    f"{len(req.prompt_ids)} prompt tokens and {req.max_new_tokens} new ones need "
                    f"{req.num_slots} slots, the cache has {self._runner.allocator.size}"
                )
        self._waiting.extend(reqs)

    def step(self) -> list[TokenEvent]:
        """One forward pass; returns the tokens that came out of it."""
        self._admit()
        prefilling = [req for req in self._running if not req.is_prefilled]
        return self._extend(prefilling) if prefilling else self._decode()

    def abort(self) -> None:
        """Drops all requests and gives their slots back."""
        self._waiting.clear()
        for req in self._running:
            self._runner.allocator.free(req.cache_start, req.num_slots)
        self._running.clear()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._runner.max_running_requests:
            start = self._runner.allocator.alloc(self._waiting[0].num_slots)
            if start is None:
                break
            req = self._waiting.popleft()
            req.cache_start = start
            req.started_at = time.perf_counter()
            self._running.append(req)
        if not self._running:
            free = self._runner.allocator.available_size
            raise RequestError(
                f"request {self._waiting[0].index} needs {self._waiting[0].num_slots} KV cache "
                f"slots; {free} are free and the rest belongs to generations that have not been "
                "read to their ends"
            )

    def _extend(self, prefilling: list[Req]) -> list[TokenEvent]:
        reqs, inputs = [], []
        budget = self._chunk
        for req in prefilling:
            if budget == 0:
                break
            tokens = req.prompt_ids[req.cached_len : req.cached_len + budget]
            inputs.append(ExtendInput(tokens, req.cached_len, req.cache_start))
            reqs.append(req)
            budget -= len(tokens)
        logits = self._runner.extend(inputs)
        for req, part in zip(reqs, inputs, strict=True):
            req.cached_len += len(part.token_ids)
        done = [row for row, req in enumerate(reqs) if req.is_prefilled]
        return self._sample(
            logits[torch.tensor(done, dtype=torch.int64)], [reqs[row] for row in done]
        )

    def _decode(self) -> list[TokenEvent]:
        inputs = [
            DecodeInput(
                req.output_ids[-1],
                len(req.prompt_ids) + len(req.output_ids) - 1,
                req.cache_start,
            )
            for req in self._running
        ]
        return self._sample(self._runner.decode(inputs), list(self._running))

    def _sample(self, logits: Tensor, reqs: list[Req]) -> list[TokenEvent]:
        tokens = sample(logits, [req.params for req in reqs], [req.generator for req in reqs])
        eos = self._runner.config.eos_token_ids
        events = [
            TokenEvent(req, token, req.append(token, eos))
            for req, token in zip(reqs, tokens, strict=True)
        ]
        for req in reqs:
            if req.finish_reason is not None:
                self._running.remove(req)
                self._runner.allocator.free(req.cache_start, req.num_slots)
        return events
