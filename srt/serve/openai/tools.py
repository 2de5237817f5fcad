"""Tools in OpenAI's requests."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from srt.serve.errors import ApiError
from srt.serve.openai.fields import RequestModel
from srt.serve.parsers.choice import ToolChoice
from srt.serve.parsers.tool_calls import Tool

_MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(RequestModel):
    """A function. `strict` makes no difference where a call is forced, whose arguments always
    follow the schema.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    """A function's name."""

    name: FunctionName


class NamedChoice(RequestModel):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ToolFields(RequestModel):
    """Which functions an answer may call."""

    tools: Annotated[list[FunctionTool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None

    def choice(self) -> ToolChoice:
        """Which functions an answer may call, and whether it must.

        Raises:
            ApiError: 400.
        """
        tools = [
            Tool(tool.function.name, tool.function.parameters or {}, tool.function.description)
            for tool in self.tools or ()
        ]
        named = (
            self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        )
        return make_choice(
            tools,
            required=self.tool_choice == "required",
            named=named,
            none=self.tool_choice == "none",
            parallel=self.parallel_tool_calls is not False,
        )

    def shown_tools(self, choice: ToolChoice) -> list[dict[str, Any]] | None:
        """What the chat template sees of the functions."""
        if not choice.tools:
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


def make_choice(
    tools: Sequence[Tool], *, required: bool, named: str | None, none: bool, parallel: bool
) -> ToolChoice:
    """A choice of functions.

    Raises:
        ApiError: 400: two have one name, or one is to be called that is not there.
    """
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) != len(tools):
        names = [tool.name for tool in tools]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(
            400, f"tools: expected different names, found {twice!r} twice", param="tools"
        )
    if (required or named is not None) and not tools:
        raise ApiError(400, "tool_choice: expected tools with it, found none", param="tool_choice")
    if named is not None and named not in by_name:
        expected = ", ".join(by_name)
        raise ApiError(
            400,
            f"tool_choice: expected a function of tools ({expected}), found {named!r}",
            param="tool_choice",
        )
    return ToolChoice({} if none else by_name, required, named, parallel)
