"""Anthropic's Messages API without a server: what requests become, and what becomes of answers."""

from typing import Any

import anthropic.types as official
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given, settings
from pydantic import TypeAdapter, ValidationError

from srt.serve.anthropic.conversation import (
    check_refused,
    make_messages,
    make_options,
    make_structure,
    make_tool_choice,
)
from srt.serve.anthropic.message_writer import SIGNATURE, MessageWriter
from srt.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from srt.serve.anthropic.shapes import error_body, is_anthropic_path
from srt.serve.errors import ApiError
from srt.serve.generation.answers import AnswerDelta, AnswerEnd, AnswerEvent, ToolCallDelta, Usage
from srt.test.answer_events import answer_events
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="per-commit")

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(official.RawMessageStreamEvent)
USER = {"role": "user", "content": "hi"}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}


def parse(*messages: Any, **fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 5, "messages": list(messages)} | fields
    )


def texts(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def run(events: list[AnswerEvent], **options: Any) -> tuple[list[dict[str, Any]], MessageWriter]:
    writer = MessageWriter("msg_1", "m", 20, **options)
    out = writer.begin()
    for event in events:
        out += writer.write(event)
    return out, writer


def accumulate(events: list[dict[str, Any]]) -> Any:
    """The message that Anthropic's client makes of a stream."""
    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        if event["type"] != "ping":
            valid = STREAM_EVENT.validate_python(event, strict=True)
            snapshot = accumulate_event(event=valid, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot


def check_order(events: list[dict[str, Any]]) -> None:
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    opened, is_open, block = 0, False, ""
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == opened
            opened, is_open, block = opened + 1, True, event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == opened - 1
            expected = {
                "text": ("text_delta",),
                "thinking": ("thinking_delta", "signature_delta"),
                "tool_use": ("input_json_delta",),
            }[block]
            assert event["delta"]["type"] in expected
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == opened - 1
            is_open = False
        else:
            assert not is_open
    assert kinds.count("message_start") == kinds.count("message_stop") == 1


@settings(max_examples=300, deadline=None)
@given(answer_events())
def test_any_answer_makes_a_valid_stream(events: list[AnswerEvent]) -> None:
    out, writer = run(events)
    check_order(out)
    message = official.Message.model_validate(writer.message, strict=True)
    deltas = [event for event in events if isinstance(event, AnswerDelta)]
    blocks = writer.message["content"]
    joined = "".join(block.get("text", "") for block in blocks)
    assert joined == "".join(delta.content for delta in deltas)
    joined = "".join(block.get("thinking", "") for block in blocks)
    assert joined == "".join(delta.reasoning for delta in deltas)
    written = "".join(
        event["delta"].get("partial_json", "")
        for event in out
        if "index" in event and "delta" in event
    )
    assert written == "".join(call.arguments for delta in deltas for call in delta.tool_calls)
    broken = [b for b in blocks if b["type"] == "tool_use" and "INVALID_JSON" in b["input"]]
    if not broken:
        # What the client makes of the stream is what it is told without one.
        assert accumulate(out).to_dict() == message.to_dict()


def test_blocks_of_thinking_text_and_calls() -> None:
    call = ToolCallDelta(0, id="call_1", name="weather")
    out, writer = run(
        [
            AnswerDelta(reasoning="Let me "),
            AnswerDelta(reasoning="see."),
            AnswerDelta(content="I look it up."),
            AnswerDelta(tool_calls=(call,)),
            AnswerDelta(tool_calls=(ToolCallDelta(0, '{"city": '),)),
            AnswerDelta(tool_calls=(ToolCallDelta(0, '"Rome"}'),)),
            AnswerEnd("tool_calls", 2, Usage(20, 16, 9, 4)),
        ]
    )
    assert writer.message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE},
            {"type": "text", "text": "I look it up."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": 9,
            "output_tokens_details": {"thinking_tokens": 4},
        },
    }
    assert [event["type"].removeprefix("content_block_") for event in out] == [
        *("message_start", "ping", "start", "delta", "delta", "delta", "stop"),
        *("start", "delta", "stop", "start", "delta", "delta", "stop"),
        *("message_delta", "message_stop"),
    ]
    assert out[0]["message"]["content"] == [] and out[0]["message"]["stop_reason"] is None


