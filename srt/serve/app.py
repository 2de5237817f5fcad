"""The application: which handler answers which path."""

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from srt.serve import metrics, page_routes
from srt.serve.anthropic import messages
from srt.serve.engine.client import EngineState
from srt.serve.error_shapes import error_response
from srt.serve.errors import ApiError
from srt.serve.generation.service import GenerationService
from srt.serve.generation.token_texts import TokenTexts
from srt.serve.openai import chat, completions, models, responses, tokens
from srt.serve.openapi import describe_api
from srt.serve.state import ServerState
from srt.version import __version__

logger = logging.getLogger(__name__)


def make_app(state: ServerState) -> FastAPI:
    """An application over `state`."""
    app = FastAPI(
        title="srt",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    tokenizer = state.files.tokenizer
    texts = None if tokenizer is None else TokenTexts(tokenizer)
    service = GenerationService(state)
    app.include_router(chat.make_router(state, service, texts))
    app.include_router(completions.make_router(state, service, texts))
    app.include_router(responses.make_router(state, service, texts))
    app.include_router(messages.make_router(state, service))
    app.include_router(metrics.make_router(state.metrics))
    app.include_router(models.make_router(state))
    app.include_router(tokens.make_router(state, service, texts))
    app.include_router(page_routes.make_router())

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        return error_response(request, error)

    @app.exception_handler(HTTPException)
    async def explain(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        refusal = ApiError(error.status_code, message, headers=error.headers)
        return error_response(request, refusal)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return error_response(request, ApiError(500, f"internal error: {type(error).__name__}"))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server's process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests are taken: the model is loaded, and the server is not about to end."""
        engine = state.engine
        status = "draining" if state.is_draining else engine.state.value
        is_ready = not state.is_draining and engine.state is EngineState.READY
        return JSONResponse({"status": status, "problem": engine.problem}, 200 if is_ready else 503)

    @app.get("/version")
    async def version() -> dict[str, str | int | None]:
        """What is served, and by what."""
        facts = state.engine.facts
        assert facts is not None
        return {
            "version": __version__,
            "model": state.model_name,
            "architecture": facts.architecture,
            "dtype": facts.dtype,
            "kv_cache_dtype": facts.kv_cache_dtype,
            "tier": facts.tier,
            "threads": facts.threads,
            "kv_tokens": facts.kv_tokens,
            "context_length": facts.context_length,
        }

    describe_api(app)
    return app
