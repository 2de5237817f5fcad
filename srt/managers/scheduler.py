"""Decides what the next forward pass computes.

Running requests come first: while prompts are being prefilled, chunk by chunk, every chunk is
followed by a decode pass. How the prompts share a chunk is in `fair_shares`. A request is admitted
when its grammar, if it has one, is compiled and its tokens fit into the KV cache with some room to
spare for what runs; if the room is gone all the same, the request that came last is retracted: its
slots become free, and later all its tokens are computed again like a prompt, which gives the same
bits.

A pass commits or leaves no trace. Its updates are computed first (`forward_pass`), which changes no
request; then one assignment commits them, and from there on they count, whatever interrupts what
follows. What can be computed again, that is the cache and who is in it, is changed without undo:
after an interruption in the middle of a change the cache is reset, and requests that have not ended
wait as if they had been retracted. So Ctrl-C, at any point, costs time and no token.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable

from srt.errors import EngineStateError, RequestError
from srt.managers.fair_shares import share_out
from srt.managers.forward_pass import ForwardPass, Part, WorkDone, failed
from srt.managers.inbox import Inbox
from srt.managers.kv_manager import KVManager
from srt.managers.schedule_batch import Req, RequestId, ReqUpdate
from srt.model_executor.model_runner import ExtendInput, ModelRunner
from srt.sampling.grammar import wait_for_any
from srt.utils.deferred_interrupt import defer_interrupt
from srt.utils.exclusive import Exclusive

# Slots kept free at admission for each running request's next tokens. More makes retraction rarer
# and leaves more of the cache idle.
_DECODE_RESERVE = 32
# Waiting requests looked at for admission: one that waits for another's prefix may be overtaken.
_LOOKAHEAD = 64
# Tokens of a prefix that another request is about to compute, for which it is worth waiting.
_WORTH_WAITING = 32
# Longest time that a pass without anything to compute waits for a grammar.
_GRAMMAR_SECONDS = 0.05
# Prompt tokens of one pass whose logits are all wanted: each takes 4 * vocab_size bytes.
_PROMPT_LOGPROB_CHUNK = 64

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs requests to their ends. `add`, `abort` and `drop` may be called from any thread, and
    while a pass runs; all else from one thread at a time, and an error says so.

    Args:
        runner: Model and KV cache.
        chunked_prefill_size: Most prompt tokens of one forward pass.
        enable_radix_cache: Keep the keys and values of ended requests for those with the same
            prefix.
    """

    def __init__(
        self, runner: ModelRunner, chunked_prefill_size: int, *, enable_radix_cache: bool = True
    ) -> None:
        self._chunk = chunked_prefill_size
        self._kv = KVManager(runner, enable_radix_cache)
        self._forward = ForwardPass(runner)
        self._exclusive = Exclusive("the engine")
        self._inbox = Inbox()
        # All that have arrived and not ended, in that order; each is in one of the next three, too.
        self._running: dict[Req, None] = {}
        self._waiting: deque[Req] = deque()
        self._prefilling: list[Req] = []
        self._decoding: list[Req] = []
        self._decoded_last = False
        self._admitted: list[RequestId] = []
        self.num_retractions = 0
        # False while cache and lists are being changed.
        self._is_consistent = True
        # Updates of a pass that count but may not all be applied yet.
        self._committed: list[ReqUpdate] = []
        # The request for which the cache is being changed.
        self._suspect: Req | None = None
        # Updates that are applied and that readers have not got yet.
        self._undelivered: deque[ReqUpdate] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended yet, or a step has updates to deliver."""
        return bool(self._inbox or self._undelivered)

    @property
    def num_running(self) -> int:
        """Requests that are being prefilled or decoded."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun, or have been retracted."""
        return len(self._waiting) + len(self._inbox.arrived)

    @property
    def work(self) -> WorkDone:
        """What the passes have computed."""
        return self._forward.work

    @property
    def admitted(self) -> list[RequestId]:
        """Requests that have begun with the last pass, in that order."""
        return self._admitted

    @property
    def kv(self) -> KVManager:
        """Who owns which cache slots."""
        return self._kv

    def add(self, reqs: Iterable[Req]) -> None:
        """Queues requests, all or none.

        Raises:
            RequestError: A request does not fit into the KV cache even when nothing else runs, or
                has the name of one that has not ended.
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
        self._inbox.add(reqs)

    def abort(self, rids: Iterable[RequestId]) -> None:
        """Ends requests where they are, before the next pass; names of none that runs are ignored.
        A name stays taken until that pass.
        """
        self._inbox.abort(rids)

    def drop(self, reqs: Iterable[Req]) -> None:
        """Ends requests whose updates nobody reads: at once, or after the pass that runs."""
        self._inbox.dropped.extend(reqs)
        # What holds the engine takes them when it is done.
        with contextlib.suppress(EngineStateError):
            self._exclusively(self._take_dropped)

    def step(self) -> list[ReqUpdate]:
        """At most one forward pass; returns its updates that a reader is to get."""
        updates: list[ReqUpdate] = []
        self.run_pass(updates.append)
        return updates

    def run_pass(self, deliver: Callable[[ReqUpdate], object]) -> None:
        """At most one forward pass. Ctrl-C that comes meanwhile is taken afterwards.

        Args:
            deliver: Called with each update that a reader is to get, in order. One that it raises
                for, or whose delivery is interrupted, comes again with the next pass.

        Raises:
            EngineStateError: A pass is running.
        """

        def run() -> None:
            self._deliver(deliver)
            self._pass()
            self._deliver(deliver)

        self._exclusively(run)

    def _exclusively(self, function: Callable[[], None]) -> None:
        """Calls a function that changes something; the state is consistent before and after."""

        def run() -> None:
            self._recover()
            try:
                function()
            except Exception as error:  # noqa: BLE001 - what is nobody's is raised again
                self._blame(error)
            finally:
                self._recover()

        defer_interrupt(lambda: self._exclusive.run(run))

    def _blame(self, error: Exception) -> None:
        """Ends the request for which the cache could not be changed; raises what is nobody's."""
        suspect = self._suspect
        self._recover()
        if suspect is None:
            raise error
        if suspect.finish_reason is None:
            self._commit([failed(suspect, error)])
        else:
            logger.warning("%s could not leave the cache, which begins anew", suspect.label)

    def _pass(self) -> None:
        self._admitted = []
        self._changing(self._take_arrived)
        self._take_dropped()
        self._take_aborted()
        self._changing(self._admit)
        if self._decoding and not (self._prefilling and self._decoded_last):
            self._decoded_last = True
            self._changing(self._make_room)
            if self._decoding:
                self._commit(self._forward.decode(list(self._decoding)))
        else:
            self._decoded_last = False
            if self._prefilling:
                self._commit(self._forward.extend(self._next_chunk()))
            elif self._waiting:
                wait_for_any([r.grammar for r in self._waiting if r.grammar], _GRAMMAR_SECONDS)
        self._take_dropped()

    def _deliver(self, deliver: Callable[[ReqUpdate], object]) -> None:
        while self._undelivered:
            deliver(self._undelivered[0])
            self._undelivered.popleft()

    def _changing(self, change: Callable[[], None]) -> None:
        """Calls what changes cache or lists: nobody uses them again if it does not return."""
        self._is_consistent = False
        change()
        self._suspect = None
        self._is_consistent = True

    def _commit(self, updates: list[ReqUpdate]) -> None:
        """Applies what a pass has computed."""
        self._is_consistent = False
        self._committed = updates  # from here on it counts
        for one in updates:
            one.apply()
        for one in updates:
            self._suspect = one.req
            self._advance(one)
        self._suspect = None
        self._undelivered.extend([one for one in updates if one.has_output])
        self._committed = []
        self._is_consistent = True

    def _recover(self) -> None:
        """Completes an interrupted commit, and resets the cache if a change of it was interrupted.
        Can be interrupted and repeated itself.
        """
        if self._is_consistent:
            return
        for one in self._committed:
            one.apply()
        known = {id(one) for one in self._undelivered}
        self._undelivered.extend(
            [one for one in self._committed if one.has_output and id(one) not in known]
        )
        self._kv.reset(self._running)
        for req in [req for req in self._running if req.finish_reason is not None]:
            self._forget(req)
        self._waiting = deque(self._running)
        self._prefilling, self._decoding = [], []
        self._suspect = None
        self._committed = []
        self._is_consistent = True

    def _advance(self, update: ReqUpdate) -> None:
        """Moves a request between the lists, and its slots, as its update says."""
        req = update.req
        if update.is_last:
            for queue in (self._prefilling, self._decoding, self._waiting):
                if req in queue:
                    queue.remove(req)
            if req.req_pool_idx is not None:
                self._kv.release(req)
            self._forget(req)
        elif req in self._prefilling:
            self._kv.share(req)
            if update.token_id is not None:
                self._prefilling.remove(req)
                self._decoding.append(req)

    def _forget(self, req: Req) -> None:
        self._inbox.forget(req)
        self._running.pop(req, None)

    def _take_arrived(self) -> None:
        arrived = self._inbox.arrived
        while arrived:
            req = arrived[0]
            # It may have ended before it began, or have been taken when this was interrupted.
            if req.finish_reason is None and req not in self._running:
                self._running[req] = None
                self._waiting.append(req)
            arrived.popleft()

    def _take_dropped(self) -> None:
        dropped = self._inbox.dropped
        while dropped:
            req = dropped[0]
            if req.finish_reason is None:
                self._commit([req.aborted()])
            if self._undelivered:
                self._undelivered = deque([one for one in self._undelivered if one.req is not req])
            dropped.popleft()

    def _take_aborted(self) -> None:
        aborted = self._inbox.aborted
        while aborted:
            if aborted[0].finish_reason is None:
                self._commit([aborted[0].aborted()])
            aborted.popleft()

    def _admit(self) -> None:
        index = 0
        ready = [req for req in self._waiting if req.is_ready]
        while index < min(len(ready), _LOOKAHEAD) and self._kv.has_row:
            req = self._suspect = ready[index]
            matched = self._kv.match(req)
            if self._is_being_computed(req, matched):
                index += 1
                continue
            running = [*self._prefilling, *self._decoding]
            reserve = sum(min(r.remaining_tokens, _DECODE_RESERVE) for r in running)
            was_begun = req.started_at != 0
            if not self._kv.admit(req, reserve):
                break
            del ready[index]
            self._waiting.remove(req)
            self._prefilling.append(req)
            if not was_begun:
                self._admitted.append(req.rid)

    def _is_being_computed(self, req: Req, matched: int) -> bool:
        """Whether a prompt that is being prefilled has much of this one's prefix."""
        return any(
            self._kv.common_prefix(req, other) - matched >= _WORTH_WAITING
            for other in self._prefilling
        )

    def _next_chunk(self) -> list[Part]:
        """The prompt tokens of the next pass."""
        wanted = [(req, _wanted_tokens(req)) for req in self._prefilling]
        parts: list[Part] = []
        for req, count in share_out(wanted, self._chunk, others_decode=bool(self._decoding)):
            tokens = req.token_ids[req.kv_len : req.kv_len + count]
            assert req.req_pool_idx is not None
            wants_all = _wants_all_logits(req)
            parts.append((req, ExtendInput(tokens, req.kv_len, req.req_pool_idx, wants_all)))
        return parts

    def _make_room(self) -> None:
        """Gives each decoding request a slot for its next token. Retracts those that came last
        until every other can get one.
        """
        while not self._kv.can_grow(self._decoding):
            last = max((*self._prefilling, *self._decoding), key=lambda req: req.started_at)
            self._suspect = last
            for running in (self._prefilling, self._decoding):
                if last in running:
                    running.remove(last)
            self._kv.release(last)
            self._waiting.appendleft(last)
            self.num_retractions += 1
        if self._decoding:
            self._suspect = self._decoding[-1]
            self._kv.grow(self._decoding)


def _wants_all_logits(req: Req) -> bool:
    return req.params.return_prompt_logprob and not req.output_ids


def _wanted_tokens(req: Req) -> int:
    """Prompt tokens that a pass may compute, others not considered."""
    lacking = req.seq_len - req.kv_len
    return min(lacking, _PROMPT_LOGPROB_CHUNK) if _wants_all_logits(req) else lacking
