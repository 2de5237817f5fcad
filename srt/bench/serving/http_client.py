"""A lean HTTP client: it shares the processor with the server that it times.

An event of a stream costs it a search for the empty line behind it; what the events say is read
when the answer has ended.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

_MAX_BODY = 64 * 1024 * 1024


@dataclass
class RawAnswer:
    """What came for one request.

    Attributes:
        started: When it was sent, by the clock.
        status: Of HTTP; 0 until it has come.
        events: Of a stream: when each came, and its text.
        body: What belongs to no event yet; the whole body where it is no stream.
        ended: When the last byte had come.
        problem: Why it did not come whole: `connect`, `disconnect` or `timeout`.
    """

    started: float
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""
    ended: float = 0.0
    problem: str | None = None


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time. httptools calls the methods `on_...`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: RawAnswer | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            self._end("disconnect")

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end("disconnect")

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        answer.status = self._parser.get_status_code()
        data = answer.body + body if answer.body else body
        if answer.status == 200 and b"\n\n" in data:
            *events, data = data.split(b"\n\n")
            now = self._now
            answer.events += [(now, event) for event in events]
        answer.body = data
        if len(data) > _MAX_BODY:
            self.close()
            self._end("disconnect")

    def on_message_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()
        self.is_open = self.is_open and self._parser.should_keep_alive()
        # The parser is in the middle of its work; the next answer gets a new one.
        self._end(None)

    def _end(self, problem: str | None) -> None:
        if self._answer is None or self._done is None or self._done.done():
            return
        self._answer.problem = problem
        self._answer.ended = self._clock()
        self._done.set_result(None)

    async def exchange(self, request: bytes, answer: RawAnswer) -> None:
        """Sends a request; returns when its answer has ended, however."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._done = answer, asyncio.get_running_loop().create_future()
        answer.started = self._clock()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._answer = None

    def close(self) -> None:
        """Ends it."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Requests to one server, over connections that are kept.

    Args:
        url: `http://host:port`, or https, with the path in front of the API's own, if any.
        headers: Of each request.
        timeout: Seconds for an answer.
        clock: What times are told by.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        parts = urlsplit(url)
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._is_tls else 80)
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc, "Accept": "*/*"} | dict(headers)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout = timeout
        self._clock = clock
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes) -> RawAnswer:
        """Posts JSON."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._send(head.encode("latin-1") + body)

    async def get(self, path: str) -> RawAnswer:
        """Gets something."""
        return await self._send(
            f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode("latin-1")
        )

    async def _send(self, request: bytes) -> RawAnswer:
        answer = RawAnswer(self._clock())
        connection: _Connection | None = None
        try:
            connection = await asyncio.wait_for(self._connect(), self._timeout)
            await asyncio.wait_for(connection.exchange(request, answer), self._timeout)
        except asyncio.TimeoutError:
            answer.problem, answer.ended = "timeout", self._clock()
        except OSError:
            answer.problem, answer.ended = "connect", self._clock()
        if connection is not None:
            if answer.problem is None and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()
        return answer

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        _, protocol = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._clock),
            self._host,
            self._port,
            ssl=ssl.create_default_context() if self._is_tls else None,
        )
        return protocol

    def close(self) -> None:
        """Ends its connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
