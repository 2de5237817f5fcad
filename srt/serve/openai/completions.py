"""`/v1/completions`."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from srt.sampling.logprobs import TokenLogprob
from srt.serve.errors import ApiError
from srt.serve.generation.answer_stream import merge_answers, split_by_answer
from srt.serve.generation.answers import AnswerDelta, AnswerEnd, AnswerEvent
from srt.serve.generation.service import CompletionCall, GenerationService, PromptAnswers
from srt.serve.generation.token_texts import TokenTexts
from srt.serve.http_io import EventStream, encode_json, read_body, unless_gone
from srt.serve.openai.fields import MAX_TOP_LOGPROBS, SamplingFields, check_model
from srt.serve.openai.shapes import (
    DONE,
    ChunkWriter,
    UsageCount,
    error_event,
    finite,
    new_id,
    prompt_logprobs_body,
)
from srt.serve.openai.structured import StructuredFields
from srt.serve.state import ServerState

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_PROMPTS = 2048

TokenId = Annotated[int, Field(ge=0)]


class CompletionRequest(SamplingFields, StructuredFields):
    """Prompts, and how they are to go on."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=_MAX_PROMPTS),
        ]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Refuses what no answer here can have.

        Raises:
            ApiError: 400.
        """
        if self.suffix:
            raise ApiError(
                400,
                "suffix: expected none, since the model only goes on from a prompt and does not "
                "fill a gap",
                param="suffix",
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(
                400,
                f"best_of: expected the value of n ({self.n or 1}), found {self.best_of}: all "
                "answers are returned, none is chosen",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                400, "max_tokens: expected at least 1, or echo with 0, found 0", param="max_tokens"
            )

    def prompts(self) -> list[str | list[int]]:
        """Each prompt."""
        given: Any = self.prompt
        is_single = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_single else list(given)


@dataclass
class _Choice:
    """One choice of an answer, as it comes."""

    index: int
    echoed: str | None
    scores_only: bool
    offset: int = 0
    tokens: list[TokenLogprob] = field(default_factory=list)


class _Formatter:
    """Puts the events of a call into OpenAI's shape."""

    def __init__(
        self, body: CompletionRequest, state: ServerState, texts: TokenTexts | None
    ) -> None:
        self.top = body.logprobs
        self.prompt_top = body.prompt_logprobs
        self._texts = texts
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model_name,
            "system_fingerprint": state.fingerprint,
        }
        self._chunks = ChunkWriter(self._head)

    def logprobs(
        self, entries: Sequence[TokenLogprob | None], ids: Sequence[int], offset: int
    ) -> dict[str, Any] | None:
        """Of some tokens, the first of which begins `offset` characters into the text."""
        if self.top is None or self._texts is None:
            return None
        tokens, offsets = [], []
        for token in ids:
            tokens.append(self._texts.text(token))
            offsets.append(offset)
            offset += self.length(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def length(self, token: int) -> int:
        """Characters of a token; none of one that is complete with the next only."""
        if self._texts is None:
            return 0
        return len(self._texts.content(token).decode("utf-8", "ignore"))

    def _alternatives(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        if entry is None or self._texts is None or self.top is None:
            return None
        # OpenAI's has the token itself, too.
        values = [*entry.top[: self.top], (entry.token_id, entry.logprob)]
        return {self._texts.text(token): finite(value) for token, value in values}

    def chunk(self, choice: _Choice, text: str, **others: Any) -> bytes:
        """An event of a stream."""
        body = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
        return self._chunks.choice(body | others)

    def usage(self, usage: UsageCount) -> bytes:
        """The event of a stream that says what it took."""
        return self._chunks.usage(usage)

    def body(self, choices: list[dict[str, Any]], usage: UsageCount) -> dict[str, Any]:
        """The whole answer."""
        return self._head | {"choices": choices, "usage": usage.body()}

    def choice(
        self, choice: _Choice, ids: Sequence[int], events: list[AnswerEvent]
    ) -> dict[str, Any]:
        """One choice of it."""
        end = events[-1]
        assert isinstance(end, AnswerEnd)
        deltas = [one for one in events if isinstance(one, AnswerDelta)]
        text, tokens = "", list[int]()
        entries: list[TokenLogprob | None] = []
        if not choice.scores_only:
            text = "".join(one.content for one in deltas)
            generated = [entry for one in deltas for entry in one.logprobs]
            entries, tokens = [*generated], [entry.token_id for entry in generated]
        if choice.echoed is not None:
            text = choice.echoed + text
            entries = [*(end.prompt_logprobs or ()), *entries]
            tokens = [*ids, *tokens]
        body = {
            "index": choice.index,
            "text": text,
            "logprobs": self.logprobs(entries, tokens, 0),
            "finish_reason": "length" if choice.scores_only else end.finish_reason,
            "stop_reason": None if choice.scores_only else end.matched_stop,
        }
        if self.prompt_top is not None and self._texts is not None:
            body["prompt_logprobs"] = prompt_logprobs_body(
                end.prompt_logprobs or (), self._texts, self.prompt_top
            )
        return body


def make_router(
    state: ServerState, service: GenerationService, texts: TokenTexts | None
) -> APIRouter:
    """The route of completions."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Goes on from prompts."""
        body = await read_body(request, CompletionRequest)
        check_model(body.model, state.model_names)
        body.check()
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            body.prompt_logprobs = body.logprobs
            shows_prompt = False
        else:
            shows_prompt = body.prompt_logprobs is not None
        if body.stream and (shows_prompt or (body.echo and body.logprobs is not None)):
            raise ApiError(
                400,
                "stream: expected false, since log-probabilities of the prompt are asked for, "
                "which come whole",
                param="stream",
            )
        prompts, n = body.prompts(), body.n or 1
        limit = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling_params(body.logprobs, body.structure())
        # A prompt is scored by the pass that chooses the token after it, which is not returned.
        started = await service.complete(CompletionCall(prompts, params, max(1, limit), n))
        choices = [
            _Choice(
                index,
                _echo(state, prompts[index // n]) if body.echo else None,
                scores_only=limit == 0,
            )
            for index in range(len(prompts) * n)
        ]
        formatter = _Formatter(body, state, texts)
        if not shows_prompt:
            formatter.prompt_top = None
        answers = [answer for one in started for answer in one.answers]
        events = merge_answers(answers)
        if body.stream:
            options = body.stream_options
            include_usage = options is not None and bool(options.include_usage)
            stream = _stream(events, formatter, choices, n, include_usage)
            return EventStream(stream, error_event, answers)
        collected = await unless_gone(request, events)
        return _whole(collected, formatter, choices, started, n)

    return router


def _echo(state: ServerState, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = state.files.tokenizer
    return "" if tokenizer is None else str(tokenizer.decode(prompt))


def _whole(
    events: list[tuple[int, AnswerEvent]],
    formatter: _Formatter,
    choices: list[_Choice],
    started: list[PromptAnswers],
    n: int,
) -> Response:
    usage = UsageCount(n)
    bodies = []
    for choice, own in zip(choices, split_by_answer(events, len(choices)), strict=True):
        end = own[-1]
        assert isinstance(end, AnswerEnd)
        if end.error is not None:
            raise ApiError(500, end.error, code="generation_failed")
        usage.add(choice.index, end, generated=not choice.scores_only)
        bodies.append(formatter.choice(choice, started[choice.index // n].input_ids, own))
    return Response(encode_json(formatter.body(bodies, usage)), media_type="application/json")


async def _stream(
    events: AsyncIterator[tuple[int, AnswerEvent]],
    formatter: _Formatter,
    choices: list[_Choice],
    n: int,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    usage = UsageCount(n)
    try:
        for choice in choices:
            if choice.echoed:
                yield formatter.chunk(choice, choice.echoed)
                choice.offset = len(choice.echoed)
        async for index, one in events:
            choice = choices[index]
            if isinstance(one, AnswerEnd):
                if one.error is not None:
                    raise ApiError(500, one.error, code="generation_failed")
                usage.add(index, one, generated=not choice.scores_only)
                reason = "length" if choice.scores_only else one.finish_reason
                stop = None if choice.scores_only else one.matched_stop
                yield formatter.chunk(choice, "", finish_reason=reason, stop_reason=stop)
            elif not choice.scores_only and (one.content or one.logprobs):
                ids = [entry.token_id for entry in one.logprobs]
                logprobs = formatter.logprobs(one.logprobs, ids, choice.offset)
                # By tokens, as in a whole answer: their text may come later.
                choice.offset += sum(map(formatter.length, ids))
                yield formatter.chunk(choice, one.content, logprobs=logprobs)
        if include_usage:
            yield formatter.usage(usage)
        yield DONE
    finally:
        await events.aclose()  # type: ignore[attr-defined]
