"""A model that is only its cache: it stores token ids in slots and predicts a hash of what it reads
back through the request table. For tests of the scheduler: whatever that does with slots, chunks
and prefixes, every request must get what it would get alone.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from srt.managers.schedule_batch import Req, ReqUpdate
from srt.managers.scheduler import Scheduler
from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.model_executor.model_runner import ExtendInput
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.sampling_params import SamplingParams

VOCAB = 50


def next_token(ids: Sequence[int]) -> int:
    """What the model finds most likely after these tokens."""
    return hash(tuple(int(i) for i in ids)) % VOCAB


class CacheOnlyRunner:
    """Stands for a ModelRunner; counts passes and the tokens that they compute."""

    def __init__(self, size: int, rows: int) -> None:
        self.config = SimpleNamespace(eos_token_ids=frozenset[int]())
        self.allocator = TokenToKVPoolAllocator(size)
        self.req_to_token_pool = ReqToTokenPool(rows, 512)
        self.tokens = np.full(size + 1, -1)
        self.extended = 0
        self.passes: list[str] = []
        self.bad_token: int | None = None

    def extend(self, inputs: Sequence[ExtendInput]) -> Tensor:
        rows = []
        for part in inputs:
            assert len(part.token_ids) > 0
            end = part.prefix_len + len(part.token_ids)
            slots = self.req_to_token_pool.table[part.req_pool_idx, :end]
            self.tokens[slots[part.prefix_len :]] = part.token_ids
            first = part.prefix_len + 1 if part.all_logits else end
            rows += [self.logits(self.tokens[slots[:n]]) for n in range(first, end + 1)]
            self.extended += len(part.token_ids)
        self.passes.append("extend")
        return torch.stack(rows)

    def decode(self, token_ids: list[int], rows: list[int], seq_lens: list[int]) -> Tensor:
        logits = []
        for token, row, length in zip(token_ids, rows, seq_lens, strict=True):
            slots = self.req_to_token_pool.table[row, :length]
            self.tokens[slots[-1]] = token
            logits.append(self.logits(self.tokens[slots]))
        self.passes.append("decode")
        return torch.stack(logits)

    def logits(self, ids: Any) -> Tensor:
        logits = torch.zeros(VOCAB)
        logits[next_token(ids)] = 5.0
        if self.bad_token is not None and self.bad_token in ids:
            logits[0] = torch.nan
        return logits


class LetterTokenizer:
    """A letter a token."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The letters."""
        assert skip_special_tokens
        return "".join(chr(ord("A") + token) for token in ids)


def make_scheduler(
    size: int = 200, rows: int = 8, chunk: int = 16, radix: bool = True
) -> tuple[Scheduler, CacheOnlyRunner]:
    """A scheduler and the model that it runs."""
    runner: Any = CacheOnlyRunner(size, rows)
    return Scheduler(runner, chunk, enable_radix_cache=radix), runner


def make_req(
    rid: int | str, prompt: Sequence[int], new_tokens: int, *, text: bool = False, **params: Any
) -> Req:
    """A request, greedy unless `params` say otherwise; with `text`, its output has one."""
    sampling = SamplingParams(**{"temperature": 0, "max_new_tokens": new_tokens} | params)
    detokenizer = None
    if text:
        detokenizer = IncrementalDetokenizer(LetterTokenizer(), prompt)
    return Req(rid, list(prompt), sampling, detokenizer, new_tokens, label=f"request {rid}")


def expected_output(prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What a greedy request gets alone."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def run(scheduler: Scheduler, limit: int = 5000) -> list[ReqUpdate]:
    """Runs all requests to their ends; returns the updates."""
    updates = []
    while scheduler.has_work:
        updates += scheduler.step()
        limit -= 1
        assert limit > 0, "the scheduler makes no progress"
    return updates
