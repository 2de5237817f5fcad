"""`/v1/chat/completions`."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from srt.managers.tokenizer import ChatOptions
from srt.serve.errors import ApiError
from srt.serve.generation.answer_stream import merge_answers, split_by_answer
from srt.serve.generation.answers import AnswerDelta, AnswerEnd, AnswerEvent, ToolCallDelta
from srt.serve.generation.service import ChatCall, GenerationService
from srt.serve.generation.token_texts import TokenTexts
from srt.serve.http_io import EventStream, encode_json, read_body, unless_gone
from srt.serve.openai.fields import MAX_TOP_LOGPROBS, SamplingFields, check_model
from srt.serve.openai.shapes import (
    DONE,
    ChunkWriter,
    UsageCount,
    chat_logprobs,
    error_event,
    new_id,
    prompt_logprobs_body,
)
from srt.serve.openai.structured import StructuredFields
from srt.serve.openai.tools import ToolFields
from srt.serve.state import ServerState


class ContentPart(BaseModel):
    """A part of a message's content; the model is given text only, which its check says."""

    model_config = ConfigDict(extra="allow")
    type: str


class ChatMessage(BaseModel):
    """A message. The chat template sees further fields, too."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[str | ContentPart] | None = None


class ChatCompletionRequest(SamplingFields, StructuredFields, ToolFields):
    """A conversation, and how its next message is wanted."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: list[Literal["text"]] | None = None

    def template_kwargs(self) -> dict[str, Any]:
        """Further variables of the chat template; templates know `reasoning_effort` and
        `enable_thinking`.
        """
        kwargs: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                kwargs["enable_thinking"] = False
        return kwargs | (self.chat_template_kwargs or {})

    def top(self) -> int | None:
        """How many alternatives each token of the answer has; None for no log-probabilities.

        Raises:
            ApiError: 400, for alternatives without log-probabilities.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400,
                f"top_logprobs: expected logprobs true with it, found {self.logprobs}",
                param="top_logprobs",
            )
        return (self.top_logprobs or 0) if self.logprobs else None


@dataclass
class _Formatter:
    """Puts the events of a call into OpenAI's shape."""

    model: str
    fingerprint: str
    texts: TokenTexts | None
    top: int | None
    prompt_top: int | None
    n: int

    def __post_init__(self) -> None:
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        self._chunks = ChunkWriter(self._head)

    def chunk(self, index: int, delta: dict[str, Any], **others: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | others
        return self._chunks.choice(choice)

    def delta(self, index: int, delta: AnswerDelta) -> bytes | None:
        body: dict[str, Any] = {}
        if delta.content:
            body["content"] = delta.content
        if delta.reasoning:
            body["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            body["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        logprobs = None
        if self.top is not None and delta.logprobs and self.texts is not None:
            logprobs = chat_logprobs(delta.logprobs, self.texts, self.top)
        if not body and logprobs is None:
            return None
        return self.chunk(index, body, logprobs=logprobs)

    def usage(self, usage: UsageCount) -> bytes:
        return self._chunks.usage(usage)

    def body(self, events: list[tuple[int, AnswerEvent]]) -> dict[str, Any]:
        usage = UsageCount(self.n)
        prompt_logprobs = None
        choices = []
        for index, own in enumerate(split_by_answer(events, self.n)):
            end = own[-1]
            assert isinstance(end, AnswerEnd)
            usage.add(index, end)
            choices.append(self._choice(index, own, end))
            if end.prompt_logprobs is not None and self.texts is not None and not index:
                top = self.prompt_top or 0
                prompt_logprobs = prompt_logprobs_body(end.prompt_logprobs, self.texts, top)
        head = self._head | {"object": "chat.completion"}
        body = head | {"choices": choices, "usage": usage.body()}
        return body if prompt_logprobs is None else body | {"prompt_logprobs": prompt_logprobs}

    def _choice(self, index: int, events: list[AnswerEvent], end: AnswerEnd) -> dict[str, Any]:
        deltas = [one for one in events if isinstance(one, AnswerDelta)]
        calls = join_calls([call for one in deltas for call in one.tool_calls])
        content = "".join(one.content for one in deltas)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        reasoning = "".join(one.reasoning for one in deltas)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self.top is not None and self.texts is not None:
            entries = [entry for one in deltas for entry in one.logprobs]
            logprobs = chat_logprobs(entries, self.texts, self.top)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason,
            "stop_reason": end.matched_stop,
        }


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name} | function
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def join_calls(deltas: list[ToolCallDelta]) -> list[dict[str, Any]]:
    """Whole tool calls of their deltas."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls[delta.index] = {"id": delta.id, "type": "function", "function": function}
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return list(calls.values())


def make_router(
    state: ServerState, service: GenerationService, texts: TokenTexts | None
) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        body = await read_body(request, ChatCompletionRequest)
        check_model(body.model, state.model_names)
        if body.stream and body.prompt_logprobs is not None:
            raise ApiError(
                400,
                "stream: expected false, since log-probabilities of the prompt are asked for, "
                "which come whole",
                param="stream",
            )
        n = body.n or 1
        choice = body.choice()
        continues = bool(body.continue_final_message)
        adds = body.add_generation_prompt
        call = ChatCall(
            messages=[message.model_dump(exclude_unset=True) for message in body.messages],
            params=body.sampling_params(body.top(), body.structure()),
            max_tokens=body.max_completion_tokens or body.max_tokens,
            n=n,
            options=ChatOptions(
                body.template_kwargs(),
                body.shown_tools(choice),
                add_generation_prompt=not continues if adds is None else adds,
                continue_final_message=continues,
            ),
            choice=choice,
            separate_reasoning=body.separate_reasoning is not False,
        )
        started = await service.chat(call)
        formatter = _Formatter(
            state.model_name, state.fingerprint, texts, body.top(), body.prompt_logprobs, n
        )
        events = merge_answers(started.answers)
        if body.stream:
            options = body.stream_options
            include_usage = options is not None and bool(options.include_usage)
            stream = _stream(events, formatter, include_usage)
            return EventStream(stream, error_event, started.answers)
        collected = await unless_gone(request, events)
        for _, one in collected:
            if isinstance(one, AnswerEnd) and one.error is not None:
                raise ApiError(500, one.error, code="generation_failed")
        return Response(encode_json(formatter.body(collected)), media_type="application/json")

    return router


async def _stream(
    events: AsyncIterator[tuple[int, AnswerEvent]], formatter: _Formatter, include_usage: bool
) -> AsyncIterator[bytes]:
    usage = UsageCount(formatter.n)
    try:
        for index in range(formatter.n):
            yield formatter.chunk(index, {"role": "assistant", "content": ""})
        async for index, one in events:
            if isinstance(one, AnswerDelta):
                chunk = formatter.delta(index, one)
                if chunk is not None:
                    yield chunk
                continue
            if one.error is not None:
                raise ApiError(500, one.error, code="generation_failed")
            usage.add(index, one)
            yield formatter.chunk(
                index, {}, finish_reason=one.finish_reason, stop_reason=one.matched_stop
            )
        if include_usage:
            yield formatter.usage(usage)
        yield DONE
    finally:
        await events.aclose()  # type: ignore[attr-defined]
