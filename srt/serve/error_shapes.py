"""A refusal as the client of its path expects it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from srt.serve.anthropic import shapes as anthropic
from srt.serve.errors import ApiError
from srt.serve.openai import shapes as openai


def error_body(path: str, error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The body of a refusal: Anthropic's shape for its paths, OpenAI's for all others.

    Args:
        path: The request's path.
        error: The refusal.
        request_id: The request's name, which Anthropic's shape has.
    """
    if anthropic.is_anthropic_path(path):
        return anthropic.error_body(error, request_id)
    return openai.error_body(error)


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """The answer to a request that is refused."""
    body = error_body(request.url.path, error, anthropic.request_id(request))
    return JSONResponse(body, error.status, error.headers)
