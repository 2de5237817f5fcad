"""`/v1/messages` and `/v1/messages/count_tokens`."""

import secrets
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from srt.sampling.sampling_params import SamplingParams
from srt.serve.anthropic.conversation import (
    check_refused,
    make_messages,
    make_options,
    make_structure,
    make_tool_choice,
)
from srt.serve.anthropic.message_writer import MessageWriter
from srt.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from srt.serve.anthropic.shapes import error_body, request_id
from srt.serve.errors import ApiError
from srt.serve.generation.answer_stream import merge_answers
from srt.serve.generation.answers import AnswerEvent
from srt.serve.generation.heartbeat import with_heartbeats
from srt.serve.generation.service import ChatCall, GenerationService
from srt.serve.http_io import EventStream, encode_json, named_event, read_body, unless_gone
from srt.serve.openai.fields import SamplingFields, check_model
from srt.serve.state import ServerState

_PING = {"type": "ping"}


def make_router(state: ServerState, service: GenerationService) -> APIRouter:
    """The routes of Anthropic's API."""
    router = APIRouter()

    @router.post("/v1/messages")
    async def messages(request: Request) -> Response:
        """Answers a conversation."""
        body = await read_body(request, MessagesRequest)
        check_model(body.model, state.model_names)
        check_refused(body)
        choice = make_tool_choice(body)
        call = ChatCall(
            messages=make_messages(body),
            params=_sampling_params(body),
            max_tokens=body.max_tokens,
            options=make_options(body, choice),
            choice=choice,
        )
        started = await service.chat(call)
        thinking = body.thinking
        writer = MessageWriter(
            f"msg_{secrets.token_hex(12)}",
            state.model_name,
            len(started.input_ids),
            shows_thinking=thinking is None or thinking.display != "omitted",
        )
        events = merge_answers(started.answers)
        name = request_id(request)
        if body.stream:
            return EventStream(
                _stream(events, writer),
                lambda error: named_event(error_body(error, name)),
                started.answers,
            )
        for _, one in await unless_gone(request, events):
            writer.write(one)
        return Response(encode_json(writer.message), media_type="application/json")

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of a conversation has."""
        body = await read_body(request, CountTokensRequest)
        check_model(body.model, state.model_names)
        check_refused(body)
        options = make_options(body, make_tool_choice(body))
        ids = await service.chat_token_ids(make_messages(body), options)
        return Response(encode_json({"input_tokens": len(ids)}), media_type="application/json")

    return router


def _sampling_params(body: MessagesRequest) -> SamplingParams:
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
    )
    try:
        return fields.sampling_params(None, make_structure(body))
    except ApiError as error:
        if error.param == "stop":
            error.param = "stop_sequences"
        raise


async def _stream(
    events: AsyncIterator[tuple[int, AnswerEvent]], writer: MessageWriter
) -> AsyncIterator[bytes]:
    beats = with_heartbeats(events)
    try:
        for one in writer.begin():
            yield named_event(one)
        async for given in beats:
            for one in [_PING] if given is None else writer.write(given[1]):
                yield named_event(one)
    finally:
        await beats.aclose()  # type: ignore[attr-defined]
