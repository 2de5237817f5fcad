"""`/v1/models`."""

from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter

from srt.serve.openai.fields import check_model
from srt.serve.state import ServerState


def make_router(state: ServerState) -> APIRouter:
    """The routes of models."""
    router = APIRouter()

    def describe(name: str) -> dict[str, Any]:
        facts = state.engine.facts
        longest = None if facts is None else min(facts.context_length, facts.kv_tokens)
        return {
            "id": name,
            "object": "model",
            "created": state.started_at,
            "owned_by": "srt",
            "root": str(state.engine_config.model_path),
            "max_model_len": longest,
            # What Anthropic's clients read of the same answer.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(state.started_at, timezone.utc).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": longest,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The model, under each of its names."""
        names = state.model_names
        return {
            "object": "list",
            "data": [describe(name) for name in names],
            "first_id": names[0],
            "last_id": names[-1],
            "has_more": False,
        }

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        """The model."""
        check_model(name, state.model_names)
        return describe(name)

    return router
