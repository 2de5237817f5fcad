"""What a connection may take: bytes of a request's head, time to send it, time not to read.

uvicorn's protocol reads what httptools gives it, which bounds neither the number of headers nor
their lengths nor the time that they take; this one does. Every phase of a connection has a time
limit: the head of a request, progress of its body, a reader that does not read, the pause before
the next request (uvicorn's own), and what is left to write when it is closed.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from srt.serve.error_shapes import error_body
from srt.serve.errors import ApiError

MAX_URL = 8 << 10
MAX_HEADERS = 100
MAX_HEAD = 64 << 10
# A body must bring so much within each limit, or its end.
_MIN_PROGRESS = 64 << 10
# What waits in this process to be written to one connection, before its writer waits.
_WRITE_BUFFER = 64 << 10
# What is read and dropped after a refusal, and for how long: the system tells a client that still
# sends to a closed connection to forget what it was answered.
_LINGER_BYTES = 16 << 20
_LINGER_SECONDS = 2.0
# So many connections beyond the most may be open to be told that they are too many.
_MAX_BEYOND = 64


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of each connection.

    Attributes:
        max_connections: Most connections at a time.
        receive_timeout: Seconds for the head of a request, and for each 64 KiB of its body.
        send_timeout: Seconds that a client may read nothing of what waits for it.
        on_refused: Called with the status of what is refused here, and never reaches the
            application.
    """

    max_connections: int
    receive_timeout: float
    send_timeout: float
    on_refused: Callable[[int], None]


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        limits: Its limits.
        arguments: uvicorn's.
    """

    def __init__(self, *, limits: ConnectionLimits, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._limits = limits
        self.url = b""  # uvicorn sets it with the first request
        self._refusal: ApiError | None = None
        self._linger_left: int | None = None  # bytes to drop, once the connection is refused
        self._in_body = False
        self._has_begun = self._has_asked = False
        self._head_bytes = 0
        self._num_headers = 0
        self._unparsed = 0
        self._progress = 0
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(ApiError(503, "too many connections", headers={"Retry-After": "1"}))
            return
        self._start_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receiving()
        _cancel(self._send_timer)
        self._send_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._linger_left is not None:
            self._linger_left -= len(data)
            if self._linger_left < 0:
                self.transport.close()
            return
        self._has_begun = False
        if self._in_body:
            self._progress += len(data)
        elif self._receive_timer is None:
            self._start_receiving()  # also for bytes that begin no request
        super().data_received(data)
        if not self._in_body and self._receive_timer is not None:
            # Of a header that has not ended, the parser says nothing. What the head begins with may
            # have come with the end of another body.
            self._unparsed += 0 if self._has_begun else len(data)
            if self._unparsed > MAX_HEAD:
                self._refuse(_too_large(f"at most {MAX_HEAD} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._num_headers = self._unparsed = 0
        self._in_body, self._has_begun, self._has_asked = False, True, True
        if self._receive_timer is None:
            self._start_receiving()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL:
            self._raise(ApiError(414, f"the URL: expected at most {MAX_URL} bytes, found more"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_headers += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._num_headers > MAX_HEADERS:
            self._raise(_too_large(f"at most {MAX_HEADERS}"))
        if self._head_bytes > MAX_HEAD:
            self._raise(_too_large(f"at most {MAX_HEAD} bytes"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._raise(ApiError(505, f"HTTP/{version}: expected HTTP/1.1"))
        if not self.url.startswith((b"/", b"http://", b"https://")):
            self._raise(ApiError(400, "the URL: expected a path"))
        super().on_headers_complete()
        self._in_body, self._progress = True, 0
        self._start_receiving()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_receiving()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_closing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_closing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            _cancel(self._send_timer)
            self._send_timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or ApiError(400, "this is no request of HTTP/1.1"))

    def _raise(self, error: ApiError) -> None:
        """Ends the parser, which then calls `send_400_response`."""
        self._refusal = error
        raise error

    def _start_receiving(self) -> None:
        _cancel(self._receive_timer)
        self._receive_timer = self.loop.call_later(self._limits.receive_timeout, self._on_slow)

    def _stop_receiving(self) -> None:
        _cancel(self._receive_timer)
        self._receive_timer = None

    def _on_slow(self) -> None:
        self._receive_timer = None
        if self.transport.is_closing():
            return
        # Where this process does not read, that nothing comes is not the client's fault.
        if self._in_body and (self._progress >= _MIN_PROGRESS or self.flow.read_paused):
            self._progress = 0
            self._start_receiving()
            return
        if not self._has_asked:
            self.transport.close()  # nobody has asked anything
            self._limit_closing()
            return
        seconds = self._limits.receive_timeout
        what = "the body" if self._in_body else "the head of a request"
        self._refuse(ApiError(408, f"{what}: expected within {seconds:g} seconds"))

    def _limit_closing(self) -> None:
        """Ends the connection if what is written is not read for too long."""
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._limits.send_timeout, self.transport.abort)

    def _refuse(self, error: ApiError) -> None:
        """Answers, unless an answer has begun, and ends the connection."""
        self._stop_receiving()
        if self.transport.is_closing() or self._linger_left is not None:
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        # While another request of this connection is worked on, an answer would be taken for its.
        if not is_answering or (self._in_body and not self.cycle.response_started):
            self._limits.on_refused(error.status)
            path = self.url.partition(b"?")[0].decode("latin-1")
            body = json.dumps(error_body(path, error)).encode()
            lines = [
                STATUS_LINE[error.status].rstrip(b"\r\n"),
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"connection: close",
                *(f"{name.lower()}: {value}".encode() for name, value in error.headers.items()),
            ]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
            self._linger()
        else:
            self.transport.close()
        self._limit_closing()

    def _linger(self) -> None:
        """Closes the connection when the client has done so, or has had the time to."""
        if self.cycle is not None and not self.cycle.response_complete:
            # Who works on the request must not answer it, too.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if len(self.connections) > self._limits.max_connections + _MAX_BEYOND:
            self.transport.close()
            return
        self._linger_left = _LINGER_BYTES
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._receive_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _too_large(expected: str) -> ApiError:
    return ApiError(431, f"the headers: expected {expected}, found more")


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
