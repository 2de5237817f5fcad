"""Refusals: what a client is told, in the terms of no API yet."""

from collections.abc import Mapping


class ApiError(Exception):
    """A request that is refused or has failed.

    Args:
        status: The HTTP status.
        message: What was expected and what came, in one line.
        param: The field of the request that is concerned, as a path (`messages[1].content`).
        code: A word for programs, such as `context_length_exceeded`.
        headers: Further headers, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def shutting_down() -> ApiError:
    """What clients are told of a server that is about to end; another may take its place."""
    return ApiError(
        503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"}
    )
