"""OpenAI's official client and `/v1/responses` of a live server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import openai.types.responses as official
import pytest
from pydantic import BaseModel, TypeAdapter

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import LiveServer, tiny_chat_server

register_cpu_ci(est_time=15, suite="per-commit")

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(official.ResponseStreamEvent)
TEMPLATE = (
    "{% for tool in tools or [] %}<s>tool:{{ tool.function.name }}</s>{% endfor %}"
    "{% for message in messages %}<s>{{ message.role }}:{{ message.content }}"
    "{{ message.tool_calls or '' }}</s>{% endfor %}<s>assistant:"
)
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


class Trip(BaseModel):
    """A trip."""

    city: Literal["Rome", "Oslo"]
    flight: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with tiny_chat_server(tmp_path_factory.mktemp("models"), TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_text_is_that_of_chat_completions(server: LiveServer, client: openai.OpenAI) -> None:
    conversation: list[Any] = [
        {"role": "user", "content": "Say something."},
        {"role": "assistant", "content": "What?"},
        {"role": "user", "content": "Anything."},
    ]
    system: Any = {"role": "system", "content": "Be brief."}
    for temperature, seed in ((0.0, None), (1.0, 7)):
        expected = client.chat.completions.create(
            model=server.model,
            max_tokens=24,
            messages=[system, *conversation],
            temperature=temperature,
            seed=seed,
        )
        found = client.responses.create(
            model=server.model,
            max_output_tokens=24,
            instructions="Be brief.",
            input=conversation,
            temperature=temperature,
            extra_body={"seed": seed},
        )
        assert found.output_text == expected.choices[0].message.content
        assert expected.usage is not None and found.usage is not None
        assert found.usage.input_tokens == expected.usage.prompt_tokens
        assert found.usage.output_tokens == expected.usage.completion_tokens
        if expected.choices[0].finish_reason == "length":
            assert found.status == "incomplete" and found.incomplete_details is not None
            assert found.incomplete_details.reason == "max_output_tokens"
        assert found.to_dict()["store"] is False and found.temperature == temperature


def test_a_stream_is_the_response(server: LiveServer, client: openai.OpenAI) -> None:
    arguments: Any = {
        "model": server.model,
        "input": "Say something.",
        "max_output_tokens": 20,
        "temperature": 0,
    }
    whole = client.responses.create(**arguments)
    events = list(client.responses.create(**arguments, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", f"response.{whole.status}")
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert whole.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    with client.responses.stream(**arguments) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_response() if whole.status == "completed" else None
    assert kinds[-1] == f"response.{whole.status}"
    assert final is None or final.output_text == whole.output_text


def test_every_event_is_what_the_client_knows(server: LiveServer) -> None:
    body = {
        "model": server.model,
        "input": "Say something.",
        "max_output_tokens": 8,
        "stream": True,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "tools": [TOOL],
        "store": True,
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
        assert answer.status_code == 200
        lines = list(answer.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(line) for line in data]
    assert names == [event["type"] for event in events] and len(names) > 4
    for event in events:
        STREAM_EVENT.validate_python(event, strict=True)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert len(part["logprobs"]) == events[-1]["response"]["usage"]["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


def test_an_answer_is_parsed(server: LiveServer, client: openai.OpenAI) -> None:
    arguments: Any = {"model": server.model, "input": "Where to?", "max_output_tokens": 200}
    found = client.responses.parse(**arguments, text_format=Trip)
    assert isinstance(found.output_parsed, Trip) and found.status == "completed"

    async def run() -> Trip | None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as asynchronous:
            async with asynchronous.responses.stream(**arguments, text_format=Trip) as stream:
                final = await stream.get_final_response()
            return final.output_parsed

    assert isinstance(asyncio.run(run()), Trip)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_function_is_called(server: LiveServer, client: openai.OpenAI, choice: Any) -> None:
    arguments: Any = {
        "model": server.model,
        "max_output_tokens": 200,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    question: Any = {"role": "user", "content": "Where?"}
    whole = client.responses.create(**arguments, input=[question])
    (call,) = whole.output
    assert isinstance(call, official.ResponseFunctionToolCall) and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    with client.responses.stream(**arguments, input=[question]) as stream:
        final: Any = stream.get_final_response()
    assert final.output[0].arguments == call.arguments and final.status == whole.status
    # The conversation goes on with the function's result.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    follow_up: Any = [question, call.to_dict(), result]
    answer = client.responses.create(
        model=server.model, max_output_tokens=4, tools=[TOOL], input=follow_up
    )
    assert answer.usage is not None and answer.usage.output_tokens <= 4


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type"),
        ({"input": "x" * 5000}, openai.BadRequestError, "input"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
    ],
)
def test_errors_are_the_clients_own(
    server: LiveServer,
    client: openai.OpenAI,
    change: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
) -> None:
    arguments: Any = {"model": server.model, "input": "hi", "max_output_tokens": 4} | change
    for stream in (False, True):
        with pytest.raises(error) as caught:
            client.responses.create(**arguments, stream=stream)
        assert caught.value.param == param
