"""Who gets what a pass over all requests brings: streams read their own requests' chunks, in any
order and interleaved, and every reader's turn drives all of them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

from srt.entrypoints.outputs import GenerateChunk
from srt.errors import SrtError
from srt.managers.schedule_batch import Req, RequestId
from srt.managers.scheduler import Scheduler, TokenEvent


class ChunkRouter:
    """Runs passes of a scheduler and hands out their chunks.

    Args:
        scheduler: Runs the requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # Weak, so that a stream whose reader is gone ends.
        self._streams: WeakValueDictionary[RequestId, ChunkStream] = WeakValueDictionary()
        self._unclaimed: list[GenerateChunk] = []

    def register(self, stream: "ChunkStream", rids: Sequence[RequestId]) -> None:
        """Sends the chunks of these requests to `stream` until they end."""
        self._streams.update(dict.fromkeys(rids, stream))

    def unregister(self, rids: Sequence[RequestId]) -> None:
        """Ends requests and what their stream gets."""
        for rid in rids:
            self._streams.pop(rid, None)
        self.scheduler.drop(rids)

    def pump(self) -> None:
        """At most one forward pass."""
        for event in self.scheduler.step():
            stream = self._streams.get(event.req.rid)
            if stream is None:
                self._unclaimed.append(GenerateChunk.from_event(event, 0))
                continue
            stream.put(event)
            if event.req.finish_reason is not None:
                del self._streams[event.req.rid]

    def take_unclaimed(self) -> list[GenerateChunk]:
        """Chunks of requests without a stream, once."""
        chunks, self._unclaimed = self._unclaimed, []
        return chunks


class ChunkStream(Iterator[GenerateChunk]):
    """The chunks of some requests. Those that are not read to their ends are aborted by
    :meth:`close`, or when the stream is dropped.

    Args:
        router: Whose passes it drives.
        reqs: The requests, which are queued here.

    Raises:
        RequestError: A request cannot be served; none is queued then.
    """

    def __init__(self, router: ChunkRouter, reqs: Sequence[Req]) -> None:
        self._router = router
        self._index: dict[RequestId, int] = {}
        self._chunks: deque[GenerateChunk] = deque()
        router.scheduler.add(reqs)
        self._index = {req.rid: i for i, req in enumerate(reqs)}
        router.register(self, list(self._index))

    def put(self, event: TokenEvent) -> None:
        """Takes what a pass brought."""
        self._chunks.append(GenerateChunk.from_event(event, self._index[event.req.rid]))
        if event.req.finish_reason is not None:
            del self._index[event.req.rid]

    def __next__(self) -> GenerateChunk:
        while not self._chunks:
            if not self._index:
                raise StopIteration
            self._router.pump()
        chunk = self._chunks.popleft()
        if chunk.output is not None and chunk.output.error is not None:
            self.close()
            raise SrtError(chunk.output.error)
        return chunk

    def close(self) -> None:
        """Aborts what still runs."""
        rids = list(self._index)
        self._index.clear()
        self._chunks.clear()
        self._router.unregister(rids)

    def __del__(self) -> None:
        # Without an index the constructor has failed or everything has ended.
        if self.__dict__.get("_index"):
            self.close()
