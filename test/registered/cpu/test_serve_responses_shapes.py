"""The Responses API without a server: what requests become, and what becomes of answers."""

from typing import Any

import openai.types.responses as official
import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter

from srt.sampling.logprobs import TokenLogprob
from srt.serve.errors import ApiError
from srt.serve.generation.answers import AnswerDelta, AnswerEnd, AnswerEvent, ToolCallDelta, Usage
from srt.serve.openai.response_writer import ResponseWriter
from srt.serve.openai.responses_input import (
    check_refused,
    make_messages,
    make_options,
    make_structure,
)
from srt.serve.openai.responses_input import make_tool_choice as make_choice
from srt.serve.openai.responses_schema import ResponsesRequest
from srt.serve.openai.responses_tools import OfferedTools
from srt.serve.parsers.choice import ToolChoice
from srt.test.answer_events import answer_events
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="per-commit")

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(official.ResponseStreamEvent)
ECHO = {
    "model": "m",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "store": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "strict": True}


def parse(given: Any = "hi", **fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": given} | fields)


def make_tool_choice(body: ResponsesRequest) -> ToolChoice:
    return make_choice(body, OfferedTools(body.tools or ()))


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def run(events: list[AnswerEvent]) -> tuple[list[dict[str, Any]], ResponseWriter]:
    writer = ResponseWriter(ECHO)
    out = writer.begin()
    for event in events:
        out += writer.write(event)
    return out, writer


def check_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replays a stream as a client does; returns the items that it makes of the deltas."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    is_open = part_open = False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items)
            items.append({**event["item"], "text": "", "arguments": ""})
            is_open = True
            continue
        assert is_open and event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "output_item.done":
            assert not part_open and event["item"]["id"] == item["id"]
            if item["type"] == "function_call":
                assert event["item"]["arguments"] == item["arguments"]
            else:
                assert event["item"]["content"][0]["text"] == item["text"]
            items[-1] = event["item"]
            is_open = False
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert not part_open and event["part"]["text"] == ""
            part_open = True
        elif kind == "content_part.done":
            assert part_open and event["part"]["text"] == item["text"]
            part_open = False
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        elif kind.endswith(".delta"):
            assert part_open
            item["text"] += event["delta"]
        else:
            assert part_open and event["text"] == item["text"]
    assert not is_open
    return items


@settings(max_examples=300, deadline=None)
@given(answer_events())
def test_any_answer_makes_a_valid_stream(events: list[AnswerEvent]) -> None:
    out, writer = run(events)
    for event in out:
        STREAM_EVENT.validate_python(event, strict=True)
    items = check_order(out)
    assert items == writer.response["output"] == out[-1]["response"]["output"]
    official.Response.model_validate(writer.response, strict=True)
    deltas = [event for event in events if isinstance(event, AnswerDelta)]
    parts = [part for item in items for part in item.get("content", ())]
    for kind, field in (("output_text", "content"), ("reasoning_text", "reasoning")):
        joined = "".join(part["text"] for part in parts if part["type"] == kind)
        assert joined == "".join(getattr(delta, field) for delta in deltas)
    calls = [item for item in items if item["type"] == "function_call"]
    assert len(calls) == sum(call.name is not None for d in deltas for call in d.tool_calls)
    joined = "".join(item["arguments"] for item in calls)
    assert joined == "".join(call.arguments for d in deltas for call in d.tool_calls)


def test_items_of_reasoning_text_and_calls() -> None:
    out, writer = run(
        [
            AnswerDelta(reasoning="Let me see."),
            AnswerDelta(content="I look "),
            AnswerDelta(content="it up."),
            AnswerDelta(tool_calls=(ToolCallDelta(0, id="call_1", name="weather"),)),
            AnswerDelta(tool_calls=(ToolCallDelta(0, '{"city": "Rome"}'),)),
            AnswerEnd("tool_calls", 2, Usage(20, 16, 9, 4)),
        ]
    )
    reasoning, message, call = writer.response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "I look it up."
    assert (call["call_id"], call["name"]) == ("call_1", "weather")
    assert call["arguments"] == '{"city": "Rome"}'
    assert {item["status"] for item in writer.response["output"]} == {"completed"}
    assert writer.response["status"] == "completed"
    assert writer.response["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 29,
    }
    text = ("content_part.added", "{0}.delta", "{0}.done", "content_part.done")
    assert [event["type"].removeprefix("response.") for event in out] == [
        *("created", "in_progress", "output_item.added"),
        *(one.format("reasoning_text") for one in text),
        *("output_item.done", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    out, writer = run([AnswerDelta("x"), AnswerEnd("length", None, Usage(1, 0, 1))])
    assert writer.response["status"] == writer.response["output"][0]["status"] == "incomplete"
    assert writer.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert out[-1]["type"] == "response.incomplete"


def test_an_answer_that_failed() -> None:
    writer = ResponseWriter(ECHO)
    out = writer.begin() + writer.write(AnswerDelta("x"))
    with pytest.raises(ApiError, match="no memory") as caught:
        writer.write(AnswerEnd("abort", None, Usage(1, 0, 0), error="no memory"))
    out.append(writer.fail(caught.value))
    for event in out:
        STREAM_EVENT.validate_python(event, strict=True)
    assert out[-1]["type"] == "response.failed" and out[-1]["response"]["status"] == "failed"
    assert out[-1]["response"]["error"] == {"code": "server_error", "message": "no memory"}


def test_logprobs_are_those_of_the_text() -> None:
    """Also of tokens whose text came later, or in no delta."""

    def shape(entries: list[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {"token": str(e.token_id), "logprob": e.logprob, "bytes": [], "top_logprobs": []}
            for e in entries
        ]

    one, two, three, four = (TokenLogprob(i, -1.0 * i, ()) for i in range(1, 5))
    writer = ResponseWriter(ECHO, shape)
    events = writer.begin()
    answer: list[AnswerEvent] = [
        AnswerDelta(reasoning="hm", logprobs=(one,)),
        AnswerDelta(logprobs=(two,)),
        AnswerDelta(content="x", logprobs=(three,)),
        AnswerDelta(logprobs=(four,)),
        AnswerEnd("stop", 2, Usage(1, 0, 4)),
    ]
    for given_event in answer:
        events += writer.write(given_event)
    for one_event in events:
        STREAM_EVENT.validate_python(one_event, strict=True)
    part = writer.response["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["2", "3", "4"]
    streamed = [
        entry["token"]
        for event in events
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert streamed == ["2", "3", "4"]


def test_items_as_templates_know_them() -> None:
    body = parse(
        [
            {"role": "developer", "content": "b"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "noon"}],
            },
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": "two"},
        ],
        instructions="a",
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}},
    ]
    assert make_messages(body) == [
        {"role": "system", "content": texts("a", "b")},
        {"role": "user", "content": texts("hi")},
        {
            "role": "assistant",
            "content": texts("I look."),
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": texts("sun")},
        {"role": "tool", "tool_call_id": "c2", "name": "time", "content": texts("noon")},
        {"role": "assistant", "content": texts("one")},
        {"role": "assistant", "content": texts("two")},
    ]
    assert make_messages(parse("hi")) == [{"role": "user", "content": texts("hi")}]


def test_what_an_answer_brings_can_be_given_back() -> None:
    _, writer = run(
        [
            AnswerDelta(reasoning="hm"),
            AnswerDelta(content="I look."),
            AnswerDelta(tool_calls=(ToolCallDelta(0, "{}", id="c1", name="weather"),)),
            AnswerEnd("tool_calls", 2, Usage(1, 0, 1)),
        ]
    )
    result = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    given = [{"role": "user", "content": "hi"}, *writer.response["output"], result]
    assert [message["role"] for message in make_messages(parse(given))] == [
        *("user", "assistant", "tool")
    ]


def test_tools_and_choices() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    time = {"type": "function", "name": "time", "parameters": {"type": "object"}}
    for field, expected in [
        (None, (["weather", "time"], False, None)),
        ("auto", (["weather", "time"], False, None)),
        ("required", (["weather", "time"], True, None)),
        ("none", ([], False, None)),
        ({"type": "function", "name": "time"}, (["weather", "time"], False, "time")),
        (allowed, (["weather"], True, None)),
    ]:
        choice = make_tool_choice(parse(tools=[WEATHER, time], tool_choice=field))
        assert ([*choice.tools], choice.required, choice.named) == expected
    body = parse(tools=[WEATHER], parallel_tool_calls=False)
    assert not make_tool_choice(body).parallel
    assert make_options(body, make_tool_choice(body)).tools == [
        {"type": "function", "function": {"name": "weather", "description": "of a city"}}
    ]
    with pytest.raises(ApiError, match=r"tool_choice\.tools: .*found 'x'"):
        make_tool_choice(parse(tools=[WEATHER], tool_choice=allowed | {"tools": [{"name": "x"}]}))


def test_namespaces_and_tools_that_take_a_text() -> None:
    """What Codex offers: an MCP server's functions, and `apply_patch`."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    server = {
        "type": "namespace",
        "name": "mcp__files",
        "description": "",
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
    }
    body = parse(tools=[patch, server])
    offered = OfferedTools(body.tools or ())
    assert [*make_choice(body, offered).tools] == ["apply_patch", "mcp__files__read"]
    shown: Any = make_options(body, make_choice(body, offered)).tools
    assert "start: /.+/" in shown[0]["function"]["description"]
    assert shown[0]["function"]["parameters"]["required"] == ["input"]
    writer = ResponseWriter(ECHO, None, offered)
    out = writer.begin()
    answer: list[AnswerEvent] = [
        AnswerDelta(tool_calls=(ToolCallDelta(0, '{"inp', id="c1", name="apply_patch"),)),
        AnswerDelta(tool_calls=(ToolCallDelta(0, 'ut": "*** Begin\\n"}'),)),
        AnswerDelta(tool_calls=(ToolCallDelta(1, "{}", id="c2", name="mcp__files__read"),)),
        AnswerEnd("tool_calls", 2, Usage(1, 0, 1)),
    ]
    for event in answer:
        out += writer.write(event)
    for one in out:
        STREAM_EVENT.validate_python(one, strict=True)
    custom, call = writer.response["output"]
    assert (custom["type"], custom["name"]) == ("custom_tool_call", "apply_patch")
    assert custom["input"] == "*** Begin\n"
    assert (call["namespace"], call["name"], call["arguments"]) == ("mcp__files", "read", "{}")
    # Both come back as the model wrote them.
    results = [
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": "text"},
    ]
    assistant, first, second = make_messages(parse([custom, call, *results]))
    functions = [one["function"] for one in assistant["tool_calls"]]
    assert functions == [
        {"name": "apply_patch", "arguments": {"input": "*** Begin\n"}},
        {"name": "mcp__files__read", "arguments": "{}"},
    ]
    assert (first["name"], second["name"]) == ("apply_patch", "mcp__files__read")


def test_the_developer_in_the_middle_of_a_conversation() -> None:
    user = {"role": "user", "content": "hi"}
    body = parse([user, {"role": "developer", "content": "Be brief."}])
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    assert make_messages(body)[1] == {"role": "user", "content": texts(reminder)}


def test_effort_and_forms() -> None:
    for effort, kwargs in [
        (None, {}),
        ("low", {"reasoning_effort": "low"}),
        ("none", {"reasoning_effort": "none", "enable_thinking": False}),
    ]:
        body = parse(reasoning={"effort": effort, "summary": "auto"})
        assert make_options(body, make_tool_choice(body)).template_kwargs == kwargs
    schema = {"type": "object"}
    for form, expected in [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_schema": schema}),
        ({"type": "json_schema", "name": "n", "schema": schema}, {"json_schema": schema}),
    ]:
        assert make_structure(parse(text={"format": form, "verbosity": "low"})) == expected
    with pytest.raises(ApiError, match=r"text\.format\.schema: this field is required"):
        make_structure(parse(text={"format": {"type": "json_schema", "name": "n"}}))


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
        {"background": True},
        {"prompt": {"id": "pmpt_1"}},
        {"context_management": [{"type": "compaction"}]},
        {"truncation": "auto"},
    ],
)
def test_what_needs_something_stored_is_refused(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ApiError, match=f"^{name}: ") as caught:
        check_refused(parse(**fields))
    assert (caught.value.status, caught.value.param) == (400, name)
    check_refused(parse(**{name: None}))
    check_refused(parse(background=False, truncation="disabled", store=True))


@pytest.mark.parametrize("kind", ["web_search", "file_search", "mcp", "local_shell"])
def test_tools_that_are_no_functions_are_refused(kind: str) -> None:
    with pytest.raises(ApiError, match=rf"tools\[1\].type: expected function, .*found '{kind}'"):
        make_tool_choice(parse(tools=[WEATHER, {"type": kind, "name": "x"}]))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "item_reference", "id": "msg_1"}, r"input\[0\].type: .*'item_reference'"),
        ({"type": "web_search_call", "id": "ws_1"}, r"input\[0\].type: .*'web_search_call'"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]},
            r"input\[0\].content\[0\]: this model is given text only; found input_image",
        ),
        (
            {"type": "function_call_output", "call_id": "c9", "output": "x"},
            r"input\[0\].call_id: expected that of an earlier call, found 'c9'",
        ),
    ],
)
def test_items_that_are_none_here(item: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        make_messages(parse([item]))
    assert caught.value.status == 400
