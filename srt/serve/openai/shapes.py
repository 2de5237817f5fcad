"""Parts of OpenAI's answers that several of them have."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from srt.sampling.logprobs import TokenLogprob
from srt.serve.errors import ApiError
from srt.serve.generation.answers import AnswerEnd
from srt.serve.generation.token_texts import TokenTexts
from srt.serve.http_io import encode_json

DONE = b"data: [DONE]\n\n"
# JSON has no minus infinity; OpenAI writes this for what is next to impossible.
_LEAST_LOGPROB = -9999.0
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


def new_id(prefix: str) -> str:
    """A name for an answer."""
    return f"{prefix}-{secrets.token_hex(16)}"


def error_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's shape of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.status, kind),
            "param": error.param,
            "code": error.code,
        }
    }


def error_event(error: ApiError) -> bytes:
    """An error after the beginning of a stream, and the stream's end."""
    return event(error_body(error)) + DONE


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


class ChunkWriter:
    """Writes the chunks of a stream, which begin alike: that is encoded once.

    Args:
        head: What all of them have.
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = head
        self._prefix = b"data: " + encode_json(head)[:-1] + b',"choices":['

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        """A chunk with one choice."""
        return self._prefix + encode_json(choice) + b"]}\n\n"

    def usage(self, usage: "UsageCount") -> bytes:
        """The chunk that says what all took."""
        return event({**self._head, "choices": [], "usage": usage.body()})


class UsageCount:
    """Adds up what the answers of a call take; the prompts of several answers count once.

    Args:
        n: Answers to each prompt.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt = self._cached = self._completion = self._reasoning = 0

    def add(self, index: int, end: AnswerEnd, *, generated: bool = True) -> None:
        """Takes an answer's end.

        Args:
            index: Which of all answers; those to one prompt lie together.
            end: Its end.
            generated: Whether its tokens are returned.
        """
        usage = end.usage
        if index % self._n == 0:
            self._prompt += usage.prompt_tokens
            self._cached += usage.cached_tokens
        if generated:
            self._completion += usage.completion_tokens
            self._reasoning += usage.reasoning_tokens

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts, top: int) -> dict[str, Any]:
    """Log-probabilities as in chat completions and responses."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": finite(logprob),
            "bytes": list(texts.content(token_id)),
        }

    content = [
        entry(one.token_id, one.logprob)
        | {"top_logprobs": [entry(token, value) for token, value in one.top[:top]]}
        for one in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs_body(
    entries: Sequence[TokenLogprob | None], texts: TokenTexts, top: int
) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt, as vLLM gives them."""
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        values = [(entry.token_id, entry.logprob), *entry.top[:top]]
        result.append(
            {
                str(token): {
                    "logprob": finite(value),
                    "rank": ranks.get(token),
                    "decoded_token": texts.text(token),
                }
                for token, value in values
            }
        )
    return result


def finite(logprob: float) -> float:
    """A log-probability that JSON has."""
    return max(logprob, _LEAST_LOGPROB)
