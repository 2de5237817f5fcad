"""Requests of OpenAI's Responses API, the stateless part."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from srt.serve.openai.fields import MAX_TOP_LOGPROBS, RequestModel, Stop
from srt.serve.openai.tools import FunctionName

_MAX_TOOLS = 256  # agents that other programs add tools to offer more than a hundred


class _Item(BaseModel):
    """Something of a conversation. Fields that say nothing to a model (`id`, `status`, `phase`)
    are ignored, as are those that newer clients add.
    """

    model_config = ConfigDict(extra="ignore")


class TextPart(_Item):
    """Text, the user's or the model's."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(_Item):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class OtherPart(BaseModel):
    """What this API has besides and no text model can be given, such as an image."""

    model_config = ConfigDict(extra="allow")
    type: str


def _part_kind(value: Any) -> str:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if found in ("input_text", "output_text", "text"):
        return "Text"
    return "Refusal" if found == "refusal" else "Other"


Part = Annotated[
    Annotated[TextPart, Tag("Text")]
    | Annotated[RefusalPart, Tag("Refusal")]
    | Annotated[OtherPart, Tag("Other")],
    Discriminator(_part_kind),
]


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class FunctionCallItem(_Item):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(_Item):
    """A call of an earlier answer whose argument is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutputItem(_Item):
    """What a call of an earlier answer brought."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[Part]


class ReasoningText(_Item):
    """Reasoning as the model wrote it."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of an earlier answer. What is encrypted only another server can read."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None


class OtherItem(BaseModel):
    """What this API has besides, such as a web search."""

    model_config = ConfigDict(extra="allow")
    type: str


_KINDS = {
    None: "Message",
    "message": "Message",
    "function_call": "FunctionCall",
    "custom_tool_call": "CustomCall",
    "function_call_output": "CallOutput",
    "custom_tool_call_output": "CallOutput",
    "reasoning": "Reasoning",
}


def _item_kind(value: Any) -> str:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _KINDS.get(found, "Other") if found is None or isinstance(found, str) else "Other"


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[FunctionCallItem, Tag("FunctionCall")]
    | Annotated[CustomCallItem, Tag("CustomCall")]
    | Annotated[CallOutputItem, Tag("CallOutput")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_item_kind),
]


class ToolItem(BaseModel):
    """A tool; only what the client runs is known here: functions, tools that take a text
    (`custom`), and both in a `namespace`.
    """

    model_config = ConfigDict(extra="allow")
    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list["ToolItem"] | None = None


class FunctionChoice(RequestModel):
    """The function that the model must call."""

    type: Literal["function"]
    name: FunctionName


class AllowedTools(RequestModel):
    """Those of the functions that the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class Reasoning(_Item):
    """How much the model is to think: `effort` is a variable of chat templates. Answers have the
    reasoning itself and no summary of it.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(RequestModel):
    """What the text of the answer follows. `strict` makes no difference: it always does."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(RequestModel):
    """How the text of the answer is wanted."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(RequestModel):
    """What a stream holds besides the answer."""

    include_obfuscation: bool | None = None


class ResponsesRequest(RequestModel):
    """A conversation whose next items are asked for."""

    model: str | None = None
    input: Annotated[str, Field(min_length=1)] | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[ToolItem], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    # What vLLM's and SGLang's users send besides.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Who asks and what for: nothing here depends on it. Nothing is stored, whatever `store` says.
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    # Bounds the calls of tools that a server runs: there are none.
    max_tool_calls: int | None = None
    # What needs something stored, and does not exist here: refused if it says anything.
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | None = None
    moderation: dict[str, Any] | None = None
