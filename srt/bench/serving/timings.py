"""What the bytes of an answer say: when tokens came, how many they were, whether it is sound."""

import json
from dataclasses import dataclass, field
from typing import Any

from srt.bench.serving.dataset import BenchRequest
from srt.bench.serving.http_client import RawAnswer


@dataclass(frozen=True)
class Timing:
    """One request, as it went; times in seconds by one clock.

    Attributes:
        started: When it was sent.
        ended: When its answer had come, or had failed.
        arrivals: When each piece of text came, in order.
        prompt_tokens: As the server counts.
        output_tokens: Likewise.
        failure: None, or the kind: `connect`, `disconnect`, `timeout`, `http 429` and the like,
            `error` (in mid-stream), `malformed`, `truncated` (no end), `no usage`, `empty` (no
            text), `length` (not as many tokens as asked for).
    """

    started: float
    ended: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.arrivals[0] - self.started

    @property
    def e2e(self) -> float:
        """Seconds to the last text."""
        return self.arrivals[-1] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between a piece of text and the next; a piece may be several tokens."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass
class _Events:
    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    has_ended: bool = False
    failure: str | None = None

    def take(self, when: float, event: bytes) -> None:
        data = b"\n".join(
            line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if data in (b"", b"[DONE]"):
            self.has_ended = self.has_ended or data == b"[DONE]"
            return
        body = json.loads(data)
        if "error" in body:
            self.failure = "error"
            return
        self.usage = body.get("usage") or self.usage
        if any(_has_text(choice) for choice in body.get("choices") or ()):
            self.arrivals.append(when)


def read_answer(raw: RawAnswer, request: BenchRequest) -> Timing:
    """Reads a streamed answer of OpenAI's completions or chat completions."""

    def fail(kind: str) -> Timing:
        return Timing(raw.started, raw.ended, failure=kind)

    if raw.status not in (0, 200):
        return fail(f"http {raw.status}")
    events = _Events()
    try:
        for when, event in raw.events:
            events.take(when, event)
    except (ValueError, AttributeError, TypeError):
        return fail("malformed")
    if events.failure or raw.problem:
        return fail(events.failure or raw.problem or "")
    if not events.has_ended:
        return fail("truncated")
    if events.usage is None:
        return fail("no usage")
    if not events.arrivals:
        return fail("empty")
    count = int(events.usage.get("completion_tokens", 0))
    if count < 1 or (request.exact and count != request.output_len):
        return fail("length")
    return Timing(
        raw.started,
        raw.ended,
        tuple(events.arrivals),
        int(events.usage.get("prompt_tokens", 0)),
        count,
    )


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(
        delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")
    )
