"""Tool calls in the formats that models write them in.

A call is one when the name of a function that was offered is known; what looks like a call and is
none is content. From there on its arguments are passed on as the model writes them, also if they
turn out to be no JSON, as OpenAI does; a call that is cut off has what there is of its arguments.
"""

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from srt.serve.generation.answers import AnswerDelta, ToolCallDelta
from srt.serve.parsers.text_reader import TextReader, Waiting

_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name.
        parameters: A JSON schema of its arguments, an object.
        description: What it does.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str | None = None


class ToolCallParser(ABC):
    """Finds the calls in a text. Subclasses say how they are written.

    Args:
        tools: Functions that may be called.
        max_calls: Most calls that are passed on, or None; further ones are left out.

    Attributes:
        markers: Texts that begin or divide calls; some tokenizers have them as special tokens.
        num_complete: Complete calls so far.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Tool], max_calls: int | None = None) -> None:
        self.tools = tools
        self.num_complete = 0
        self.reader = TextReader()
        self._max_calls = max_calls
        self._num_calls = 0
        self._space = ""
        self._out: list[AnswerDelta] = []
        self._run = self.run()
        next(self._run, None)

    @abstractmethod
    def run(self) -> Waiting[None]:
        """Parses the text from its beginning to its end."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Takes what was written next; returns what is certain by now."""
        self.reader.feed(text)
        return self._advance()

    def finish(self) -> list[AnswerDelta]:
        """The rest, when the text has ended."""
        self.reader.complete()
        deltas = self._advance()
        if self._space and not self._num_calls:
            deltas.append(AnswerDelta(content=self._space))
        return deltas

    def _advance(self) -> list[AnswerDelta]:
        next(self._run, None)
        deltas, self._out = self._out, []
        return deltas

    def content(self, text: str) -> None:
        """Passes text on. White space waits for what follows: it goes where a call does."""
        if text.isspace():
            self._space += text
        elif text:
            self._out.append(AnswerDelta(content=self._space + text))
            self._space = ""

    def begin_call(self, name: str) -> None:
        """Passes the beginning of a call on."""
        self._space = ""
        self._num_calls += 1
        if self._is_passed_on:
            call = ToolCallDelta(self._num_calls - 1, id=self.new_id(), name=name)
            self._out.append(AnswerDelta(tool_calls=(call,)))

    def arguments(self, text: str) -> None:
        """Passes a part of the arguments of the call on that has begun last."""
        if text and self._is_passed_on:
            call = ToolCallDelta(self._num_calls - 1, text)
            self._out.append(AnswerDelta(tool_calls=(call,)))

    def end_call(self) -> None:
        """Says that the call that has begun last is complete."""
        self.num_complete += 1

    @property
    def _is_passed_on(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def new_id(self) -> str:
        """A name for a call."""
        return f"call_{secrets.token_hex(12)}"

    def pass_rest(self) -> Waiting[None]:
        """Passes what was taken since the mark, and all that follows, on as content."""
        reader = self.reader
        self.content(reader.taken)
        while reader.text or (yield from reader.more()):
            self.content(reader.take(len(reader.text)))

    def call_object(self) -> Waiting[bool]:
        """Takes `{"name": ..., "arguments": {...}}`; false if it is not complete. If no call has
        begun by then, what was taken is still to be passed on.
        """
        reader, name, held = self.reader, "", list[str]()
        has_arguments = False

        def emit(text: str) -> None:
            if name:
                self.arguments(text)
            else:
                held.append(text)

        yield from reader.skip_space()
        if not (yield from reader.literal("{")):
            return False
        while True:
            yield from reader.skip_space()
            if (yield from reader.literal("}")):
                break
            key = yield from reader.json_string()
            yield from reader.skip_space()
            if key is None or not (yield from reader.literal(":")):
                return False
            yield from reader.skip_space()
            if key in _NAME_KEYS and not name:
                given = yield from reader.json_string()
                if given not in self.tools:
                    return False
                name = given or ""
                self.begin_call(name)
                self.arguments("".join(held))
            elif key in _ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                if not (yield from self._arguments_value(emit)):
                    return False
            elif not (yield from reader.json_value(lambda _: None)):
                return False
            yield from reader.skip_space()
            if not (yield from reader.literal(",")) and not reader.text.startswith("}"):
                return False
        if not name:
            return False
        if not has_arguments:
            self.arguments("{}")
        self.end_call()
        return True

    def _arguments_value(self, emit: Callable[[str], None]) -> Waiting[bool]:
        """The arguments; some models write them as a text that holds JSON."""
        if (yield from self.reader.starts_with(('"',))) is None:
            return (yield from self.reader.json_value(emit))
        text = yield from self.reader.json_string()
        if text is not None:
            emit(text)
        return text is not None


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3."""

    markers = ("<tool_call>", "</tool_call>")

    def run(self) -> Waiting[None]:
        begin, end = self.markers
        reader = self.reader
        while (yield from reader.until((begin,), self.content)) is not None:
            before, reader.taken = self._num_calls, begin
            complete = yield from self.call_object()
            if complete:
                yield from reader.skip_space()
                yield from reader.literal(end)
            elif self._num_calls == before:
                self.content(reader.taken)


class Llama3Parser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, after `<|python_tag|>` or not;
    several follow each other, after `;` or white space: Llama 3.1 to 3.3.
    """

    markers = ("<|python_tag|>",)

    def run(self) -> Waiting[None]:
        reader = self.reader
        reader.mark()
        yield from reader.skip_space()
        yield from reader.literal(self.markers[0])
        while True:
            yield from reader.skip_space()
            if (yield from reader.starts_with(("{",))) is None:
                break
            before = self._num_calls
            if not (yield from self.call_object()):
                if self._num_calls > before:
                    reader.mark()
                break
            reader.mark()
            space = yield from reader.skip_space()
            if not (yield from reader.literal(";")) and not space:
                break
        yield from self.pass_rest()


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and of newer models
    `[TOOL_CALLS]name[ARGS]{...}`, with `[CALL_ID]...` before `[ARGS]` or not.
    """

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def new_id(self) -> str:
        # What Mistral's templates demand.
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))

    def run(self) -> Waiting[None]:
        begin, reader = self.markers[0], self.reader
        while (yield from reader.until((begin,), self.content)) is not None:
            before, reader.taken = self._num_calls, begin
            yield from reader.skip_space()
            if (yield from reader.literal("[")):
                complete = yield from self._list()
            elif (yield from reader.starts_with(("{",))) is not None:
                complete = yield from self.call_object()
            else:
                complete = yield from self._named()
            if not complete and self._num_calls == before:
                self.content(reader.taken)

    def _list(self) -> Waiting[bool]:
        reader = self.reader
        while True:
            if not (yield from self.call_object()):
                return False
            yield from reader.skip_space()
            if (yield from reader.literal("]")):
                return True
            if not (yield from reader.literal(",")):
                return False

    def _named(self) -> Waiting[bool]:
        reader, header = self.reader, list[str]()
        _, args, call_id = self.markers
        marker = yield from reader.until((args, call_id, "{"), header.append)
        name = "".join(header).strip()
        if marker is None or name not in self.tools:
            return False
        if marker == call_id and (yield from reader.until((args,), lambda _: None)) is None:
            return False
        self.begin_call(name)
        if marker == "{":
            reader.text = "{" + reader.text
        yield from reader.skip_space()
        if (yield from reader.json_value(self.arguments)):
            self.end_call()
        return True


class DeepSeekParser(ToolCallParser):
    """DeepSeek's: `function<｜tool▁sep｜>name`, then a fenced block of JSON (V3, R1), or
    `name<｜tool▁sep｜>{...}` (V3.1), between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.
    """

    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def run(self) -> Waiting[None]:
        calls_begin, begin, _, end, calls_end = self.markers
        reader = self.reader
        while (marker := (yield from reader.until((calls_begin, begin), self.content))) is not None:
            before, reader.taken = self._num_calls, marker
            if marker == calls_begin:
                yield from reader.skip_space()
            if (marker == begin or (yield from reader.literal(begin))) and (
                yield from self._call()
            ):
                for mark in ("```", end, calls_end):
                    yield from reader.skip_space()
                    yield from reader.literal(mark)
            elif self._num_calls == before:
                self.content(reader.taken)

    def _call(self) -> Waiting[bool]:
        reader, header = self.reader, list[str]()
        separator = self.markers[2]
        if (yield from reader.until((separator,), header.append)) is None:
            return False
        name = "".join(header).strip()
        if name == "function":
            name, fence = "", list[str]()
            if (yield from reader.until(("\n",), fence.append)) is None:
                return False
            name = "".join(fence).strip()
            yield from reader.skip_space()
            yield from reader.literal("```json")
        if name not in self.tools:
            return False
        self.begin_call(name)
        yield from reader.skip_space()
        if (yield from reader.json_value(self.arguments)):
            self.end_call()
        return True


class ForcedCallsParser(ToolCallParser):
    """`[{"name": ..., "arguments": {...}}, ...]` as the whole answer: how an answer is written that
    is bound to call (see `srt.serve.parsers.choice`).
    """

    def run(self) -> Waiting[None]:
        reader = self.reader
        reader.mark()
        yield from reader.skip_space()
        yield from reader.literal("[")
        while (yield from self.call_object()):
            reader.mark()
            yield from reader.skip_space()
            yield from reader.literal(",")
        if not self._num_calls:
            yield from self.pass_rest()


class QwenCoderParser(ToolCallParser):
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`:
    Qwen3-Coder and the Qwen3.5 line. A parameter's value is a text or JSON, as its schema says.
    """

    markers = ("<tool_call>", "</tool_call>")

    def run(self) -> Waiting[None]:
        begin, end = self.markers
        reader = self.reader
        # The outer marker is left out by some models.
        while (
            marker := (yield from reader.until((begin, "<function="), self.content))
        ) is not None:
            before, reader.taken = self._num_calls, marker
            if marker == begin:
                yield from reader.skip_space()
            if (marker != begin or (yield from reader.literal("<function="))) and (
                yield from self._function()
            ):
                yield from reader.skip_space()
                yield from reader.literal(end)
            elif self._num_calls == before:
                self.content(reader.taken)

    def _function(self) -> Waiting[bool]:
        reader, header = self.reader, list[str]()
        if (yield from reader.until((">",), header.append)) is None:
            return False
        name = "".join(header).strip()
        if name not in self.tools:
            return False
        self.begin_call(name)
        properties = self.tools[name].parameters.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        text = "{"
        while True:
            yield from reader.skip_space()
            if not (yield from reader.literal("<parameter=")):
                break
            key, value = list[str](), list[str]()
            ends = ("</parameter>", "<parameter=", "</function>")
            if (yield from reader.until((">",), key.append)) is None or (
                marker := (yield from reader.until(ends, value.append))
            ) is None:
                return True
            if marker != ends[0]:
                reader.text = marker + reader.text
            word = "".join(key).strip()
            shown = _typed("".join(value), schemas.get(word))
            self.arguments(f"{text}{json.dumps(word)}: {shown}")
            text = ", "
        if (yield from reader.literal("</function>")):
            self.arguments("{}" if text == "{" else "}")
            self.end_call()
        return True


def _typed(text: str, schema: Any) -> str:
    """A parameter's value as JSON. One line break at either end belongs to the format."""
    text = text.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" not in kinds:
        try:
            json.loads(text)
            return text.strip()
        except (ValueError, RecursionError):
            words = {"True": "true", "False": "false", "None": "null"}
            if text.strip() in words:
                return words[text.strip()]
    return json.dumps(text, ensure_ascii=False)
