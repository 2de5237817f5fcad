"""The format of tool calls whose arguments are written between tags."""

import json
from collections.abc import Mapping
from typing import Any

from srt.serve.parsers.text_reader import Waiting
from srt.serve.parsers.tool_calls import ToolCallParser


class QwenCoderParser(ToolCallParser):
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`:
    Qwen3-Coder and the Qwen3.5 line. A parameter's value is a text or JSON, as its schema says; one
    line break at either end belongs to the format. What can only be a text is passed on as it
    comes, so that a file that is being written can be watched.
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
            key = list[str]()
            if (yield from reader.until((">",), key.append)) is None:
                return True
            word = "".join(key).strip()
            self.arguments(f"{text}{json.dumps(word, ensure_ascii=False)}: ")
            if not (yield from self._value(_types(schemas.get(word)))):
                return True
            text = ", "
        if (yield from reader.literal("</function>")):
            self.arguments("{}" if text == "{" else "}")
            self.end_call()
        return True

    def _value(self, types: set[str]) -> Waiting[bool]:
        """A parameter's value and the mark after it; false if the text ends within it."""
        reader, parts = self.reader, list[str]()
        ends = ("</parameter>", "<parameter=", "</function>")
        is_text = types == {"string"}
        held = ""

        def emit(part: str) -> None:
            nonlocal held
            if not is_text:
                parts.append(part)
                return
            # The last line break may be the format's.
            part, held = held + part, ""
            if part.endswith("\n"):
                part, held = part[:-1], "\n"
            self.arguments(json.dumps(part, ensure_ascii=False)[1:-1])

        yield from reader.literal("\n")
        if is_text:
            self.arguments('"')
        marker = yield from reader.until(ends, emit)
        if marker is None:
            return False
        self.arguments('"' if is_text else _typed("".join(parts).removesuffix("\n"), types))
        if marker != ends[0]:
            reader.text = marker + reader.text
        return True


_JSON_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
# As Python writes them, which templates do.
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _types(schema: Any) -> set[str]:
    """Types that a schema names; none if it leaves them open."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        types |= (
            {t for option in options for t in _types(option)}
            if isinstance(options, list)
            else set()
        )
    values = schema.get("enum")
    if not types and isinstance(values, list):
        types = {t for value in values for t in _JSON_TYPES.get(type(value), ())}
    return types


def _typed(text: str, types: set[str]) -> str:
    """A parameter's value as JSON: what it is read as, unless it may be a text and not that."""
    raw = text.strip()
    raw = _PYTHON_WORDS.get(raw, raw)
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = not types.isdisjoint(_JSON_TYPES[type(value)]) and not isinstance(value, str)
    if fits or "string" not in types:
        return raw
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
