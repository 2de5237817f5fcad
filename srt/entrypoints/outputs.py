"""What a generation returns."""

from dataclasses import asdict, dataclass
from typing import Any

from srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class GenerateOutput:
    """One finished generation.

    Attributes:
        text: The generated text, without stop texts and special tokens; empty if the checkpoint has
            no tokenizer.
        token_ids: All generated tokens, the one that ended the generation included.
        finish_reason: `stop` or `length`.
        matched_stop: The token id or stop text that ended it; None for `length`.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens generated.
        prefill_seconds: From the start of its prefill to its first token.
        decode_seconds: From its first token to its last.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: int | str | None
    prompt_tokens: int
    completion_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @classmethod
    def from_req(cls, req: Req) -> "GenerateOutput":
        """The result of a request that has ended."""
        assert req.finish_reason is not None
        return cls(
            text="" if req.detokenizer is None else req.detokenizer.text,
            token_ids=tuple(req.output_ids),
            finish_reason=req.finish_reason.value,
            matched_stop=req.matched_stop,
            prompt_tokens=len(req.prompt_ids),
            completion_tokens=len(req.output_ids),
            prefill_seconds=req.first_token_at - req.started_at,
            decode_seconds=req.finished_at - req.first_token_at,
        )

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens a second until the first token."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens a second after the first; None if there was only one."""
        if self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.decode_seconds

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all attributes and both rates."""
        return asdict(self) | {
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


@dataclass(frozen=True)
class GenerateChunk:
    """What one new token of a streamed generation brings.

    Attributes:
        index: Which of the call's requests it belongs to.
        token_id: The token.
        text: Text that follows what was sent before; empty while a character or a possible stop
            text is incomplete.
        output: The whole result, with a request's last chunk.
    """

    index: int
    token_id: int
    text: str
    output: GenerateOutput | None
