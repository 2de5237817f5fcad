"""`/v1/responses`, the stateless part."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from srt.sampling.sampling_params import SamplingParams
from srt.serve.errors import ApiError
from srt.serve.generation.answer_stream import merge_answers
from srt.serve.generation.answers import AnswerEvent
from srt.serve.generation.heartbeat import with_heartbeats
from srt.serve.generation.service import ChatCall, GenerationService
from srt.serve.generation.token_texts import TokenTexts
from srt.serve.http_io import EventStream, encode_json, named_event, read_body, unless_gone
from srt.serve.openai.fields import SamplingFields, check_model
from srt.serve.openai.response_writer import ResponseWriter
from srt.serve.openai.responses_input import (
    check_refused,
    make_messages,
    make_options,
    make_structure,
    make_tool_choice,
)
from srt.serve.openai.responses_schema import ResponsesRequest, ToolItem
from srt.serve.openai.responses_tools import OfferedTools
from srt.serve.openai.shapes import chat_logprobs
from srt.serve.state import ServerState

_LOGPROBS = "message.output_text.logprobs"
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "ignore_eos",
)
# A comment: readers of server-sent events skip it.
_HEARTBEAT = b": waiting\n\n"


def make_router(
    state: ServerState, service: GenerationService, texts: TokenTexts | None
) -> APIRouter:
    """The route of responses."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def responses(request: Request) -> Response:
        """Answers a conversation."""
        body = await read_body(request, ResponsesRequest)
        check_model(body.model, state.model_names)
        check_refused(body)
        offered = OfferedTools(body.tools or ())
        choice = make_tool_choice(body, offered)
        params = _sampling_params(body)
        call = ChatCall(
            messages=make_messages(body),
            params=params,
            max_tokens=body.max_output_tokens,
            options=make_options(body, choice),
            choice=choice,
        )
        try:
            started = await service.chat(call)
        except ApiError as error:
            if error.param == "messages":
                error.param = "input"
            raise
        top = _top(body)

        def logprobs(entries: list[Any]) -> list[dict[str, Any]]:
            assert texts is not None and top is not None
            content: list[dict[str, Any]] = chat_logprobs(entries, texts, top)["content"]
            return content

        defaults = state.files.builder.sampling_params([params], 1)[0]
        writer = ResponseWriter(
            _echo(body, state.model_name, defaults), None if top is None else logprobs, offered
        )
        events = merge_answers(started.answers)
        if body.stream:
            return EventStream(
                _stream(events, writer),
                lambda error: named_event(writer.fail(error)),
                started.answers,
            )
        for _, one in await unless_gone(request, events):
            writer.write(one)
        return Response(encode_json(writer.response), media_type="application/json")

    return router


def _top(body: ResponsesRequest) -> int | None:
    """How many alternatives each token has; None for no log-probabilities."""
    if body.top_logprobs is None and _LOGPROBS not in (body.include or ()):
        return None
    return body.top_logprobs or 0


def _sampling_params(body: ResponsesRequest) -> SamplingParams:
    fields = SamplingFields(**{name: getattr(body, name) for name in _SAMPLING})
    return fields.sampling_params(_top(body), make_structure(body))


def _echo(body: ResponsesRequest, model: str, params: SamplingParams) -> dict[str, Any]:
    """What a response says of its request."""
    form: dict[str, Any] = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        if form["type"] == "json_schema":
            form = {"name": "response"} | form
    choice: Any = body.tool_choice or "auto"
    return {
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_echo_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _echo_tool(tool: ToolItem) -> dict[str, Any]:
    """Clients demand both fields of a function."""
    given = tool.model_dump(exclude_unset=True)
    return {"parameters": None, "strict": None} | given if tool.type == "function" else given


async def _stream(
    events: AsyncIterator[tuple[int, AnswerEvent]], writer: ResponseWriter
) -> AsyncIterator[bytes]:
    beats = with_heartbeats(events)
    try:
        for one in writer.begin():
            yield named_event(one)
        async for given in beats:
            if given is None:
                yield _HEARTBEAT
                continue
            for one in writer.write(given[1]):
                yield named_event(one)
    finally:
        await beats.aclose()  # type: ignore[attr-defined]
