"""Tool calls in the formats that models write them in.

A call is one when the name of a function that was offered is known; what looks like a call and is
none is content. From there on its arguments are passed on as the model writes them, also if they
turn out to be no JSON, as OpenAI does; a call that is cut off has what there is of its arguments.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from srt.serve.generation.answers import AnswerDelta, ToolCallDelta
from srt.serve.parsers.text_reader import TextReader, Waiting

_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")


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
        self.reader.mark()
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
        self.reader.mark()
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
