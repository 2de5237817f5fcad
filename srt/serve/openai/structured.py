"""Fields that say what an answer's text follows: OpenAI's, vLLM's and SGLang's."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from srt.serve.errors import ApiError
from srt.serve.openai.fields import RequestModel

_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
)
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class JsonSchemaFormat(BaseModel):
    """OpenAI's `response_format.json_schema`. `strict` makes no difference: an answer always
    follows the schema.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(RequestModel):
    """What an answer's text follows; at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    def structure(self) -> dict[str, Any]:
        """Sampling parameters: `json_schema`, `regex` or `grammar`, or none.

        Raises:
            ApiError: 400: there are two, or one is incomplete.
        """
        given = [name for name in _FIELDS if getattr(self, name) is not None]
        found = {name: source for name in given if (source := self._source(name))}
        if len(found) > 1:
            names = " and ".join(found)
            raise ApiError(400, f"expected one of {names}, found all", param=[*found][1])
        return next(iter(found.values()), {})

    def _source(self, name: str) -> dict[str, Any]:
        value = getattr(self, name)
        if name == "response_format":
            return response_format(value.type, value.json_schema)
        if name == "structured_outputs":
            return self._structured_outputs(value)
        if name == "guided_choice":
            return {"regex": _alternatives(value)}
        kind = name.removeprefix("guided_")
        return {{"json": "json_schema", "ebnf": "grammar"}.get(kind, kind): value}

    def _structured_outputs(self, value: StructuredOutputs) -> dict[str, Any]:
        found: list[Mapping[str, Any]] = []
        if value.json_ is not None:
            found.append({"json_schema": value.json_})
        if value.regex is not None:
            found.append({"regex": value.regex})
        if value.choice is not None:
            found.append({"regex": _alternatives(value.choice)})
        if value.grammar is not None:
            found.append({"grammar": value.grammar})
        if value.json_object:
            found.append({"json_schema": {"type": "object"}})
        if len(found) != 1:
            raise ApiError(
                400,
                "structured_outputs: expected one of json, regex, choice, grammar and json_object, "
                f"found {len(found)}",
                param="structured_outputs",
            )
        return dict(found[0])


def response_format(kind: str, json_schema: JsonSchemaFormat | None) -> dict[str, Any]:
    """Sampling parameters of a `response_format`.

    Raises:
        ApiError: 400: `json_schema` without one.
    """
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if json_schema is None or json_schema.schema_ is None:
        raise ApiError(
            400,
            "response_format.json_schema.schema: this field is required with type json_schema",
            param="response_format.json_schema.schema",
        )
    return {"json_schema": json.dumps(json_schema.schema_)}


def _alternatives(texts: list[str]) -> str:
    """A regular expression for one of some texts."""
    return "|".join(_META.sub(r"\\\g<0>", text) for text in texts)
