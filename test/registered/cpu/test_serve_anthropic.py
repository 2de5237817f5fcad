"""Anthropic's official client against a live server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import anthropic.types as official
import httpx
import pytest
from openai import OpenAI
from pydantic import TypeAdapter

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import LiveServer, tiny_chat_server, wait_until

register_cpu_ci(est_time=15, suite="per-commit")

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(official.RawMessageStreamEvent)
# Conversations of agents have messages of tools, which the tiny tokenizer's template refuses.
TEMPLATE = (
    "{% for tool in tools or [] %}<s>tool:{{ tool.function.name }}</s>{% endfor %}"
    "{% for message in messages %}<s>{{ message.role }}:{{ message.reasoning_content or '' }}"
    "{{ message.content }}{{ message.tool_calls or '' }}"
    "{% if not loop.last or add_generation_prompt %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]
# The client of 2026 has no argument for it.
GREEDY = {"temperature": 0}
TOOL: Any = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tiny_chat_server(tmp_path_factory.mktemp("models"), TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def text_of(message: Any) -> str:
    assert [block.type for block in message.content] == ["text"]
    text: str = message.content[0].text
    return text


def test_the_text_is_that_of_chat_completions(
    server: LiveServer, client: anthropic.Anthropic
) -> None:
    chat = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": "What?"},
        {"role": "user", "content": "Anything."},
    ]
    for extra in (GREEDY, {"temperature": 1.0, "top_k": 1}):
        expected = chat.chat.completions.create(
            model=server.model,
            max_tokens=24,
            messages=[{"role": "system", "content": "Be brief."}, *conversation],
            extra_body=extra,
        )
        found = client.messages.create(
            model=server.model,
            max_tokens=24,
            system="Be brief.",
            messages=conversation,
            extra_body=extra,
        )
        assert text_of(found) == expected.choices[0].message.content
        assert expected.usage is not None
        usage = found.usage
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
        assert usage.output_tokens == expected.usage.completion_tokens == 24
        assert found.stop_reason == "max_tokens" and found.model == server.model


def test_a_stream_is_the_message(server: LiveServer, client: anthropic.Anthropic) -> None:
    arguments: Any = {"model": server.model, "max_tokens": 20, "messages": MESSAGES}
    whole = client.messages.create(**arguments, extra_body=GREEDY)
    with client.messages.stream(**arguments, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text_of(whole) == text_of(final)
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 20
    # All but the last token of the prompt were cached by the message before.
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (
        1,
        client.messages.count_tokens(model=server.model, messages=MESSAGES).input_tokens - 1,
    )


def test_every_event_is_what_the_client_knows(server: LiveServer) -> None:
    body = {"model": server.model, "max_tokens": 8, "messages": MESSAGES, "stream": True} | GREEDY
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "context-1m-2025-08-07",
        "x-api-key": "none",
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/messages?beta=true", json=body, headers=headers
    ) as r:
        assert r.status_code == 200
        assert r.headers["content-type"].startswith("text/event-stream")
        lines = list(r.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")
    ]
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"
    for event in events:
        if event["type"] != "ping":
            STREAM_EVENT.validate_python(event, strict=True)


def test_an_async_client_streams_and_asks_at_once(server: LiveServer) -> None:
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="none", max_retries=0
        ) as client:

            async def ask(text: str) -> str:
                async with client.messages.stream(
                    model=server.model,
                    max_tokens=12,
                    messages=[{"role": "user", "content": text}],
                    extra_body=GREEDY,
                ) as stream:
                    return text_of(await stream.get_final_message())

            return list(await asyncio.gather(*(ask(f"question {i}") for i in range(4))))

    together = asyncio.run(run())
    assert together == asyncio.run(run()) and all(together)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_called(server: LiveServer, client: anthropic.Anthropic, choice: Any) -> None:
    arguments: Any = {
        "model": server.model,
        "max_tokens": 200,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": choice | {"disable_parallel_tool_use": True},
        "extra_body": GREEDY,
    }
    whole: Any = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        final: Any = stream.get_final_message()
    assert whole.stop_reason == final.stop_reason == "tool_use"
    for message in (whole, final):
        (call,) = message.content
        assert call.type == "tool_use" and call.name == "weather"
        assert call.input["city"] in ("Rome", "Oslo") and call.input["days"] in (1, 2)
    # The conversation goes on with the tool's result.
    follow_up: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": [block.to_dict() for block in whole.content]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": whole.content[0].id,
                    "content": [{"type": "text", "text": "sun"}],
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ]
    answer = client.messages.create(
        model=server.model, max_tokens=4, messages=follow_up, tools=[TOOL], extra_body=GREEDY
    )
    assert answer.usage.output_tokens == 4


def test_tokens_are_counted_as_the_prompt_has_them(
    server: LiveServer, client: anthropic.Anthropic
) -> None:
    arguments: Any = {
        "model": server.model,
        "messages": MESSAGES,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL],
    }
    counted = client.messages.count_tokens(**arguments).input_tokens
    usage = client.messages.create(**arguments, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    arguments.pop("tools")
    assert client.messages.count_tokens(**arguments).input_tokens < counted


def test_an_answer_ends_at_a_stop_sequence(server: LiveServer, client: anthropic.Anthropic) -> None:
    arguments: Any = {"model": server.model, "max_tokens": 30, "messages": MESSAGES}
    whole = text_of(client.messages.create(**arguments, extra_body=GREEDY))
    stop = whole[4:6]
    found = client.messages.create(**arguments, stop_sequences=[stop], extra_body=GREEDY)
    assert found.stop_reason == "stop_sequence" and found.stop_sequence == stop
    assert (
        "".join(block.text for block in found.content if block.type == "text")
        == (whole[: whole.index(stop)])
    )


def test_an_answer_goes_on_with_a_beginning(
    server: LiveServer, client: anthropic.Anthropic
) -> None:
    chat = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    arguments: Any = {
        "model": server.model,
        "max_tokens": 16,
        "messages": [*MESSAGES, {"role": "assistant", "content": "Well, I"}],
    }
    expected = chat.chat.completions.create(
        **arguments, extra_body=GREEDY | {"continue_final_message": True}
    )
    found = client.messages.create(**arguments, extra_body=GREEDY)
    assert text_of(found) == expected.choices[0].message.content


def test_an_answer_follows_a_schema(server: LiveServer, client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=server.model,
        max_tokens=100,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": TOOL["input_schema"]}},
        extra_body=GREEDY,
    )
    assert json.loads(text_of(message))["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("change", "error", "kind", "message"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "'other' does not exist"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": "x" * 5000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "tokens",
        ),
        (
            {"extra_body": {"nonsense": 1}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "unknown field nonsense",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            anthropic.BadRequestError,
            "invalid_request_error",
            r"expected a function of tools \(weather\), found 'x'",
        ),
    ],
)
def test_errors_are_the_clients_own(
    server: LiveServer,
    client: anthropic.Anthropic,
    change: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    message: str,
) -> None:
    arguments: Any = {"model": server.model, "max_tokens": 4, "messages": MESSAGES} | change
    for stream in (False, True):
        with pytest.raises(error, match=message) as caught:
            client.messages.create(**arguments, stream=stream)
        body: Any = caught.value.body
        assert body["type"] == "error" and body["error"]["type"] == kind


def test_max_tokens_is_required(server: LiveServer) -> None:
    body = {"model": server.model, "messages": MESSAGES}
    answer = httpx.post(f"{server.url}/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "max_tokens: this field is required"


def test_paths_and_methods_that_there_are_not(server: LiveServer) -> None:
    answer = httpx.get(f"{server.url}/v1/messages")
    assert answer.status_code == 405 and answer.json()["type"] == "error"


def test_models_are_listed(server: LiveServer, client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert model.id == server.model == client.models.retrieve(server.model).id
    official.ModelInfo.model_validate(model.to_dict())
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_a_client_that_goes_away_ends_its_answer(
    server: LiveServer, client: anthropic.Anthropic
) -> None:
    def metric(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return float(next((one.split()[-1] for one in lines if one.startswith(name)), 0))

    arguments: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 3900}
    with client.messages.stream(**arguments, extra_body={"temperature": 0.9}) as stream:
        next(iter(stream.text_stream))
    # Had it gone on to its end, it would be counted as ok.
    gone = 'srt_requests_total{outcome="disconnected",path="/v1/messages"}'
    wait_until(lambda: metric(gone) == 1 and metric("srt_num_requests_running") == 0)
