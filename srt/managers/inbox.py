"""What is asked of the scheduler between its passes, from any thread, in the order of asking."""

from collections import deque
from collections.abc import Iterable, Sequence

from srt.errors import RequestError
from srt.managers.schedule_batch import Req, RequestId


class Inbox:
    """Requests that begin and requests that are to end.

    A name means one request from :meth:`add` until that one has ended (:meth:`forget`); whoever
    says the name meanwhile means that request, however late the scheduler hears of it. Nothing here
    waits for a lock, so that signal handlers and destructors may call it, too.

    Attributes:
        arrived: Requests that are new.
        aborted: Requests to end, which their readers shall hear of.
        dropped: Requests to end that nobody reads any more.
    """

    def __init__(self) -> None:
        self.arrived: deque[Req] = deque()
        self.aborted: deque[Req] = deque()
        self.dropped: deque[Req] = deque()
        self._names: dict[RequestId, Req] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._names)

    def add(self, reqs: Sequence[Req]) -> None:
        """Queues requests, all or none.

        Raises:
            RequestError: A request that has not ended has the name of one of them.
        """
        try:
            for req in reqs:
                if self._names.setdefault(req.rid, req) is not req:
                    raise RequestError(
                        f"{req.label}: there is a request of this name that has not ended"
                    )
            self.arrived.extend(reqs)
        except BaseException:
            # Ctrl-C may come after they were queued.
            self.dropped.extend(reqs)
            for req in reqs:
                self.forget(req)
            raise

    def abort(self, rids: Iterable[RequestId]) -> None:
        """Asks for the ends of requests by their names; others are ignored."""
        self.aborted.extend([req for rid in rids if (req := self._names.get(rid)) is not None])

    def forget(self, req: Req) -> None:
        """Frees the name of a request that has ended."""
        if self._names.get(req.rid) is req:
            self._names.pop(req.rid, None)
