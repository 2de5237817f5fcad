"""`/tokenize` and `/detokenize`, as vLLM has them."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from srt.serve.errors import ApiError
from srt.serve.generation.service import GenerationService
from srt.serve.generation.token_texts import TokenTexts
from srt.serve.http_io import encode_json, read_body
from srt.serve.openai.chat import ChatMessage
from srt.serve.openai.fields import RequestModel, check_model
from srt.serve.state import ServerState


class TokenizeRequest(RequestModel):
    """A prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
    skip_special_tokens: bool | None = None


def make_router(
    state: ServerState, service: GenerationService, texts: TokenTexts | None
) -> APIRouter:
    """The routes between texts and tokens."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, as a completion would have them, or of a conversation."""
        body = await read_body(request, TokenizeRequest)
        check_model(body.model, state.model_names)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "expected one of prompt and messages", param="prompt")
        messages = None
        if body.messages is not None:
            messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        ids = await service.tokenize(body.prompt, messages)
        result: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": state.files.model_config.context_length,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs and texts is not None:
            result["token_strs"] = [texts.text(token) for token in ids]
        return Response(encode_json(result), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest)
        check_model(body.model, state.model_names)
        tokenizer, size = state.files.tokenizer, state.files.model_config.vocab_size
        if tokenizer is None:
            raise ApiError(400, "the model has no tokenizer")
        for index, token in enumerate(body.tokens):
            if token >= size:
                raise ApiError(
                    400,
                    f"tokens[{index}]: expected token ids from 0 to {size - 1}, found {token}",
                    param=f"tokens[{index}]",
                )
        skip = bool(body.skip_special_tokens)
        # In a thread: many tokens take a while.
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=skip)
        return Response(encode_json({"prompt": text}), media_type="application/json")

    return router
