"""Bodies of requests and responses: JSON in, JSON or server-sent events out."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srt.serve.errors import ApiError
from srt.serve.records import CURRENT_RECORD
from srt.values import describe

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")
# What pydantic adds to the place of an error in a union: the member that it tried.
_SCALARS = ("str", "int", "float", "bool")
_MEMBER = ("list[", "dict[", "function-", "constrained-", "json-or")


class Abortable(Protocol):
    """What can be ended when nobody waits for it any more."""

    def abort(self) -> None:
        """Ends it."""


async def read_body(request: Request, model: type[ModelT]) -> ModelT:
    """The body of a request as JSON, checked.

    Raises:
        ApiError: 400, which names the field.
    """
    content = await request.body()
    try:
        return model.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise _explain(error) from error


def _explain(error: ValidationError) -> ApiError:
    """The first problem, in a line, as of OpenAI's."""
    problems = error.errors(include_url=False, include_context=False)
    # Each member of a union has a problem of its own: the deepest is of the one that was meant.
    problem = max(problems, key=lambda one: len(one["loc"]))
    path = _path(problem["loc"])
    message, kind = problem["msg"], problem["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message}", code="invalid_json")
    if kind == "extra_forbidden":
        return ApiError(
            400, f"unknown field {path}: nothing here obeys it", param=path, code="unknown_field"
        )
    if kind == "missing":
        return ApiError(400, f"{path}: this field is required", param=path, code="missing_field")
    message = message[0].lower() + message[1:]
    found = describe(problem["input"])
    where = f"{path}: " if path else "the body: "
    return ApiError(
        400, f"{where}{message}, found {found}", param=path or None, code="invalid_value"
    )


def _path(location: Sequence[int | str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part[:1].isupper() or part in _SCALARS or part.startswith(_MEMBER):
            continue
        else:
            path += f".{part}" if path else part
    return path


def encode_json(value: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which an answer may quote from a request, is
    replaced.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def named_event(value: dict[str, Any]) -> bytes:
    """A server-sent event that is named as its type."""
    name: str = value["type"]
    return f"event: {name}\ndata: ".encode() + encode_json(value) + b"\n\n"


class EventStream(Response):
    """Server-sent events. The work behind them ends as soon as the client goes.

    Args:
        events: Lines to send, each with its `data:`; errors become the last event.
        on_error: Makes that event of an ApiError.
        work: What is behind them. It is aborted at the end, also where the events were never read,
            which runs no `finally` of theirs.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_error: Callable[[ApiError], bytes],
        work: Sequence[Abortable],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_error = on_error
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            for one in self._work:
                one.abort()
            if not sending.done():
                sending.cancel()
            await asyncio.wait([sending])
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            await self._fail(send, error)
        except Exception as error:
            record = CURRENT_RECORD.get(None)
            logger.exception("request %s: its stream failed", record.id if record else "unknown")
            failure = ApiError(500, f"internal error: {type(error).__name__}")
            await self._fail(send, failure)
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, send: Send, error: ApiError) -> None:
        record = CURRENT_RECORD.get(None)
        if record is not None and record.error is None:
            record.error = error.code or "error"
        await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})


async def unless_gone(request: Request, work: AsyncIterator[T]) -> list[T]:
    """All that an iterator gives. It is closed as soon as the client goes.

    Raises:
        ApiError: 499, which nobody reads, where the client has gone.
    """

    async def collect() -> list[T]:
        return [item async for item in work]

    collecting = asyncio.ensure_future(collect())
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((collecting, gone), return_when=asyncio.FIRST_COMPLETED)
        if collecting.done():
            return collecting.result()
        raise ApiError(499, "the client has gone", code="client_disconnected")
    finally:
        gone.cancel()
        if not collecting.done():
            collecting.cancel()
            await asyncio.wait([collecting])
        await work.aclose()  # type: ignore[attr-defined]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
