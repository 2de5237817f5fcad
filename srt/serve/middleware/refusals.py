"""Refusals before a request reaches an API, in the shape of the API that it is meant for."""

from starlette.types import Scope, Send

from srt.serve.error_shapes import error_body
from srt.serve.errors import ApiError
from srt.serve.http_io import encode_json


def refusal(scope: Scope, error: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error, as clients of the request's path expect it."""
    body = encode_json(error_body(scope["path"], error, scope.get("state", {}).get("request_id")))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    return headers, body


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answers a request with an error."""
    headers, body = refusal(scope, error)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
