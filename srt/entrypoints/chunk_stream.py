"""Who gets what a pass over all requests brings: streams read their own requests' chunks, in any
order and interleaved, and every reader's turn drives all of them.
"""

import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

from srt.entrypoints.outputs import GenerateChunk
from srt.errors import EngineStateError, SrtError
from srt.managers.schedule_batch import Req, ReqUpdate
from srt.managers.scheduler import Scheduler
from srt.utils.exclusive import Exclusive


class ChunkRouter:
    """Runs passes of a scheduler and hands out their chunks.

    Args:
        scheduler: Runs the requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler: Scheduler | None = scheduler
        self._pid = os.getpid()
        self._unclaimed: deque[ReqUpdate] = deque()

    @property
    def scheduler(self) -> Scheduler:
        """Runs the requests.

        Raises:
            EngineStateError: The engine is shut down, or of the process that this one was forked
                from.
        """
        if self._scheduler is None:
            raise EngineStateError("the engine is shut down")
        if os.getpid() != self._pid:
            # Its threads are the parent's: a pass would wait for them for ever.
            raise EngineStateError(
                "the engine was loaded before the fork that made this process; load one after it"
            )
        return self._scheduler

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or there are chunks for :meth:`take_unclaimed`."""
        return self.scheduler.has_work or bool(self._unclaimed)

    def pump(self) -> None:
        """At most one forward pass."""
        self.scheduler.run_pass(self._deliver)

    def take_unclaimed(self) -> list[GenerateChunk]:
        """Chunks of requests without a stream, once."""
        chunks = []
        last = None
        for update in list(self._unclaimed):
            # What comes twice in a row is one whose delivery was interrupted.
            if update is not last:
                chunks.append(GenerateChunk.from_update(update, 0))
            last = update
        self._unclaimed.clear()
        return chunks

    def drop(self, reqs: Sequence[Req]) -> None:
        """Ends requests that nobody reads any more."""
        if self._scheduler is not None:
            self._scheduler.drop(reqs)

    def shut_down(self) -> None:
        """Lets go of the scheduler. A pass that runs in another thread ends first."""
        self._scheduler = None

    def _deliver(self, update: ReqUpdate) -> None:
        if update.req.reader is None:
            self._unclaimed.append(update)
            return
        stream = update.req.reader()
        # Whoever dropped the stream does not want the rest of it.
        if stream is not None:
            stream.put(update)


class ChunkStream(Iterator[GenerateChunk]):
    """The chunks of some requests. Those that are not read to their ends are aborted by
    :meth:`close`, or when the stream is dropped. Ctrl-C while it is read is taken after a pass;
    then the stream can be read on.

    Args:
        router: Whose passes it drives.
        reqs: The requests, which are queued here.
        raise_errors: Raise the error of a request that fails, and end the others; else its last
            chunk carries the error, and the others go on.

    Raises:
        RequestError: A request cannot be served; none is queued then.
    """

    def __init__(self, router: ChunkRouter, reqs: Sequence[Req], *, raise_errors: bool) -> None:
        self._router = router
        self._raise_errors = raise_errors
        self._exclusive = Exclusive("the stream")
        self._unread: deque[ReqUpdate] = deque()
        self._last_read: ReqUpdate | None = None
        self._is_closed = False
        self._index = {req: i for i, req in enumerate(reqs)}
        self._open = set(reqs)  # whose last chunk has not been read
        reader = weakref.ref(self)
        for req in reqs:
            req.reader = reader
        router.scheduler.add(reqs)

    def put(self, update: ReqUpdate) -> None:
        """Takes an update of one of its requests."""
        self._unread.append(update)

    def __next__(self) -> GenerateChunk:
        """The next chunk.

        Raises:
            EngineStateError: The engine is shut down, or another thread is reading the stream or
                driving the engine.
            SrtError: A request failed (`raise_errors`).
        """
        chunk = self._exclusive.run(self._next)
        if self._raise_errors and chunk.output is not None and chunk.output.error is not None:
            self.close()
            raise SrtError(chunk.output.error)
        return chunk

    def _next(self) -> GenerateChunk:
        while self._open and not self._is_closed:
            if not self._unread:
                self._router.pump()
                continue
            _ = self._router.scheduler  # not after the engine is shut down
            update = self._unread[0]
            # What comes twice is one whose delivery was interrupted.
            chunk = None
            if update is not self._last_read:
                chunk = GenerateChunk.from_update(update, self._index[update.req])
            self._last_read = update
            if update.is_last:
                self._open.discard(update.req)
            self._unread.popleft()
            if chunk is not None:
                return chunk
        raise StopIteration

    def close(self) -> None:
        """Ends what still runs: at once, or after the pass that another thread is in."""
        self._is_closed = True
        self._router.drop(list(self._open))

    def __del__(self) -> None:
        # Without requests the constructor has failed or everything has ended.
        if self.__dict__.get("_open") and not self._is_closed:
            self.close()
