"""The server's side of the engine's process: starts it, hands it requests, and starts another one
when it dies.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from srt.configs.engine_config import EngineConfig
from srt.sampling.logprobs import TokenLogprob
from srt.sampling.sampling_params import SamplingParams
from srt.serve.engine.child import Child
from srt.serve.engine.generations import Generation, GenerationEnd, GenerationPiece
from srt.serve.engine.protocol import EngineFacts, EngineStats, add_message, decode_chunk
from srt.serve.errors import ApiError, shutting_down
from srt.serve.metrics import GenerationObserver, ServerMetrics

logger = logging.getLogger(__name__)

# Seconds before a dead engine is started again: the first, then twice as long each time, up to the
# last. One that has lived for the last is taken to be healthy.
_FIRST_BACKOFF = 1.0
_LAST_BACKOFF = 60.0
# What clients are told to wait when the queue is full.
_RETRY_AFTER_QUEUE = "1"


class EngineState(str, Enum):
    """What the engine's process is doing."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    CLOSED = "closed"


class EngineClient:
    """An engine in a process of its own. Everything is called from one event loop.

    Args:
        config: The engine's options.
        max_queued_requests: Most requests that wait to begin; further ones are refused.
        request_timeout: Seconds after which a request is ended, or None.
        metrics: Told of each request; None for nobody.

    Attributes:
        state: What its process is doing.
        problem: Why there is none, if that is known.
        facts: What the engine says of itself; None before its first start.
        stats: What it last told of its load.
        restarts: How often another process was started.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_queued_requests: int,
        request_timeout: float | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self._config = config
        self._metrics = ServerMetrics() if metrics is None else metrics
        self._max_queued = max_queued_requests
        self._timeout = request_timeout
        self._child: Child | None = None
        self._open: dict[str, _EngineGeneration] = {}
        self._num_begun = 0
        self._numbers = itertools.count()
        self._supervisor: asyncio.Task[None] | None = None
        self._aborted: list[str] = []
        self.state = EngineState.STARTING
        self.problem: str | None = None
        self.facts: EngineFacts | None = None
        self.stats = EngineStats()
        self.restarts = 0

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def num_queued(self) -> int:
        """Requests that have not begun."""
        return len(self._open) - self._num_begun

    async def start(self) -> EngineFacts:
        """Starts the process and waits until the model is loaded.

        Raises:
            SrtError: It cannot be loaded; the message is the engine's.
        """
        child = Child(self._config, self._on_message)
        self._child = child
        try:
            self.facts = await child.start()
        except BaseException:
            await self.close()
            raise
        self.state = EngineState.READY
        self._supervisor = asyncio.create_task(self._supervise(child))
        return self.facts

    async def close(self) -> None:
        """Ends the process; requests that are open end with an error."""
        self.state = EngineState.CLOSED
        if self._supervisor is not None:
            self._supervisor.cancel()
        self._fail_all(shutting_down())
        if self._child is not None:
            await self._child.end()

    def submit(self, input_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Queues a request; see :meth:`submit_all`."""
        return self.submit_all([(input_ids, params)])[0]

    def submit_all(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[Generation]:
        """Queues requests, all or none.

        Args:
            requests: Token ids and sampling parameters of each, checked by a RequestBuilder.

        Raises:
            ApiError: 400 for one that can never fit into the KV cache, 429 if too many wait, 503
                if there is no engine now.
        """
        self.check_room(len(requests))
        child, facts = self._ready_child(), self.facts
        assert facts is not None
        for ids, params in requests:
            room = facts.context_length - len(ids)
            needed = len(ids) + max(0, min(params.max_new_tokens, room) - 1)
            if needed > facts.kv_tokens:
                raise ApiError(
                    400,
                    f"the request needs {needed} tokens of the KV cache ({len(ids)} of the prompt "
                    f"and up to {params.max_new_tokens} new ones), which holds {facts.kv_tokens}",
                    code="context_length_exceeded",
                )
        generations: list[Generation] = []
        for ids, params in requests:
            rid = str(next(self._numbers))
            generation = _EngineGeneration(
                rid, self._abort, self._timeout, self._metrics.observe_generation()
            )
            self._open[rid] = generation
            child.send(add_message(rid, params), np.asarray(ids, dtype=np.int32))
            generations.append(generation)
        return generations

    def check_available(self) -> None:
        """Whether requests can be submitted.

        Raises:
            ApiError: 503, with when to try again.
        """
        self._ready_child()

    def check_room(self, count: int) -> None:
        """Whether so many requests more can be submitted, as far as their number says.

        Raises:
            ApiError: 429 if too many would wait, 503 if there is no engine now.
        """
        self._ready_child()
        assert self.facts is not None
        free = max(0, self.facts.max_running_requests - self._num_begun)
        if self.num_queued + count > self._max_queued + free:
            raise ApiError(
                429,
                f"{self.num_queued} requests wait already and at most {self._max_queued} may; "
                "try again later",
                code="queue_full",
                headers={"Retry-After": _RETRY_AFTER_QUEUE},
            )

    def _ready_child(self) -> Child:
        if self.state is EngineState.READY and self._child is not None:
            return self._child
        if self.state is EngineState.CLOSED:
            raise shutting_down()
        reason = "" if self.problem is None else f" ({self.problem})"
        raise ApiError(
            503,
            f"the engine is {self.state.value}{reason}",
            code="engine_not_ready",
            headers={"Retry-After": "5"},
        )

    def _abort(self, rid: str) -> None:
        if rid not in self._open or self.state is not EngineState.READY:
            return
        if not self._aborted:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborted.append(rid)

    def _send_aborts(self) -> None:
        rids, self._aborted = self._aborted, []
        if self._child is not None and self.state is EngineState.READY:
            self._child.send({"op": "abort", "rids": rids})

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["op"] == "refused":
            self._forget(message["rid"]).fail(ApiError(400, message["error"]))
            return
        for rid in message.get("admitted", ()):
            generation = self._open.get(rid)
            if generation is not None and not generation.has_begun:
                generation.has_begun = True
                self._num_begun += 1
        for line in message["chunks"]:
            rid, piece = decode_chunk(line)
            if piece.end is None:
                self._open[rid].put(piece)
            else:
                self._forget(rid).put(piece)
        stats = message.get("stats")
        if stats is not None:
            self.stats = EngineStats.from_message(stats)

    def _forget(self, rid: str) -> "_EngineGeneration":
        generation = self._open.pop(rid)
        self._num_begun -= generation.has_begun
        return generation

    def _fail_all(self, error: ApiError) -> None:
        for rid in list(self._open):
            self._forget(rid).fail(error)

    async def _supervise(self, child: Child) -> None:
        """Waits for the end of each process and starts the next."""
        backoff = _FIRST_BACKOFF
        while True:
            started = time.monotonic()
            how = await child.ended()
            self.state = EngineState.RESTARTING
            self.problem = f"its process ended {how}"
            self.stats = EngineStats()
            logger.error("the engine's process ended %s; another one is started", how)
            self._fail_all(
                ApiError(
                    503,
                    f"the engine's process ended {how} while it worked on the request",
                    code="engine_died",
                    headers={"Retry-After": "5"},
                )
            )
            if time.monotonic() - started >= _LAST_BACKOFF:
                backoff = _FIRST_BACKOFF
            while True:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LAST_BACKOFF)
                child = self._child = Child(self._config, self._on_message)
                try:
                    self.facts = await child.start()
                    break
                except Exception as error:  # noqa: BLE001 - whatever it is, it may be over next time
                    self.problem = str(error) or type(error).__name__
                    logger.error("the engine cannot be started again: %s", self.problem)
            self.restarts += 1
            self.problem = None
            self.state = EngineState.READY
            logger.warning("the engine is ready again")


