"""From a request of Anthropic's API to messages and options of a chat template."""

from collections.abc import Sequence
from typing import Any

from srt.managers.tokenizer import ChatOptions
from srt.serve.anthropic.schema import (
    Block,
    CountTokensRequest,
    InputMessage,
    OtherBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from srt.serve.errors import ApiError
from srt.serve.generation.reminders import as_reminder
from srt.serve.openai.tools import make_choice
from srt.serve.parsers.choice import ToolChoice
from srt.serve.parsers.tool_calls import Tool

_BILLING = "x-anthropic-billing-header:"


def make_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The conversation as chat templates know it: results of tools are messages of their own.

    Neighbours of the same role are one message, as Anthropic has it, since templates want roles to
    alternate.

    Raises:
        ApiError: 400: a part is no text, is where it cannot be, or answers no call.
    """
    result: list[dict[str, Any]] = []
    system = _system(body.system)
    if system:
        result.append({"role": "system", "content": system})
    names: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        if message.role == "assistant":
            converted = [_assistant(message, where, names)]
        else:
            converted = _given(message, where, names)
        if message.role == "system" and any(one["role"] != "system" for one in result):
            converted = [as_reminder(one) for one in converted]
        for one in converted:
            if result and _may_join(result[-1], one):
                result[-1]["content"] += one["content"]
            else:
                result.append(one)
    last = len(body.messages) - 1
    if result[-1].get("tool_calls"):
        raise ApiError(
            400,
            f"messages[{last}]: expected a message with the results of its tool calls after it",
            param=f"messages[{last}]",
        )
    return result


def make_options(body: CountTokensRequest, choice: ToolChoice) -> ChatOptions:
    """How the template is rendered. Where the last message is the assistant's, the answer goes on
    with it.
    """
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    continues = body.messages[-1].role == "assistant"
    return ChatOptions(
        kwargs,
        [_shown(tool) for tool in choice.tools.values()] or None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def make_tool_choice(body: CountTokensRequest) -> ToolChoice:
    """Which tools an answer may call, and whether it must.

    Raises:
        ApiError: 400: a tool that the client does not run itself, or as of :func:`make_choice`.
    """
    tools = [_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    field = body.tool_choice
    kind = "auto" if field is None else field.type
    if kind == "tool" and (field is None or field.name is None):
        raise ApiError(
            400,
            "tool_choice.name: this field is required with type tool",
            param="tool_choice.name",
        )
    return make_choice(
        tools,
        required=kind == "any",
        named=field.name if field is not None and kind == "tool" else None,
        none=kind == "none",
        parallel=field is None or not field.disable_parallel_tool_use,
    )


def check_refused(body: CountTokensRequest) -> None:
    """Refuses what would change the answer and does not exist here.

    Raises:
        ApiError: 400.
    """
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise ApiError(
                400,
                f"{name}: expected none, since this server runs no tools and keeps nothing",
                param=name,
            )


def make_structure(body: CountTokensRequest) -> dict[str, Any]:
    """What the text of the answer follows, as sampling parameters.

    Raises:
        ApiError: 400: it is said twice.
    """
    of_config = body.output_config.format if body.output_config is not None else None
    if of_config is not None and body.output_format is not None:
        raise ApiError(
            400,
            "expected one of output_format and output_config.format, found both",
            param="output_format",
        )
    found = of_config or body.output_format
    return {} if found is None else {"json_schema": found.schema_}


def _system(given: str | Sequence[TextBlock] | None) -> list[dict[str, str]]:
    """Without the line that Claude Code begins with: it is for Anthropic's accounts, and being new
    in each request it would keep all that follows from being cached.
    """
    texts = _texts(given) if given else []
    return [part for part in texts if not part["text"].startswith(_BILLING)]


def _tool(index: int, tool: ToolDefinition) -> Tool:
    if tool.type not in (None, "custom"):
        raise ApiError(
            400,
            f"tools[{index}].type: expected custom, a tool that the client runs and describes, "
            f"found {tool.type!r}, a tool of Anthropic's",
            param=f"tools[{index}].type",
        )
    if tool.input_schema is None:
        where = f"tools[{index}].input_schema"
        raise ApiError(400, f"{where}: this field is required", param=where)
    return Tool(tool.name, tool.input_schema, tool.description)


def _shown(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": dict(tool.parameters)}}


def _texts(content: str | Sequence[TextBlock]) -> list[dict[str, str]]:
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    return [{"type": "text", "text": text} for text in texts]


def _may_join(before: dict[str, Any], after: dict[str, Any]) -> bool:
    plain = {"role", "content"}
    return before["role"] == after["role"] and before.keys() == after.keys() == plain


def _blocks(message: InputMessage) -> Sequence[Block]:
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    return message.content


def _assistant(message: InputMessage, where: str, names: dict[str, str]) -> dict[str, Any]:
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(message)):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            raise _refuse(block, f"{where}[{index}]", "an assistant's message")
    result: dict[str, Any] = {"role": "assistant", "content": _texts(texts)}
    if any(thoughts):
        result["reasoning_content"] = "\n".join(thoughts)
    if calls:
        result["tool_calls"] = calls
    return result


def _given(message: InputMessage, where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The messages of what is not the model's: results of tools, and the text around them."""
    result: list[dict[str, Any]] = []
    texts: list[TextBlock] = []

    def flush() -> None:
        if texts:
            result.append({"role": message.role, "content": _texts(texts)})
            texts.clear()

    for index, block in enumerate(_blocks(message)):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock) and message.role == "user":
            flush()
            result.append(_tool_result(block, f"{where}[{index}]", names))
        else:
            raise _refuse(block, f"{where}[{index}]", f"a message of the {message.role}")
    flush()
    return result or [{"role": message.role, "content": []}]


def _tool_result(block: ToolResultBlock, where: str, names: dict[str, str]) -> dict[str, Any]:
    if block.tool_use_id not in names:
        raise ApiError(
            400,
            f"{where}.tool_use_id: expected the id of an earlier tool_use, found "
            f"{block.tool_use_id!r}",
            param=f"{where}.tool_use_id",
        )
    texts: list[TextBlock] = []
    if isinstance(block.content, str):
        texts.append(TextBlock(type="text", text=block.content))
    for index, part in enumerate(block.content or () if not texts else ()):
        if not isinstance(part, TextBlock):
            raise _refuse(part, f"{where}.content[{index}]", "a tool's result")
        texts.append(part)
    if block.is_error:
        # Templates have no other place for it.
        texts.insert(0, TextBlock(type="text", text="The tool failed:"))
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "name": names[block.tool_use_id],
        "content": _texts(texts),
    }


def _refuse(block: object, where: str, what: str) -> ApiError:
    kind = getattr(block, "type", None)
    if isinstance(block, OtherBlock):
        message = f"{where}: this model is given text only; found {kind}"
    else:
        message = f"{where}: {what} has no {kind}"
    return ApiError(400, message, param=where)
