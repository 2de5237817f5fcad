"""Anthropic's shapes of errors."""

from typing import Any

from starlette.requests import Request

from srt.serve.errors import ApiError

# Paths whose errors have Anthropic's shape.
PATHS = ("/v1/messages",)
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def is_anthropic_path(path: str) -> bool:
    """Whether requests to a path come from Anthropic's clients."""
    return any(path == one or path.startswith(one + "/") for one in PATHS)


def request_id(request: Request) -> str | None:
    """The name that the server has given to a request, or None."""
    found = getattr(request.state, "request_id", None)
    return found if isinstance(found, str) else None


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's shape of an error. It has no place for the field, which the message names."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    return {
        "type": "error",
        "error": {"type": _TYPES.get(error.status, kind), "message": error.message},
        "request_id": request_id,
    }