def test_thinking_that_is_not_to_be_shown_is_an_empty_block() -> None:
    end = AnswerEnd("stop", None, Usage(1, 0, 1))
    out, writer = run([AnswerDelta(reasoning="secret"), end], shows_thinking=False)
    assert writer.message["content"] == [
        {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    ]
    assert "secret" not in str(out)


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (("stop", None), "end_turn", None),
        (("stop", 2), "end_turn", None),
        (("stop", "\n\n"), "stop_sequence", "\n\n"),
        (("length", None), "max_tokens", None),
        (("tool_calls", 2), "tool_use", None),
    ],
)
def test_stop_reasons(end: Any, reason: str, sequence: str | None) -> None:
    _, writer = run([AnswerDelta("x"), AnswerEnd(end[0], end[1], Usage(1, 0, 1))])
    assert writer.message["stop_reason"] == reason
    assert writer.message["stop_sequence"] == sequence


def test_arguments_that_are_cut_off_or_no_object() -> None:
    for text, found in [
        ('{"a": 1, "b": [2, 3', {"a": 1, "b": [2, 3]}),
        ("", {}),
        ("nonsense", {"INVALID_JSON": "nonsense"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ]:
        call = ToolCallDelta(0, text, id="c", name="f")
        end = AnswerEnd("length", None, Usage(1, 0, 1))
        _, writer = run([AnswerDelta(tool_calls=(call,)), end])
        assert writer.message["content"][0]["input"] == found


def test_an_answer_that_failed_is_an_error() -> None:
    with pytest.raises(ApiError, match="no memory") as caught:
        run([AnswerEnd("abort", None, Usage(1, 0, 0), error="no memory")])
    assert caught.value.status == 500
    with pytest.raises(ApiError, match="ended by the server"):
        run([AnswerEnd("abort", None, Usage(1, 0, 0))])


def test_errors_have_the_shape_that_the_client_reads() -> None:
    from anthropic.types import ErrorResponse

    for status, kind in [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ]:
        body = error_body(ApiError(status, "why"), "req_1")
        assert ErrorResponse.model_validate(body, strict=True).error.type == kind
        assert body["request_id"] == "req_1" and body["error"]["message"] == "why"
    assert error_body(ApiError(413, "why"))["error"]["type"] == "request_too_large"
    paths = ["/v1/messages", "/v1/messages/count_tokens", "/v1/messagesx", "/v1/models"]
    assert [is_anthropic_path(path) for path in paths] == [True, True, False, False]


def test_messages_as_templates_know_them() -> None:
    body = parse(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sun"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no clock"}],
                },
                {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    )
    calls = [
        {
            "id": "t1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Rome"}},
        },
        {"id": "t2", "type": "function", "function": {"name": "time", "arguments": {}}},
    ]
    failed = texts("The tool failed:", "no clock")
    assert make_messages(body) == [
        {"role": "system", "content": texts("a", "b")},
        {"role": "user", "content": texts("hi")},
        {
            "role": "assistant",
            "content": texts("I look."),
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": texts("sun")},
        {"role": "tool", "tool_call_id": "t2", "name": "time", "content": failed},
        {"role": "user", "content": texts("and?")},
    ]


def test_neighbours_of_one_role_are_one_message() -> None:
    body = parse(
        {"role": "system", "content": "y"},
        USER,
        {"role": "user", "content": texts("there")},
        system="x",
    )
    assert make_messages(body) == [
        {"role": "system", "content": texts("x", "y")},
        {"role": "user", "content": texts("hi", "there")},
    ]


def test_the_system_in_the_middle_of_a_conversation() -> None:
    """Claude Code writes it after the user's message; Qwen's templates, say, refuse it there."""
    body = parse(USER, {"role": "system", "content": "Skills: none."})
    reminder = "<system-reminder>\nSkills: none.\n</system-reminder>"
    assert make_messages(body) == [{"role": "user", "content": texts("hi", reminder)}]


def test_what_is_new_in_each_request_does_not_keep_the_rest_from_the_cache() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"}
    body = parse(USER, system=[billing, {"type": "text", "text": "You are an agent."}])
    assert make_messages(body)[0] == {"role": "system", "content": texts("You are an agent.")}
    assert make_messages(parse(USER, system=[billing]))[0]["role"] == "user"


def test_an_answer_goes_on_with_the_assistants_last_message() -> None:
    options = make_options(
        parse(USER, {"role": "assistant", "content": "I"}), make_tool_choice(parse(USER))
    )
    assert options.continue_final_message and not options.add_generation_prompt
    options = make_options(parse(USER), make_tool_choice(parse(USER)))
    assert options.add_generation_prompt and not options.continue_final_message


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        (None, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: Any, kwargs: dict[str, Any]) -> None:
    body = parse(USER, thinking=thinking)
    assert make_options(body, make_tool_choice(body)).template_kwargs == kwargs


def test_tools_and_choices() -> None:
    for field, expected in [
        (None, (False, None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (False, None, False)),
        ({"type": "any"}, (True, None, True)),
        ({"type": "tool", "name": "weather"}, (False, "weather", True)),
    ]:
        body = parse(USER, tools=[WEATHER], tool_choice=field)
        choice = make_tool_choice(body)
        assert (choice.required, choice.named, choice.parallel) == expected
        assert make_options(body, choice).tools == [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "of a city",
                    "parameters": {"type": "object"},
                },
            }
        ]
    body = parse(USER, tools=[WEATHER], tool_choice={"type": "none"})
    assert not make_tool_choice(body).tools
    assert make_options(body, make_tool_choice(body)).tools is None


