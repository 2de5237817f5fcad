"""What a generation returns."""

from dataclasses import asdict, dataclass
from typing import Any

from srt.managers.schedule_batch import Req, RequestId, ReqUpdate
from srt.sampling.logprobs import TokenLogprob


@dataclass(frozen=True)
class GenerateOutput:
    """One finished generation.

    Attributes:
        text: The generated text, without stop texts and special tokens; empty if the checkpoint has
            no tokenizer.
        token_ids: All generated tokens, the one that ended the generation included.
        finish_reason: `stop`, `length` or `abort`.
        matched_stop: The token id or stop text that ended it; None for the others.
        error: Why it failed (`abort`), or None.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those of them whose keys and values an earlier request had left.
        completion_tokens: Tokens generated.
        prefill_seconds: From the start of its prefill to its first token.
        decode_seconds: From its first token to its last.
        logprobs: Of each generated token, if asked for; else None.
        prompt_logprobs: Of each prompt token, if asked for; else None. The first is None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: int | str | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_seconds: float
    decode_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @classmethod
    def from_req(cls, req: Req) -> "GenerateOutput":
        """The result of a request that has ended."""
        assert req.finish_reason is not None
        return cls(
            text="" if req.detokenizer is None else req.detokenizer.text,
            token_ids=tuple(req.output_ids),
            finish_reason=req.finish_reason.value,
            matched_stop=req.matched_stop,
            error=None if req.error is None else str(req.error),
            prompt_tokens=len(req.prompt_ids),
            cached_tokens=req.cached_tokens,
            completion_tokens=len(req.output_ids),
            prefill_seconds=max(0.0, req.first_token_at - req.started_at),
            decode_seconds=req.finished_at - req.first_token_at if req.output_ids else 0.0,
            logprobs=tuple(req.logprobs) if req.params.return_logprob else None,
            prompt_logprobs=(
                tuple(req.prompt_logprobs) if req.params.return_prompt_logprob else None
            ),
        )

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens a second until the first token, cached ones included; None if there was
        none.
        """
        return self.prompt_tokens / self.prefill_seconds if self.completion_tokens else None

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
        rid: The request's name; a number for those of :meth:`Engine.generate`.
        index: Which of the call's requests it belongs to.
        token_id: The token; None with the last chunk of a request that was aborted.
        text: Text that follows what was sent before; empty while a character or a possible stop
            text is incomplete.
        logprob: The token's log-probability, if asked for.
        output: The whole result, with a request's last chunk.
    """

    rid: RequestId
    index: int
    token_id: int | None
    text: str
    logprob: TokenLogprob | None
    output: GenerateOutput | None

    @classmethod
    def from_update(cls, update: ReqUpdate, index: int) -> "GenerateChunk":
        """What the caller that knows the request by `index` gets of an update."""
        req = update.req
        return cls(
            rid=req.rid,
            index=index,
            token_id=update.token_id,
            text=update.text,
            logprob=update.logprob,
            output=GenerateOutput.from_req(req) if update.is_last else None,
        )
