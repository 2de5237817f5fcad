"""The OpenAPI document: what each path takes, which the handlers read by themselves, and its
errors.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from srt.serve.anthropic import schema as anthropic
from srt.serve.anthropic.shapes import is_anthropic_path
from srt.serve.openai import chat, completions, responses_schema, tokens

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": chat.ChatCompletionRequest,
    "/v1/completions": completions.CompletionRequest,
    "/v1/responses": responses_schema.ResponsesRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/v1/messages/count_tokens": anthropic.CountTokensRequest,
    "/tokenize": tokens.TokenizeRequest,
    "/detokenize": tokens.DetokenizeRequest,
}
_STREAMING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_REF = "#/components/schemas/"
_TEXT: dict[str, Any] = {"type": "string"}
_OPTIONAL: dict[str, Any] = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


_SCHEMAS: dict[str, Any] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_OPTIONAL, code=_OPTIONAL)),
    "AnthropicError": _object(
        type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_OPTIONAL
    ),
}


def describe_api(app: FastAPI) -> None:
    """Makes the document of `app`, whose routes are complete."""
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(_make_document(app))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _make_document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES.values()], ref_template=_REF + "{model}"
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    # What FastAPI would say of parameters that are wrong is said in the shape of all errors.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= definitions.get("$defs", {}) | _SCHEMAS
    for path, operations in document["paths"].items():
        error = "AnthropicError" if is_anthropic_path(path) else "Error"
        if path == "/ready":
            error = "Ready"
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            answers["default"] = {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": _REF + error}}},
            }
            if path == "/metrics":
                answers["200"]["content"] = {"text/plain": {"schema": _TEXT}}
            if path in _STREAMING:
                answers["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
            if path in _BODIES:
                schema = models[(_BODIES[path], "validation")]
                content = {"application/json": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
    schemas["Ready"] = _object(status=_TEXT, problem=_OPTIONAL)
    return document
