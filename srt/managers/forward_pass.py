"""Computes a pass: from requests to a :class:`ReqUpdate` for each, without changing any of them.

Whatever fails here fails for one request, which ends with its error; to the others it is as if the
failing one had not been there, since what a request gets does not depend on what runs with it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from srt.errors import SrtError
from srt.managers.schedule_batch import Req, ReqUpdate
from srt.model_executor.model_runner import ExtendInput, ModelRunner
from srt.sampling.logprobs import TokenLogprob, token_logprobs
from srt.sampling.sampler import sample

logger = logging.getLogger(__name__)

Part = tuple[Req, ExtendInput]
T = TypeVar("T", Req, Part)


def failed(req: Req, error: Exception) -> ReqUpdate:
    """The end of a request by an error."""
    if not isinstance(error, SrtError):
        logger.error("%s failed", req.label, exc_info=error)
        found = f"{req.label}: {type(error).__name__}: {error}".rstrip(": ")
        cause, error = error, SrtError(found)
        error.__cause__ = cause
    return req.aborted(error)


@dataclass
class WorkDone:
    """What passes have computed. One that failed counts, too: it took its time.

    Attributes:
        prefill_passes: Passes over prompt tokens.
        prefill_tokens: Tokens in them.
        prefill_seconds: Time that they took, with choosing tokens.
        decode_passes: Passes over one token of each request; likewise the next two.
        decode_tokens: Tokens in them.
        decode_seconds: Time that they took.
    """

    prefill_passes: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_passes: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class ForwardPass:
    """Runs the model and chooses tokens.

    Args:
        runner: The model and its cache.

    Attributes:
        work: What it has computed.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.work = WorkDone()

    def extend(self, parts: Sequence[Part]) -> list[ReqUpdate]:
        """Computes prompt tokens; a request all of whose tokens are computed gets its next one."""
        started = time.perf_counter()
        try:
            return _isolated(self._extend, parts, lambda part: part[0])
        finally:
            self.work.prefill_passes += 1
            self.work.prefill_tokens += sum(len(part.token_ids) for _, part in parts)
            self.work.prefill_seconds += time.perf_counter() - started

    def decode(self, reqs: Sequence[Req]) -> list[ReqUpdate]:
        """Computes the last token of each request and chooses its next one."""
        started = time.perf_counter()
        try:
            return _isolated(self._decode, reqs, lambda req: req)
        finally:
            self.work.decode_passes += 1
            self.work.decode_tokens += len(reqs)
            self.work.decode_seconds += time.perf_counter() - started

    def _extend(self, parts: Sequence[Part]) -> list[ReqUpdate]:
        logits = self._runner.extend([part for _, part in parts])
        updates: list[ReqUpdate] = []
        chosen: list[ReqUpdate] = []  # what is known so far of those that get a token
        rows: list[int] = []
        end = 0
        for req, part in parts:
            start, end = end, end + (len(part.token_ids) if part.all_logits else 1)
            try:
                logprobs = _prompt_logprobs(req, logits[start:end]) if part.all_logits else ()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
                updates.append(failed(req, error))
                continue
            one = ReqUpdate(req, computed=len(part.token_ids), prompt_logprobs=logprobs)
            if part.prefix_len + one.computed < req.seq_len:
                updates.append(one)
            else:
                chosen.append(one)
                rows.append(end - 1)
        if chosen:
            if len(rows) != logits.shape[0]:
                logits = logits[torch.tensor(rows)]
            updates += self._choose(logits, chosen)
        return updates

    def _decode(self, reqs: Sequence[Req]) -> list[ReqUpdate]:
        logits = self._runner.decode(
            [req.output_ids[-1] for req in reqs],
            [req.req_pool_idx for req in reqs if req.req_pool_idx is not None],
            [req.seq_len for req in reqs],
        )
        return self._choose(logits, [ReqUpdate(req, computed=1) for req in reqs])

    def _choose(self, logits: Tensor, computed: Sequence[ReqUpdate]) -> list[ReqUpdate]:
        """Adds the next token to what a pass has computed; `logits` has a row for each."""
        eos = self._runner.config.eos_token_ids
        tokens = _sample(logits, [one.req for one in computed], eos)
        updates = []
        for row, (one, token) in enumerate(zip(computed, tokens, strict=True)):
            req = one.req
            try:
                if isinstance(token, Exception):
                    raise token
                if token is None:
                    raise SrtError(
                        f"{req.label}: logits are not finite: the activations left the range of "
                        "their dtype; run with dtype bfloat16, which has that of float32"
                    )
                logprob = None
                if req.params.return_logprob:
                    top = req.params.top_logprobs_num
                    logprob = token_logprobs(logits[row : row + 1], [token], top)[0]
                updates.append(req.next_token(one, token, eos, logprob))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
                updates.append(failed(req, error))
        return updates


def _isolated(
    compute: Callable[[Sequence[T]], list[ReqUpdate]],
    items: Sequence[T],
    request_of: Callable[[T], Req],
) -> list[ReqUpdate]:
    """Computes all together; if that fails, each alone, so that only those fail that do alone."""
    try:
        return compute(items)
    except Exception as error:
        if len(items) == 1:
            return [failed(request_of(items[0]), error)]
        logger.warning("a pass failed, its %d requests run one by one", len(items), exc_info=True)
    return [one for item in items for one in _isolated(compute, [item], request_of)]


def _sample(
    logits: Tensor, reqs: Sequence[Req], eos_token_ids: frozenset[int]
) -> Sequence[int | Exception | None]:
    """The next token of each request, or the error that drawing it raised."""
    try:
        samplers, outputs = [req.sampler for req in reqs], [req.output_ids for req in reqs]
        return sample(logits, samplers, outputs, eos_token_ids)
    except Exception as error:  # noqa: BLE001 - it goes to the request
        if len(reqs) == 1:
            return [error]
    return [_sample(logits[i : i + 1], [req], eos_token_ids)[0] for i, req in enumerate(reqs)]


def _prompt_logprobs(req: Req, logits: Tensor) -> list[TokenLogprob | None]:
    """Log-probabilities of the prompt tokens that follow those of a pass; of a prompt's first token
    there is none.
    """
    following = list(req.prompt_ids[req.kv_len + 1 : req.kv_len + 1 + logits.shape[0]])
    entries = token_logprobs(logits[: len(following)], following, req.params.top_logprobs_num)
    return [*entries] if req.kv_len else [None, *entries]
