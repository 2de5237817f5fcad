"""Bodies of requests: what they are, and how long."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srt.serve.errors import ApiError
from srt.serve.middleware.refusals import refusal, refuse

# Bodies that are held at once, in longest ones.
_MAX_HELD = 8
# How much of a body that is too long is read and dropped, and for how long, so that its sender gets
# to reading the answer: a connection that is closed before would tell it nothing.
_DROPPED_BYTES = 64 << 20
_DROPPED_SECONDS = 5.0
# When nothing has come for so long, nothing will: of who waits to be told to continue, for one.
_IDLE_SECONDS = 1.0


class BodyCheck:
    """Refuses bodies that are too long, counted as they come, and those that are no JSON: what a
    page of another site may send unasked is never called that.

    Args:
        app: What requests reach otherwise. It answers an ApiError that reading the body raises.
        max_bytes: The longest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length, kind = 0, b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                length = int(value)  # the parser has seen to it that this is a number
            elif name == b"content-type":
                kind = value.partition(b";")[0].strip().lower()
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and kind != b"application/json":
            found = kind[:100].decode("latin-1") or "none"
            error = ApiError(415, f"Content-Type: expected application/json, found {found}")
            await refuse(scope, send, error)
            return
        if length > self._max:
            await self._refuse(scope, receive, send)
            return
        held, is_cut_short = 0, False

        async def receive_counted() -> Message:
            nonlocal held, is_cut_short
            message = await receive()
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                held += size
                self._held += size
                if held > self._max:
                    is_cut_short = True
                    raise self._error()
                if size and self._held > _MAX_HELD * self._max:
                    is_cut_short = True
                    raise ApiError(
                        503,
                        "too many long requests are being read; try again later",
                        code="overloaded",
                        headers={"Retry-After": "1", "Connection": "close"},
                    )
            return message

        async def send_last(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            if is_cut_short and is_body and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _drop(receive)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await self._app(scope, receive_counted, send_last)
        finally:
            self._held -= held

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"the body: expected at most {self._max} bytes, found more",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error()
        headers, body = refusal(scope, error)
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    """Reads on when the answer is out, before its end closes the connection."""
    left, deadline = _DROPPED_BYTES, time.monotonic() + _DROPPED_SECONDS
    while left > 0 and (seconds := deadline - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(receive(), min(seconds, _IDLE_SECONDS))
        except asyncio.TimeoutError:
            return
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))