def test_a_schema_that_the_answer_follows() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    assert make_structure(parse(USER)) == {}
    assert make_structure(parse(USER, output_format=form)) == {"json_schema": schema}
    config = {"effort": "high", "format": form}
    body = parse(USER, output_config=config)
    assert make_structure(body) == {"json_schema": schema}
    assert make_options(body, make_tool_choice(body)).template_kwargs == {
        "reasoning_effort": "high"
    }
    with pytest.raises(ApiError, match="found both"):
        make_structure(parse(USER, output_config=config, output_format=form))


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "server_tool_use"])
def test_what_is_no_text_is_refused(kind: str) -> None:
    block = {"type": kind, "source": {"type": "url", "url": "http://127.0.0.1/x"}}
    with pytest.raises(ApiError, match=rf"messages\[0\].content\[1\]: .*text only; found {kind}"):
        make_messages(parse({"role": "user", "content": [*texts("see"), block]}))
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    conversation = [
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    place = r"messages\[1\].content\[0\].content\[0\]"
    with pytest.raises(ApiError, match=f"{place}: .*found {kind}"):
        make_messages(parse(*conversation))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: expected none"),
        ({"container": "c"}, "container: expected none"),
    ],
)
def test_what_does_not_exist_here_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        check_refused(parse(USER, **fields))
    check_refused(parse(USER, **dict.fromkeys(fields)))


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "bash_20250124", "name": "bash"}, r"tools\[0\].type: .*found 'bash_20250124'"),
        ({"name": "f"}, r"tools\[0\].input_schema: this field is required"),
    ],
)
def test_tools_that_the_client_does_not_run_are_refused(tool: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        make_tool_choice(parse(USER, tools=[tool]))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9"}]}],
            "expected the id of an earlier tool_use, found 't9'",
        ),
        (
            [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}],
            "a message of the user has no thinking",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
            ],
            "expected a message with the results of its tool calls",
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}],
            "an assistant's message has no tool_result",
        ),
    ],
)
def test_conversations_that_are_wrong(messages: list[Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        make_messages(parse(*messages))
    assert caught.value.status == 400


def test_requests_that_the_client_can_write_are_read() -> None:
    """Every field of the client's own types is known: none is refused for its name alone."""
    from anthropic.types.beta import message_create_params as params

    known = MessagesRequest.model_fields.keys()
    given = params.MessageCreateParamsBase.__annotations__.keys()
    # What changes an answer and does not exist here is refused by its name.
    refused = {"thread", "fallbacks", "fallback_credit_token", "compaction", "billing_policy"}
    assert set(given) - known <= refused
    with pytest.raises(ValidationError, match="fallbacks"):
        parse(USER, fallbacks=[])
    assert CountTokensRequest.model_fields.keys() < known
