"""Names each request, and says at its end what became of it."""

import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srt.serve.anthropic.shapes import is_anthropic_path
from srt.serve.logs import FIELDS
from srt.serve.metrics import ServerMetrics
from srt.serve.records import CURRENT_RECORD, RequestRecord

logger = logging.getLogger(__name__)

_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
# What a monitor asks all the time.
_QUIET = frozenset({"/health", "/ready", "/metrics"})
# Of a request and of an answer, with --log-requests.
_MAX_LOGGED = 64 << 10
_SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]
_OUTCOMES = {401: "unauthorized", 408: "timeout", 429: "overloaded", 499: "disconnected"}


class AccessLog:
    """One line in the log and one count for each request.

    Args:
        app: What they reach.
        metrics: Where they are counted.
        model: The name of the model, for the log.
        log_requests: Whether the log has what requests and answers say.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, model: str, *, log_requests: bool
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._model = model
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        record = _record(scope)
        scope.setdefault("state", {})["request_id"] = record.id
        names = [(b"x-request-id", record.id.encode())]
        if is_anthropic_path(record.path):
            names.append((b"request-id", record.id.encode()))
        own_headers = names + _SAFE_HEADERS
        is_complete = has_gone = False
        content = _Content() if self._log_requests else None

        async def receive_noted() -> Message:
            nonlocal has_gone
            message = await receive()
            if message["type"] == "http.disconnect":
                has_gone = has_gone or not is_complete
            elif content is not None:
                content.add_request(message.get("body", b""))
            return message

        async def send_noted(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                record.status = None if has_gone else message["status"]
                headers = list(message.get("headers", ()))
                given = {name.lower() for name, _ in headers}
                headers += [header for header in own_headers if header[0] not in given]
                message = {**message, "headers": headers}
            else:
                if content is not None:
                    content.add_answer(message.get("body", b""))
                is_complete = not message.get("more_body", False) and not has_gone
            await send(message)

        token = CURRENT_RECORD.set(record)
        has_failed = False
        try:
            await self._app(scope, receive_noted, send_noted)
        except ClientDisconnect:
            has_gone = True
        except Exception as error:
            # The handler of last resort has answered; what it was is for us.
            logger.exception("request %s failed", record.id)
            has_failed = True
            if record.status is None:
                raise RuntimeError("no answer") from error
        finally:
            CURRENT_RECORD.reset(token)
            outcome = "error" if has_failed else _outcome(record, is_complete, has_gone)
            self._end(record, outcome, content)

    def _end(self, record: RequestRecord, outcome: str, content: "_Content | None") -> None:
        self._metrics.count(record, outcome)
        is_quiet = record.path in _QUIET and outcome == "ok"
        level = logging.DEBUG if is_quiet else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "id": record.id,
            "client": record.client,
            "outcome": outcome,
            "method": record.method,
            "path": record.path[:200],
            "status": record.status,
            "seconds": round(time.perf_counter() - record.started, 4),
        }
        first = record.first_token
        if record.finish_reasons or record.first_token is not None:
            fields |= {
                "model": self._model,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "queue_seconds": round(record.queue_seconds, 4),
                "ttft_seconds": first and round(first, 4),
                "finish_reason": sorted(set(record.finish_reasons)),
            }
        if record.error is not None:
            fields["error"] = record.error
        if content is not None:
            fields |= content.fields()
        logger.log(level, "request", extra={FIELDS: fields})


class _Content:
    """The beginning of what a request and its answer say."""

    def __init__(self) -> None:
        self._request, self._answer = bytearray(), bytearray()

    def add_request(self, body: bytes) -> None:
        self._request += body[: _MAX_LOGGED - len(self._request)]

    def add_answer(self, body: bytes) -> None:
        self._answer += body[: _MAX_LOGGED - len(self._answer)]

    def fields(self) -> dict[str, str]:
        return {
            "request": self._request.decode("utf-8", "replace"),
            "answer": self._answer.decode("utf-8", "replace"),
        }


def _record(scope: Scope) -> RequestRecord:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    # Another than it was told a client would not find.
    name = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
    client = scope.get("client")
    return RequestRecord(name, scope["method"], scope["path"], client[0] if client else "")


def _outcome(record: RequestRecord, is_complete: bool, has_gone: bool) -> str:
    status = record.status
    if status is None or (status < 400 and (has_gone or not is_complete)):
        return "disconnected"
    if record.error is not None and status < 400:
        return "error"
    if status < 400:
        return "ok"
    if status in _OUTCOMES:
        return _OUTCOMES[status]
    if status >= 500:
        return "unavailable" if status == 503 else "error"
    return "refused"