class _EngineGeneration(Generation):
    """A request in the engine's process. What is not read is merged, so that it takes no more than
    its own text and tokens.
    """

    def __init__(
        self,
        rid: str,
        abort: Callable[[str], None],
        timeout: float | None,
        observer: GenerationObserver,
    ) -> None:
        self._rid = rid
        self._observer = observer
        self._on_abort = abort
        self._unread: deque[GenerationPiece] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: ApiError | None = None
        self._has_ended = False
        self._is_done = False
        self.has_begun = False
        self._timer = None
        if timeout is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout, self._on_timeout, timeout)

    def abort(self) -> None:
        if not self._has_ended:
            self._on_abort(self._rid)

    def put(self, piece: GenerationPiece) -> None:
        """Takes what came."""
        self._unread.append(piece)
        if piece.token_ids:
            self._observer.on_tokens()
        if piece.end is not None:
            self._observer.on_end(piece.end)
            self._end()
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends it; what came before can still be read."""
        if self._error is None:
            self._error = error
            self._observer.on_error(error.code)
        self._end()
        self._wake()

    def _on_timeout(self, seconds: float) -> None:
        self.abort()
        self._error = ApiError(
            408, f"the request took more than {seconds:g} seconds", code="request_timeout"
        )
        self._wake()

    def _end(self) -> None:
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __anext__(self) -> GenerationPiece:
        while not self._unread:
            if self._is_done:
                raise StopAsyncIteration
            if self._error is not None:
                self._is_done = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = self._unread.popleft() if len(self._unread) == 1 else _merge(self._unread)
        self._unread.clear()
        if piece.end is not None:
            # A request that was too slow has an end, which is that of its abort.
            if self._error is not None:
                self._is_done = True
                raise self._error
            self._is_done = True
        return piece


def _merge(pieces: Sequence[GenerationPiece]) -> GenerationPiece:
    end: GenerationEnd | None = pieces[-1].end
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for piece in pieces:
        token_ids += piece.token_ids
        logprobs += piece.logprobs
    text = "".join(piece.text for piece in pieces)
    return GenerationPiece(text, tuple(token_ids), tuple(logprobs), end)
