"""Formats of tool calls whose arguments are written as JSON."""

import secrets
import string

from srt.serve.parsers.text_reader import Waiting
from srt.serve.parsers.tool_calls import ToolCallParser

_ALPHANUMERIC = string.ascii_letters + string.digits


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
