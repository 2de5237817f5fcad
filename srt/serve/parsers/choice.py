"""Which parsers the answers of a model need, and what binds an answer to call a function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from srt.serve.generation.answers import AnswerDelta
from srt.serve.parsers.json_calls import (
    DeepSeekParser,
    ForcedCallsParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
)
from srt.serve.parsers.reasoning import (
    MISTRAL_THINK,
    THINK,
    ReasoningFormat,
    ReasoningSplitter,
)
from srt.serve.parsers.tagged_calls import QwenCoderParser
from srt.serve.parsers.text_reader import TextReader, Waiting
from srt.serve.parsers.tool_calls import Tool, ToolCallParser

# Names as vLLM and SGLang have them.
TOOL_CALL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen25": HermesParser,
    "qwen3_coder": QwenCoderParser,
    "llama3_json": Llama3Parser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
    "deepseekv3": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
    "deepseekv31": DeepSeekParser,
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "deepseek-r1": THINK,
    "deepseek-v3": THINK,
    "mistral": MISTRAL_THINK,
}
AUTO, NONE = "auto", "none"
TOOL_CALL_PARSER_CHOICES = (AUTO, NONE, *TOOL_CALL_PARSERS)
REASONING_PARSER_CHOICES = (AUTO, NONE, *REASONING_FORMATS)


@dataclass(frozen=True)
class ToolChoice:
    """Which functions an answer may call, and whether it must.

    Attributes:
        tools: Those that are offered, by name.
        required: It must call.
        named: It must call this one.
        parallel: It may call several.
    """

    tools: Mapping[str, Tool] = field(default_factory=dict)
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether it must call."""
        return self.required or self.named is not None

    def schema(self) -> dict[str, Any]:
        """A JSON schema that binds an answer to call: a list of calls.

        Functions' own schemas may refer to definitions of theirs (`#/$defs/...`), so they are put
        where these are found.
        """
        names = [self.named] if self.named is not None else list(self.tools)
        definitions: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for name in names:
            parameters = dict(self.tools[name].parameters) or {"type": "object"}
            parameters = _moved(parameters, f"{len(calls)}_", definitions)
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "arguments": parameters},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        items = calls[0] if len(calls) == 1 else {"anyOf": calls}
        schema: dict[str, Any] = {"type": "array", "items": items, "minItems": 1}
        if not self.parallel or self.named is not None:
            schema["maxItems"] = 1
        return schema | ({"$defs": definitions} if definitions else {})


