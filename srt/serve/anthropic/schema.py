"""Requests of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
_MAX_TOOLS = 256  # agents that other programs add tools to offer more than a hundred


class _Part(BaseModel):
    """A part of a message. Fields that say nothing to a model (`cache_control`, `citations`) are
    ignored, as are those that newer clients add.
    """

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Part):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Part):
    """Reasoning of an earlier answer. Its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Part):
    """Reasoning of another server's model, which only that can read: it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Part):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OtherBlock(BaseModel):
    """What this API has besides and no text model can be given, such as an image."""

    model_config = ConfigDict(extra="allow")
    type: str


_KNOWN = {
    "text": "Text",
    "thinking": "Thinking",
    "redacted_thinking": "RedactedThinking",
    "tool_use": "ToolUse",
    "tool_result": "ToolResult",
}


def _kind(value: Any) -> str:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _KNOWN.get(found, "Other") if isinstance(found, str) else "Other"


def _result_kind(value: Any) -> str:
    return "Text" if _kind(value) == "Text" else "Other"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("Text")] | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_result_kind),
]


class ToolResultBlock(_Part):
    """What a tool call of an earlier answer brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinking")]
    | Annotated[ToolUseBlock, Tag("ToolUse")]
    | Annotated[ToolResultBlock, Tag("ToolResult")]
    | Annotated[OtherBlock, Tag("Other")],
    Discriminator(_kind),
]


class InputMessage(_Part):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(_Part):
    """A tool. Only those that the client runs and describes itself are known here."""

    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceField(_Part):
    """Whether and which tools an answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingField(_Part):
    """Whether the model is to think. How long is its own choice: `budget_tokens` is not obeyed."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(_Part):
    """A schema that the answer follows."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    """How the answer is wanted."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(BaseModel):
    """A conversation."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    # Where and for whom Anthropic computes, what it caches and what it does to long conversations:
    # nothing here depends on it.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    betas: list[str] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # What would change the answer, and does not exist here: refused if there is anything in it.
    mcp_servers: list[Any] | None = None
    container: str | dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation whose next message is asked for."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
