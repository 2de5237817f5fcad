"""The application: which handler answers which path."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from srt.serve.engine.client import EngineState
from srt.serve.errors import ApiError
from srt.serve.state import ServerState
from srt.version import __version__


def make_app(state: ServerState) -> FastAPI:
    """An application over `state`."""
    app = FastAPI(title="srt", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        body = {"message": error.message, "param": error.param, "code": error.code}
        return JSONResponse({"error": body}, error.status, error.headers)

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

    return app
