"""Which parsers the answers of a model need, and what binds an answer to call a function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from srt.sampling.sampling_params import SamplingParams
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


# A function whose parameters are not given has none, as in OpenAI's API.
_NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}


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
            parameters = dict(self.tools[name].parameters) or _NO_PARAMETERS
            parameters = {"type": "object", **parameters}
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


@dataclass(frozen=True)
class ParserPlan:
    """How one request's answers are generated and read.

    Attributes:
        params: The request's sampling parameters, so that the marks of calls and reasoning are in
            the text, and what follows a schema may be reasoned about first.
        make: Makes the parser of an answer; None where all of it is content.
    """

    params: SamplingParams
    make: "Callable[[], ChatAnswerParser | None]"


class AnswerParsers:
    """The parsers of a model's answers.

    Args:
        template: The model's chat template, or nothing.
        tool_calls: One of TOOL_CALL_PARSER_CHOICES; `auto` looks at the template.
        reasoning: One of REASONING_PARSER_CHOICES, likewise.
        special_tokens: The tokenizer's special tokens, which texts leave out, by text.
        added_tokens: Its other added tokens, by text.

    Attributes:
        shows_tools: Whether the template shows the model which functions there are.
        tool_call_parser: How calls are written, or None.
        reasoning: How reasoning is marked, or None.
    """

    def __init__(
        self,
        template: str,
        tool_calls: str,
        reasoning: str,
        special_tokens: Mapping[str, int],
        added_tokens: Mapping[str, int],
    ) -> None:
        self.shows_tools = "tools" in template
        name = _guess_tool_calls(template) if tool_calls == AUTO else tool_calls
        self.tool_call_parser = None if name in (None, NONE) else TOOL_CALL_PARSERS[str(name)]
        form = _guess_reasoning(template) if reasoning == AUTO else reasoning
        self.reasoning = None if form in (None, NONE) else REASONING_FORMATS[str(form)]
        self._special_tokens = special_tokens
        self._tokens = {**added_tokens, **special_tokens}

    def plan(
        self, choice: ToolChoice, prompt: str, params: SamplingParams, *, separate_reasoning: bool
    ) -> ParserPlan:
        """How the answers to a request are generated and read.

        Args:
            choice: What they may call. If they must, `params` already has its schema.
            prompt: The text of the prompt, which tells whether an answer begins inside reasoning.
            params: How tokens are chosen.
            separate_reasoning: Whether reasoning is told from content; it is content otherwise.
        """
        reasoning = self.reasoning
        prompt = prompt.rstrip()
        begins_inside = reasoning is not None and prompt.endswith(reasoning.begin)
        if reasoning is not None and params.is_structured:
            tokens = self._reasoning_tokens(reasoning, prompt)
            params = replace(params, reasoning_tokens=tokens)
            if not tokens:  # it is bound from its first token on
                reasoning = None
        marks: set[str] = set()
        parser: Callable[[], ToolCallParser] | None = None
        most = None if choice.parallel else 1
        if choice.is_forced:
            parser = partial(ForcedCallsParser, choice.tools, most)
        elif choice.tools and self.tool_call_parser is not None:
            marks.update(self.tool_call_parser.markers)
            parser = partial(self.tool_call_parser, choice.tools, most)
        if reasoning is not None and (separate_reasoning or parser is not None):
            marks |= {reasoning.begin, reasoning.end}
        shown = [token for text, token in self._special_tokens.items() if text in marks]
        if shown:
            params = replace(params, shown_special_tokens=sorted(shown))

        def make() -> ChatAnswerParser | None:
            splitter = None
            if reasoning is not None and (separate_reasoning or parser is not None):
                splitter = ReasoningSplitter(
                    reasoning, begins_inside=begins_inside, verbatim=not separate_reasoning
                )
            if splitter is None and parser is None:
                return None
            calls = None if parser is None else parser()
            return ChatAnswerParser(splitter, calls, separate_reasoning=separate_reasoning)

        return ParserPlan(params, make)

    def _reasoning_tokens(self, form: ReasoningFormat, prompt: str) -> tuple[int, ...]:
        """For :class:`SamplingParams`; none where a mark is not one token."""
        if prompt.endswith(form.end):  # it is not to reason
            return ()
        marks = (form.end,) if prompt.endswith(form.begin) else (form.begin, form.end)
        tokens = [self._tokens[mark] for mark in marks if mark in self._tokens]
        return tuple(tokens) if len(tokens) == len(marks) else ()


class ChatAnswerParser:
    """Reasoning, then content and calls.

    Args:
        reasoning: Splits reasoning off, or None.
        calls: Finds tool calls, or None.
        separate_reasoning: Whether reasoning is passed on as such, or as content. Calls are not
            looked for in it either way.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        calls: ToolCallParser | None,
        *,
        separate_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._is_separate = separate_reasoning

    @property
    def has_tool_calls(self) -> bool:
        """Whether a complete call has come."""
        return self._calls is not None and self._calls.num_complete > 0

    def feed(self, text: str) -> list[AnswerDelta]:
        """Takes what the model wrote next; returns what is certain by now."""
        if self._reasoning is None:
            return self._after_reasoning(text)
        return self._split(self._reasoning.feed(text))

    def finish(self) -> list[AnswerDelta]:
        """The rest, when the text has ended."""
        deltas = [] if self._reasoning is None else self._split(self._reasoning.finish())
        return deltas if self._calls is None else deltas + self._calls.finish()

    def _split(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        assert self._reasoning is not None
        if not self._is_separate:
            deltas = [AnswerDelta(content=delta.reasoning) for delta in deltas]
        rest = "".join(self._reasoning.rest)
        self._reasoning.rest.clear()
        return deltas + self._after_reasoning(rest)

    def _after_reasoning(self, text: str) -> list[AnswerDelta]:
        if self._calls is not None:
            return self._calls.feed(text) if text else []
        return [AnswerDelta(content=text)] if text else []


_Guess = tuple[Callable[[str], bool], str]
# What a template says, the most telling first.
_TOOL_CALL_GUESSES: tuple[_Guess, ...] = (
    (lambda text: "<arg_key>" in text, NONE),  # GLM's, which nothing here reads
    (lambda text: "<tool_call>" in text and "<function=" in text, "qwen3_coder"),
    (lambda text: "<tool_call>" in text, "hermes"),
    (lambda text: "[TOOL_CALLS]" in text, "mistral"),
    (lambda text: "<｜tool▁call▁begin｜>" in text, "deepseek_v3"),
    (lambda text: '{"name": ' in text and '"parameters": ' in text, "llama3_json"),
)


def _guess_tool_calls(template: str) -> str | None:
    if "tools" not in template:
        return None
    return next((name for test, name in _TOOL_CALL_GUESSES if test(template)), None)


def _guess_reasoning(template: str) -> str | None:
    if THINK.begin in template or THINK.end in template:
        return "qwen3"
    return "mistral" if MISTRAL_THINK.begin in template else None
