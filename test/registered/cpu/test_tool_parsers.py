"""Tool calls and reasoning in the formats that models write, however the text is cut."""

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.sampling.sampling_params import SamplingParams
from srt.serve.errors import ApiError
from srt.serve.generation.answers import AnswerDelta
from srt.serve.generation.service import ChatCall, GenerationService
from srt.serve.parsers.choice import AnswerParsers, ChatAnswerParser, ToolChoice
from srt.serve.parsers.json_calls import (
    DeepSeekParser,
    ForcedCallsParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
)
from srt.serve.parsers.tagged_calls import QwenCoderParser
from srt.serve.parsers.tool_calls import Tool, ToolCallParser
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="per-commit")

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = {name: Tool(name, NUMBER) for name in ("add", "get_weather")}
Call = tuple[str, str]


def parse(parser: ToolCallParser, pieces: Sequence[str]) -> tuple[str, list[Call], int]:
    """Content, calls as (name, arguments), and how many are complete."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    content = "".join(delta.content for delta in deltas)
    return content, join(deltas), parser.num_complete


def join(deltas: Sequence[AnswerDelta]) -> list[Call]:
    names: list[str] = []
    arguments: list[str] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.name is not None:
            assert call.id
            assert call.index == len(names)
            names.append(call.name)
            arguments.append("")
        arguments[call.index] += call.arguments
    return list(zip(names, arguments, strict=True))


ADD = '{"a": 1, "b": "x}\\"{"}'
WRITTEN: Mapping[str, tuple[type[ToolCallParser], str, str, list[Call]]] = {
    "hermes": (
        HermesParser,
        f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>',
        "Let me see.",
        [("add", ADD)],
    ),
    "hermes, two, arguments first, none": (
        HermesParser,
        f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>\n'
        '<tool_call>{"name": "get_weather"}</tool_call>',
        "",
        [("add", ADD), ("get_weather", "{}")],
    ),
    "hermes, arguments as a text": (
        HermesParser,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call> done',
        " done",
        [("add", '{"a": 1}')],
    ),
    "hermes, unknown function": (
        HermesParser,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "hermes, talk of the mark": (
        HermesParser,
        "Write <tool_call> and then {nothing}.",
        "Write <tool_call> and then {nothing}.",
        [],
    ),
    "qwen3_coder": (
        QwenCoderParser,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        "two\nlines\n</parameter>\n</function>\n</tool_call>",
        "",
        [("add", '{"a": 1, "b": "two\\nlines"}')],
    ),
    "qwen3_coder, no outer mark, no parameters": (
        QwenCoderParser,
        "Yes.<function=get_weather>\n</function>",
        "Yes.",
        [("get_weather", "{}")],
    ),
    "llama3": (
        Llama3Parser,
        f'{{"name": "add", "parameters": {ADD}}}',
        "",
        [("add", ADD)],
    ),
    "llama3, tag, two": (
        Llama3Parser,
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; '
        '{"name": "get_weather", "parameters": {}}',
        "",
        [("add", '{"a": 1}'), ("get_weather", "{}")],
    ),
    "llama3, JSON that is no call": (Llama3Parser, '{"answer": 42}', '{"answer": 42}', []),
    "llama3, text": (Llama3Parser, "Hello {there}.", "Hello {there}.", []),
    "mistral, list": (
        MistralParser,
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ADD}}}, '
        '{"name": "get_weather", "arguments": {}}]',
        "",
        [("add", ADD), ("get_weather", "{}")],
    ),
    "mistral, named": (
        MistralParser,
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{}',
        "",
        [("add", '{"a": 1}'), ("get_weather", "{}")],
    ),
    "mistral, unknown": (
        MistralParser,
        "[TOOL_CALLS]rm[ARGS]{}",
        "[TOOL_CALLS]rm[ARGS]{}",
        [],
    ),
    "deepseek v3": (
        DeepSeekParser,
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        f"{ADD}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [("add", ADD), ("get_weather", "{}")],
    ),
    "deepseek v3.1": (
        DeepSeekParser,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("add", ADD)],
    ),
    "forced": (
        ForcedCallsParser,
        f'[{{"name": "add", "arguments": {ADD}}}, {{"name": "get_weather", "arguments": {{}}}}]',
        "",
        [("add", ADD), ("get_weather", "{}")],
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_as_models_write_them(name: str) -> None:
    make, text, content, calls = WRITTEN[name]
    assert parse(make(TOOLS), [text]) == (content, calls, len(calls))
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", WRITTEN)
def test_it_does_not_matter_where_the_text_is_cut(name: str) -> None:
    make, text, *_ = WRITTEN[name]
    whole = parse(make(TOOLS), [text])
    assert parse(make(TOOLS), list(text)) == whole
    for at in range(len(text)):
        assert parse(make(TOOLS), [text[:at], text[at:]]) == whole


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<|python_tag|>",
    "add",
    "function",
    "x",
]
PIECES = st.sampled_from([*MARKS, '{"name": "add", "arguments": ', '{"a": 1}', *'}{[]"\\,; \n'])
PARSERS = sorted({make for make, *_ in WRITTEN.values()}, key=lambda make: make.__name__)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    parts=st.lists(PIECES, max_size=14), make=st.sampled_from(PARSERS), cuts=st.sets(st.integers(0))
)
def test_any_text_ends_the_same_however_it_is_cut(
    parts: list[str], make: type[ToolCallParser], cuts: set[int]
) -> None:
    text = "".join(parts)
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = parse(make(TOOLS), [text])
    assert parse(make(TOOLS), pieces) == whole
    content, calls, _ = whole
    if not calls:  # nothing is lost
        assert content == text


@pytest.mark.parametrize("end", [1, 30, 45])
def test_a_call_that_is_cut_off_has_what_there_is_and_is_not_complete(end: int) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}'
    content, calls, complete = parse(HermesParser(TOOLS), [text[: len(text) - end]])
    assert complete == 0
    for name, arguments in calls:
        assert name == "add"
        assert ADD.startswith(arguments)
    assert calls or content


def test_further_calls_are_left_out_where_one_is_wanted() -> None:
    text = WRITTEN["mistral, list"][1]
    content, calls, _ = parse(MistralParser(TOOLS, max_calls=1), [text])
    assert (content, calls) == ("", [("add", ADD)])


def test_names_of_mistrals_calls_are_what_its_templates_take() -> None:
    (delta,) = [
        call
        for delta in MistralParser(TOOLS).feed("[TOOL_CALLS]add[ARGS]")
        for call in delta.tool_calls
    ]
    assert delta.id is not None
    assert len(delta.id) == 9
    assert delta.id.isalnum()


def read(parser: ChatAnswerParser, pieces: Sequence[str]) -> tuple[str, str, list[Call]]:
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    reasoning = "".join(delta.reasoning for delta in deltas)
    return reasoning, "".join(delta.content for delta in deltas), join(deltas)


def make_parsers(template: str, special: Mapping[str, int] | None = None) -> AnswerParsers:
    return AnswerParsers(template, "auto", "auto", special or {}, {})


@pytest.mark.parametrize(
    ("template", "parser", "reasons"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HermesParser, False),
        ("{% if tools %}<tool_call>\n<function=x>{% endif %}<think>", QwenCoderParser, True),
        ("{% if tools %}[TOOL_CALLS]", MistralParser, False),
        ("{{ tools }}<｜tool▁call▁begin｜></think>", DeepSeekParser, True),
        ('{{ tools }}{"name": x, "parameters": y}', Llama3Parser, False),
        ("{{ tools }}<tool_call>{name}<arg_key>", None, False),
        ('{{ tools }}"tool_name": x, "parameters": y', None, False),
        ("{{ messages }}", None, False),
        ("{{ messages.tool_calls }}<｜tool▁call▁begin｜>", None, False),
        ("", None, False),
    ],
)
def test_parsers_are_chosen_by_the_template(
    template: str, parser: type[ToolCallParser] | None, reasons: bool
) -> None:
    parsers = make_parsers(template)
    assert parsers.tool_call_parser is parser
    assert (parsers.reasoning is not None) == reasons


def test_marks_that_are_special_tokens_stay_in_the_text_and_others_do_not() -> None:
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 3, "<s>": 1, "[INST]": 4}
    parsers = make_parsers("{{ tools }}[TOOL_CALLS]", special)
    params = SamplingParams(seed=1)
    plan = parsers.plan(ToolChoice(TOOLS), "", params, separate_reasoning=True)
    assert plan.params == replace(params, shown_special_tokens=(3, 5))
    nothing = parsers.plan(ToolChoice(), "", params, separate_reasoning=True)
    assert nothing.params == params
    assert nothing.make() is None
    forced = ToolChoice(TOOLS, required=True)
    assert parsers.plan(forced, "", params, separate_reasoning=True).params == params
    # What is written in letters is text: <s> is HTML, too.
    text = "<s>One</s> two[TOOL_CALLS]add[ARGS]{}"
    for pieces in ([text], list(text)):
        parser = plan.make()
        assert parser is not None
        assert read(parser, pieces) == ("", "<s>One</s> two", [("add", "{}")])


def test_the_schema_of_a_forced_call_has_each_functions_definitions() -> None:
    def tool(name: str, limit: int) -> Tool:
        zone: dict[str, Any] = {"type": "string", "maxLength": limit}
        properties = {"zone": {"$ref": "#/$defs/zone"}}
        return Tool(name, {"type": "object", "properties": properties, "$defs": {"zone": zone}})

    tools = {"a": tool("a", 1), "b": tool("b", 2)}
    schema = ToolChoice(tools, required=True).schema()
    assert {name: one["maxLength"] for name, one in schema["$defs"].items()} == {
        "0_zone": 1,
        "1_zone": 2,
    }
    second = schema["items"]["anyOf"][1]["properties"]["arguments"]
    assert second["properties"]["zone"] == {"$ref": "#/$defs/1_zone"}
    named = ToolChoice(tools, named="b", parallel=True).schema()
    assert named["maxItems"] == 1
    assert named["items"]["properties"]["name"] == {"const": "b"}


VALUES: list[tuple[Any, str, str]] = [
    ({"type": "string"}, "17", '"17"'),
    ({"type": "string"}, '"quoted"', '"\\"quoted\\""'),
    ({"type": "string"}, "\n\nlines\n \n", '"\\n\\nlines\\n \\n"'),
    ({"type": "integer"}, " 17 ", "17"),
    ({"type": "integer"}, "many", '"many"'),
    ({"type": "number"}, "NaN", '"NaN"'),
    ({"type": "boolean"}, "True", "true"),
    ({"type": ["string", "null"]}, "None", "null"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", '"12"'),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", '"1"'),
    ({"enum": [1, 2]}, "1", "1"),
    ({"type": "array"}, '[1, "a"]', '[1, "a"]'),
    ({"$ref": "#/$defs/x"}, '{"a": 1}', '{"a": 1}'),
    (None, "plain", '"plain"'),
]


@pytest.mark.parametrize(("schema", "written", "value"), VALUES)
def test_values_between_tags_have_the_types_of_their_schema(
    schema: Any, written: str, value: str
) -> None:
    properties = {} if schema is None else {"k": schema}
    tools = {"f": Tool("f", {"type": "object", "properties": properties})}
    text = f"<tool_call><function=f><parameter=k>\n{written}\n</parameter></function></tool_call>"
    for pieces in ([text], list(text)):
        parsed = parse(QwenCoderParser(tools), pieces)
        assert parsed == ("", [("f", f'{{"k": {value}}}')], 1)


def test_a_text_between_tags_is_passed_on_as_it_comes() -> None:
    parser = QwenCoderParser(TOOLS)
    parser.feed("<function=add><parameter=b>\nfirst\n")
    (delta,) = [call for one in parser.feed("second") for call in one.tool_calls]
    assert delta.arguments == "\\nsecond"


@pytest.mark.parametrize("begin", ["Hello ", '<tool_call>{"name": "add", "arguments": {"b": "'])
def test_a_long_answer_is_not_kept(begin: str) -> None:
    for make in PARSERS:
        parser = make(TOOLS)
        parser.feed(begin)
        for _ in range(1000):
            parser.feed("word after word ")
        kept = len(parser.reader.text) + len(parser.reader.taken)
        assert kept < 200, make.__name__


def test_tools_are_refused_where_no_call_could_be_read() -> None:
    state: Any = SimpleNamespace(parsers=make_parsers("{{ messages }}"))
    call = ChatCall([{"role": "user", "content": "a"}], SamplingParams(), choice=ToolChoice(TOOLS))
    with pytest.raises(ApiError, match="template shows no tools") as caught:
        asyncio.run(GenerationService(state).chat(call))
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert not state.parsers.shows_tools
    assert make_parsers("{{ tools }}").shows_tools
