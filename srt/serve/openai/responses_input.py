"""From a request of the Responses API to messages and options of a chat template."""

from collections.abc import Sequence
from typing import Any

from srt.managers.tokenizer import ChatOptions
from srt.serve.errors import ApiError
from srt.serve.generation.reminders import as_reminder
from srt.serve.openai.responses_schema import (
    AllowedTools,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    FunctionChoice,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    TextPart,
)
from srt.serve.openai.responses_tools import OfferedTools, qualified
from srt.serve.openai.tools import make_choice
from srt.serve.parsers.choice import ToolChoice
from srt.serve.parsers.tool_calls import Tool

_REFUSED = {
    "previous_response_id": "nothing is stored here: give the whole conversation as input",
    "conversation": "nothing is stored here: give the whole conversation as input",
    "prompt": "nothing is stored here: give the text itself as instructions and input",
    "background": "nothing is stored here: read the answer, or its stream, as it comes",
    "context_management": "a conversation is answered as it is, or refused if it is too long",
    "moderation": "nothing here moderates",
}


def check_refused(body: ResponsesRequest) -> None:
    """Refuses what would change the answer and does not exist here.

    Raises:
        ApiError: 400.
    """
    for name, reason in _REFUSED.items():
        if getattr(body, name):
            raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_value")
    if body.truncation == "auto":
        raise ApiError(
            400,
            "truncation: expected disabled, since nothing of a conversation is left out here, "
            "found 'auto'",
            param="truncation",
            code="unsupported_value",
        )


def make_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates know it: the reasoning, text and calls of an answer are
    one message. Instructions and the system's messages before any other are one message, too.

    Raises:
        ApiError: 400: an item is none of a conversation, or answers no call.
    """
    result: list[dict[str, Any]] = []
    if body.instructions:
        result.append({"role": "system", "content": [_text(body.instructions)]})
    if isinstance(body.input, str):
        return [*result, {"role": "user", "content": [_text(body.input)]}]
    turn = _Turn()
    names: dict[str, str] = {}
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if isinstance(item, (FunctionCallItem, CustomCallItem)):
            names[item.call_id] = qualified(item.namespace, item.name)
        if turn.take(item, where):
            continue
        result += turn.messages()
        turn = _Turn()
        if turn.take(item, where):
            continue
        message = _given(item, where, names)
        if message["role"] != "system" or not result:
            result.append(message)
        elif len(result) == 1 and result[0]["role"] == "system":
            result[0]["content"] += message["content"]
        else:
            result.append(as_reminder(message))
    return result + turn.messages()


def make_tool_choice(body: ResponsesRequest, offered: OfferedTools) -> ToolChoice:
    """Which tools an answer may call, and whether it must.

    Raises:
        ApiError: 400.
    """
    tools, choice = offered.tools, body.tool_choice
    required = choice == "required"
    if isinstance(choice, AllowedTools):
        names = {str(tool.get("name")) for tool in choice.tools}
        unknown = names - {tool.name for tool in tools}
        if unknown:
            raise ApiError(
                400,
                f"tool_choice.tools: expected functions of tools, found {sorted(unknown)[0]!r}",
                param="tool_choice.tools",
            )
        tools = [tool for tool in tools if tool.name in names]
        required = choice.mode == "required"
    return make_choice(
        tools,
        required=required,
        named=choice.name if isinstance(choice, FunctionChoice) else None,
        none=choice == "none",
        parallel=body.parallel_tool_calls is not False,
    )


def make_options(body: ResponsesRequest, choice: ToolChoice) -> ChatOptions:
    """How the template is rendered."""
    kwargs: dict[str, Any] = {}
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    tools = [_shown(tool) for tool in choice.tools.values()]
    return ChatOptions(kwargs | (body.chat_template_kwargs or {}), tools or None)


def make_structure(body: ResponsesRequest) -> dict[str, Any]:
    """What the text of the answer follows, as sampling parameters.

    Raises:
        ApiError: 400: a schema is missing.
    """
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form.schema_ is None:
        where = "text.format.schema"
        raise ApiError(400, f"{where}: this field is required with json_schema", param=where)
    return {"json_schema": form.schema_}


class _Turn:
    """Collects the items of one answer."""

    def __init__(self) -> None:
        self._texts: list[dict[str, str]] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._has_message = False

    def take(self, item: Item, where: str) -> bool:
        """Takes an item of the model's; false if it is another's or the next answer's."""
        if isinstance(item, ReasoningItem):
            parts = item.content or item.summary or []
            self._thoughts += [part.text for part in parts]
            return True
        if isinstance(item, (FunctionCallItem, CustomCallItem)):
            name = qualified(item.namespace, item.name)
            arguments: Any = (
                {"input": item.input} if isinstance(item, CustomCallItem) else (item.arguments)
            )
            function = {"name": name, "arguments": arguments}
            self._calls.append({"id": item.call_id, "type": "function", "function": function})
            return True
        if not isinstance(item, MessageItem) or item.role != "assistant":
            return False
        if self._has_message and not self._calls:
            return False
        self._texts += _parts(item.content, f"{where}.content")
        self._has_message = True
        return True

    def messages(self) -> list[dict[str, Any]]:
        """The message, if there is one: reasoning alone says nothing to a template."""
        if not self._has_message and not self._calls:
            return []
        result: dict[str, Any] = {"role": "assistant", "content": self._texts}
        if any(self._thoughts):
            result["reasoning_content"] = "\n".join(self._thoughts)
        if self._calls:
            result["tool_calls"] = self._calls
        return [result]


def _given(item: Item, where: str, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": _parts(item.content, f"{where}.content")}
    if isinstance(item, CallOutputItem):
        if item.call_id not in names:
            raise ApiError(
                400,
                f"{where}.call_id: expected that of an earlier call, found {item.call_id!r}",
                param=f"{where}.call_id",
            )
        return {
            "role": "tool",
            "tool_call_id": item.call_id,
            "name": names[item.call_id],
            "content": _parts(item.output, f"{where}.output"),
        }
    raise ApiError(
        400,
        f"{where}.type: expected message, function_call, function_call_output or reasoning, found "
        f"{item.type!r}: nothing is stored here, and no tool is run",
        param=f"{where}.type",
    )


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _parts(content: str | Sequence[Part], where: str) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [_text(content)]
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append(_text(part.text))
        elif isinstance(part, RefusalPart):
            texts.append(_text(part.refusal))
        else:
            raise ApiError(
                400,
                f"{where}[{index}]: this model is given text only; found {part.type}",
                param=f"{where}[{index}]",
            )
    return texts


def _shown(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = dict(tool.parameters)
    return {"type": "function", "function": function}