def _moved(schema: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema whose definitions are moved to `definitions`, under names with `prefix`."""

    def rename(value: Any) -> Any:
        if isinstance(value, list):
            return [rename(one) for one in value]
        if not isinstance(value, dict):
            return value
        result = {key: rename(one) for key, one in value.items()}
        reference = result.get("$ref")
        for word in ("#/$defs/", "#/definitions/"):
            if isinstance(reference, str) and reference.startswith(word):
                result["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(word)}"
        return result

    for word in ("$defs", "definitions"):
        for name, one in (schema.pop(word, None) or {}).items():
            definitions[prefix + name] = rename(one)
    result = rename(schema)
    assert isinstance(result, dict)
    return result


class AnswerParsers:
    """The parsers of a model's answers.

    Args:
        template: The model's chat template, or nothing.
        tool_calls: One of TOOL_CALL_PARSER_CHOICES; `auto` looks at the template.
        reasoning: One of REASONING_PARSER_CHOICES, likewise.
        special_tokens: Texts of the tokenizer's special tokens.
    """

    def __init__(
        self, template: str, tool_calls: str, reasoning: str, special_tokens: Sequence[str]
    ) -> None:
        name = _guess_tool_calls(template) if tool_calls == AUTO else tool_calls
        self.tool_call_parser = None if name in (None, NONE) else TOOL_CALL_PARSERS[str(name)]
        form = _guess_reasoning(template) if reasoning == AUTO else reasoning
        self.reasoning = None if form in (None, NONE) else REASONING_FORMATS[str(form)]
        self._special_tokens = frozenset(special_tokens)

    def needs_special_tokens(self, choice: ToolChoice) -> bool:
        """Whether the text of answers must have its special tokens, since marks are among them."""
        return not self._special_tokens.isdisjoint(self._marks(choice))

    def make(
        self, choice: ToolChoice, prompt: str, *, skip_special_tokens: bool
    ) -> "ChatAnswerParser | None":
        """A parser for one answer; None where all of it is content.

        Args:
            choice: What it may call.
            prompt: The text of the prompt.
            skip_special_tokens: Leave those out that are no marks.
        """
        calls: ToolCallParser | None = None
        most = None if choice.parallel else 1
        if choice.is_forced:
            calls = ForcedCallsParser(choice.tools, most)
        elif choice.tools and self.tool_call_parser is not None:
            calls = self.tool_call_parser(choice.tools, most)
        splitter = None
        if self.reasoning is not None and not choice.is_forced:
            inside = prompt.rstrip().endswith(self.reasoning.begin)
            splitter = ReasoningSplitter(self.reasoning, begins_inside=inside)
        if calls is None and splitter is None:
            return None
        hidden: Sequence[str] = ()
        if skip_special_tokens and self.needs_special_tokens(choice):
            hidden = sorted(self._special_tokens)
        return ChatAnswerParser(splitter, calls, hidden)

    def _marks(self, choice: ToolChoice) -> set[str]:
        marks: set[str] = set()
        if choice.tools and not choice.is_forced and self.tool_call_parser is not None:
            marks |= {*self.tool_call_parser.markers}
        if self.reasoning is not None:
            marks |= {self.reasoning.begin, self.reasoning.end}
        return marks


class ChatAnswerParser:
    """Reasoning, then content and calls; special tokens that are no marks are left out.

    Args:
        reasoning: Splits reasoning off, or None.
        calls: Finds tool calls, or None.
        hidden: Texts of special tokens to leave out of content and reasoning.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        calls: ToolCallParser | None,
        hidden: Sequence[str] = (),
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._content = _Remover(hidden)
        self._thoughts = _Remover(hidden)

    @property
    def has_tool_calls(self) -> bool:
        """Whether a complete call has come."""
        return self._calls is not None and self._calls.num_complete > 0

    def feed(self, text: str) -> list[AnswerDelta]:
        """Takes what the model wrote next; returns what is certain by now."""
        deltas: list[AnswerDelta] = []
        if self._reasoning is not None:
            deltas += self._reasoning.feed(text)
            text = "".join(self._reasoning.rest)
            self._reasoning.rest.clear()
        deltas += self._after_reasoning(text)
        return self._without_hidden(deltas)

    def finish(self) -> list[AnswerDelta]:
        """The rest, when the text has ended."""
        deltas: list[AnswerDelta] = []
        if self._reasoning is not None:
            deltas += self._reasoning.finish()
            deltas += self._after_reasoning("".join(self._reasoning.rest))
            self._reasoning.rest.clear()
        if self._calls is not None:
            deltas += self._calls.finish()
        deltas = self._without_hidden(deltas)
        thoughts, content = self._thoughts.finish(), self._content.finish()
        if thoughts:
            deltas.append(AnswerDelta(reasoning=thoughts))
        if content:
            deltas.append(AnswerDelta(content=content))
        return deltas

    def _after_reasoning(self, text: str) -> list[AnswerDelta]:
        if self._calls is not None:
            return self._calls.feed(text) if text else []
        return [AnswerDelta(content=text)] if text else []

    def _without_hidden(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        result = []
        for delta in deltas:
            content = self._content.feed(delta.content)
            thoughts = self._thoughts.feed(delta.reasoning)
            if content or thoughts or delta.tool_calls:
                result.append(AnswerDelta(content, thoughts, delta.tool_calls))
        return result


class _Remover:
    """Leaves some texts out of a text that comes in pieces."""

    def __init__(self, hidden: Sequence[str]) -> None:
        self._hidden = hidden
        self._reader = TextReader()
        self._out: list[str] = []
        self._run = self._remove()
        next(self._run, None)

    def feed(self, text: str) -> str:
        if not self._hidden:
            return text
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> str:
        self._reader.complete()
        return self._advance()

    def _advance(self) -> str:
        next(self._run, None)
        text = "".join(self._out)
        self._out.clear()
        return text

    def _remove(self) -> Waiting[None]:
        while (yield from self._reader.until(self._hidden, self._out.append)) is not None:
            pass


_Guess = tuple[Callable[[str], bool], str]
# What a template says, the most telling first.
_TOOL_CALL_GUESSES: tuple[_Guess, ...] = (
    (lambda text: "<tool_call>" in text and "<function=" in text, "qwen3_coder"),
    (lambda text: "<tool_call>" in text, "hermes"),
    (lambda text: "[TOOL_CALLS]" in text, "mistral"),
    (lambda text: "<｜tool▁call▁begin｜>" in text, "deepseek_v3"),
    (lambda text: "<|python_tag|>" in text or '"parameters"' in text, "llama3_json"),
)


def _guess_tool_calls(template: str) -> str | None:
    if "tools" not in template:
        return None
    return next((name for test, name in _TOOL_CALL_GUESSES if test(template)), None)


def _guess_reasoning(template: str) -> str | None:
    if THINK.begin in template or THINK.end in template:
        return "qwen3"
    return "mistral" if MISTRAL_THINK.begin in template else None
