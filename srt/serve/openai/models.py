"""`/v1/models`."""

from typing import Any

from fastapi import APIRouter

from srt.serve.openai.fields import check_model
from srt.serve.state import ServerState


def make_router(state: ServerState) -> APIRouter:
    """The routes of models."""
    router = APIRouter()

    def describe(name: str) -> dict[str, Any]:
        facts = state.engine.facts
        return {
            "id": name,
            "object": "model",
            "created": state.started_at,
            "owned_by": "srt",
            "root": str(state.engine_config.model_path),
            "max_model_len": None if facts is None else min(facts.context_length, facts.kv_tokens),
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The model, under each of its names."""
        return {"object": "list", "data": [describe(name) for name in state.model_names]}

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """The model."""
        check_model(name, state.model_names)
        return describe(name)

    return router
