"""What is known of a request while it is served, for its line in the log and the metrics."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from srt.serve.engine.generations import GenerationEnd


@dataclass
class RequestRecord:
    """One request.

    Attributes:
        id: Its name, the client's or ours.
        method: GET, POST and the like.
        path: Without its query.
        client: Where it comes from.
        started: When it came, by `time.perf_counter`.
        status: Of the answer; None before it has begun.
        prompt_tokens: Of all its generations, likewise the next two.
        cached_tokens: See above.
        completion_tokens: See above.
        queue_seconds: The longest that one of them waited.
        first_token: Seconds until the first token of any.
        finish_reasons: How they ended.
        error: A word for what went wrong after the answer had begun.
    """

    id: str
    method: str
    path: str
    client: str
    started: float = field(default_factory=time.perf_counter)
    status: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None

    def take(self, end: GenerationEnd) -> None:
        """Adds how a generation of it ended."""
        self.prompt_tokens += end.prompt_tokens
        self.cached_tokens += end.cached_tokens
        self.completion_tokens += end.completion_tokens
        self.queue_seconds = max(self.queue_seconds, end.queue_seconds)
        self.finish_reasons.append(end.finish_reason)


CURRENT_RECORD: ContextVar[RequestRecord] = ContextVar("srt_request")
"""The request that a handler, or what it calls, works on."""
