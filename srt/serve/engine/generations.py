"""One request in the engine, as the server sees it."""

from abc import abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass

from srt.sampling.logprobs import TokenLogprob


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation ended.

    Attributes:
        finish_reason: `stop`, `length` or `abort`.
        matched_stop: The token or text that ended it, or None.
        error: Why it failed, or None.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those of them whose keys and values were in the cache.
        completion_tokens: Tokens generated.
        queue_seconds: From its arrival in the engine to the start of its prefill.
        prefill_seconds: From there to its first token.
        decode_seconds: From its first token to its last.
        prompt_logprobs: If asked for; the first is None.
    """

    finish_reason: str
    matched_stop: int | str | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True)
class GenerationPiece:
    """What one or several tokens bring; several where the reader was slower than the engine.

    Attributes:
        text: Text that follows what came before; may be empty.
        token_ids: The tokens, none with the end of a request that was aborted.
        logprobs: Of each of them, if asked for; else empty.
        end: With the last piece.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    end: GenerationEnd | None


class Generation(AsyncIterator[GenerationPiece]):
    """The pieces of one generation; the last has its end. Raises :class:`srt.serve.errors.ApiError`
    (503) where the engine's process has died.
    """

    @abstractmethod
    async def __anext__(self) -> GenerationPiece:
        """The next piece, all that has come since the one before."""

    @abstractmethod
    def abort(self) -> None:
        """Ends it before the next pass. May be called at any time, also after its end."""
