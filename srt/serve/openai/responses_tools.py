"""Tools of the Responses API as functions, which is what chat templates know."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from srt.serve.errors import ApiError
from srt.serve.openai.responses_schema import ToolItem
from srt.serve.parsers.tool_calls import Tool

_TEXT_ARGUMENT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class ToolIdentity:
    """What the client calls a tool.

    Attributes:
        name: Its name.
        namespace: Its namespace's, or None.
        is_custom: Its argument is a text.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


class OfferedTools:
    """The tools of a request, as functions.

    Args:
        items: As the request has them.

    Attributes:
        tools: The functions. One of a namespace has that in its name; one that takes a text has it
            as its one argument, `input`.

    Raises:
        ApiError: 400: one is run by a server, or has no name.
    """

    def __init__(self, items: Sequence[ToolItem]) -> None:
        self.tools: list[Tool] = []
        self._identities: dict[str, ToolIdentity] = {}
        for index, item in enumerate(items):
            self._add(item, f"tools[{index}]", None)

    def identity(self, name: str) -> ToolIdentity:
        """What the client calls a function."""
        return self._identities.get(name) or ToolIdentity(name)

    def _add(self, item: ToolItem, where: str, namespace: str | None) -> None:
        kinds = ["function", "custom"] + ([] if namespace is not None else ["namespace"])
        if item.type not in kinds:
            raise ApiError(
                400,
                f"{where}.type: expected {', '.join(kinds)}: a tool that the client runs, found "
                f"{item.type!r}",
                param=f"{where}.type",
                code="unsupported_value",
            )
        if item.name is None:
            raise ApiError(400, f"{where}.name: this field is required", param=f"{where}.name")
        if item.type == "namespace":
            for index, inner in enumerate(item.tools or ()):
                self._add(inner, f"{where}.tools[{index}]", item.name)
            return
        is_custom = item.type == "custom"
        name = qualified(namespace, item.name)
        self._identities[name] = ToolIdentity(item.name, namespace, is_custom)
        parameters = _TEXT_ARGUMENT if is_custom else item.parameters or {}
        description = _with_format(item) if is_custom else item.description
        self.tools.append(Tool(name, parameters, description))


def qualified(namespace: str | None, name: str) -> str:
    """The name that the model sees."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def text_argument(arguments: str) -> str:
    """The text that a call of a custom tool takes; all of it where it is written otherwise."""
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _with_format(item: ToolItem) -> str | None:
    """The description, with the grammar that the text is to follow: the model is told of it."""
    definition = (item.format or {}).get("definition")
    if not isinstance(definition, str):
        return item.description
    return f"{item.description or ''}\n\nThe input follows this grammar:\n{definition}".strip()
