"""Decides what the next forward pass computes.

Running requests come first: while prompts are being prefilled, chunk by chunk, every chunk is
followed by a decode pass. A request is admitted when its tokens fit into the KV cache with some
room to spare for what runs; if the room is gone all the same, the request that came last steps back
(retraction): its slots become free, and later all its tokens are computed again like a prompt,
which gives the same bits.

A pass commits or leaves no trace. What it brings is worked out first (`forward_pass`), which
changes no request; then one assignment keeps it, and from there on it counts, whatever interrupts
what follows. What can be computed again, that is the cache and who is in it, is changed without a
way back: after an interruption in the middle of a change the cache begins anew, and requests that
have not ended wait as if they had stepped back. So Ctrl-C, at any point, costs time and no token.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable

from srt.errors import EngineStateError, RequestError
from srt.managers.forward_pass import ForwardPass, Part, failed
from srt.managers.inbox import Inbox
from srt.managers.kv_manager import KVManager
from srt.managers.schedule_batch import Progress, Req, RequestId
from srt.model_executor.model_runner import ExtendInput, ModelRunner
from srt.utils.deferred_interrupt import defer_interrupt
from srt.utils.exclusive import Exclusive

# Slots kept free at admission for each running request's next tokens. More makes retraction rarer
# and leaves more of the cache idle.
_DECODE_RESERVE = 32
# Waiting requests looked at for admission: one that waits for another's prefix may be overtaken.
_LOOKAHEAD = 64
# Tokens of a prefix that another request is about to compute, for which it is worth waiting.
_WORTH_WAITING = 32
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
        self.num_retractions = 0
        # False while cache and lists are being changed.
        self._is_settled = True
        # What the pass that is being taken over has brought.
        self._committed: list[Progress] = []
        # The request for which the cache is being changed.
        self._suspect: Req | None = None
        # What has been taken over and not been delivered yet.
        self._news: deque[Progress] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended yet, or news of one waits for a step."""
        return bool(self._inbox or self._news)

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
        """Ends requests without news of it: at once, or after the pass that runs."""
        self._inbox.dropped.extend(reqs)
        # What holds the engine takes them when it is done.
        with contextlib.suppress(EngineStateError):
            self._exclusively(self._take_dropped)

    def step(self) -> list[Progress]:
        """At most one forward pass; returns what came out of it."""
        news: list[Progress] = []
        self.run_pass(news.append)
        return news

    def run_pass(self, deliver: Callable[[Progress], object]) -> None:
        """At most one forward pass. Ctrl-C that comes meanwhile is taken afterwards.

        Args:
            deliver: Called with each piece of news, in order. One that it raises for, or whose
                delivery is interrupted, comes again with the next pass.

        Raises:
            EngineStateError: A pass is running.
        """

        def run() -> None:
            self._deliver(deliver)
            self._pass()
            self._deliver(deliver)

        self._exclusively(run)

    def _exclusively(self, function: Callable[[], None]) -> None:
        """Calls a function that changes something, on sound books, which it leaves sound."""

        def run() -> None:
            self._settle()
            try:
                function()
            except Exception as error:  # noqa: BLE001 - what is nobody's is raised again
                self._blame(error)
            finally:
                self._settle()

        defer_interrupt(lambda: self._exclusive.run(run))

    def _blame(self, error: Exception) -> None:
        """Ends the request for which the cache could not be changed; raises what is nobody's."""
        suspect = self._suspect
        self._settle()
        if suspect is None:
            raise error
        if suspect.finish_reason is None:
            self._commit([failed(suspect, error)])
        else:
            logger.warning("%s could not leave the cache, which begins anew", suspect.label)

    def _pass(self) -> None:
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
        self._take_dropped()

    def _deliver(self, deliver: Callable[[Progress], object]) -> None:
        while self._news:
            deliver(self._news[0])
            self._news.popleft()

    def _changing(self, change: Callable[[], None]) -> None:
        """Calls what changes cache or lists: nobody uses them again if it does not return."""
        self._is_settled = False
        change()
        self._suspect = None
        self._is_settled = True

    def _commit(self, progress: list[Progress]) -> None:
        """Takes over what a pass has brought."""
        self._is_settled = False
        self._committed = progress  # from here on it counts
        for one in progress:
            one.apply()
        for one in progress:
            self._suspect = one.req
            self._advance(one)
        self._suspect = None
        self._news.extend([one for one in progress if one.is_news])
        self._committed = []
        self._is_settled = True

    def _settle(self) -> None:
        """Takes over what an interrupted commit has left, and begins the cache anew if it was in
        the middle of a change. Can be interrupted and repeated itself.
        """
        if self._is_settled:
            return
        for one in self._committed:
            one.apply()
        known = {id(one) for one in self._news}
        self._news.extend([p for p in self._committed if p.is_news and id(p) not in known])
        self._kv.reset(self._running)
        for req in [req for req in self._running if req.finish_reason is not None]:
            self._forget(req)
        self._waiting = deque(self._running)
        self._prefilling, self._decoding = [], []
        self._suspect = None
        self._committed = []
        self._is_settled = True

    def _advance(self, progress: Progress) -> None:
        """Puts a request where its progress belongs."""
        req = progress.req
        if progress.is_last:
            for queue in (self._prefilling, self._decoding, self._waiting):
                if req in queue:
                    queue.remove(req)
            if req.row is not None:
                self._kv.release(req)
            self._forget(req)
        elif req in self._prefilling:
            self._kv.share(req)
            if progress.token_id is not None:
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
            if self._news:
                self._news = deque([one for one in self._news if one.req is not req])
            dropped.popleft()

    def _take_aborted(self) -> None:
        aborted = self._inbox.aborted
        while aborted:
            if aborted[0].finish_reason is None:
                self._commit([aborted[0].aborted()])
            aborted.popleft()

    def _admit(self) -> None:
        index = 0
        while index < min(len(self._waiting), _LOOKAHEAD) and self._kv.has_row:
            req = self._suspect = self._waiting[index]
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

    def _next_chunk(self) -> list[Part]:
        """The prompt tokens of the next pass."""
        parts: list[Part] = []
        budget = self._chunk
        for req in self._prefilling:
            if budget == 0:
                break
            wants_all = req.params.return_prompt_logprob and not req.output_ids
            count = min(budget, req.seq_len - req.kv_len)
            count = min(count, _PROMPT_LOGPROB_CHUNK) if wants_all else count
            tokens = req.token_ids[req.kv_len : req.kv_len + count]
            assert req.row is not None
            parts.append((req, ExtendInput(tokens, req.kv_len, req.row, wants_all)))
            budget -= count
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
