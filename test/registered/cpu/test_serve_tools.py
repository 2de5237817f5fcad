"""Tools and reasoning over HTTP, with OpenAI's official client. The model is tiny and random: what
it is to write is bound by a choice of one text, or by the tools themselves.
"""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import LiveServer, live_server
from srt.test.tiny_llama import make_tensors, quantize, write_checkpoint
from srt.test.tiny_text_model import FP8, TEXT_CONFIG
from srt.test.tiny_tokenizer import VOCAB_SIZE, make_tokenizer

register_cpu_ci(est_time=20, suite="per-commit")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
THINK, THINK_END = VOCAB_SIZE, VOCAB_SIZE + 1
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
FIRST = '{"city": "Rome", "days": 2}'
CALLS = (
    f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {FIRST}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


WEATHER: Any = openai.pydantic_function_tool(Weather, name="weather")
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("tiny")
    config = TEXT_CONFIG | {"vocab_size": VOCAB_SIZE + 2, "max_position_embeddings": 2048}
    write_checkpoint(directory, config, quantize(make_tensors(config)), FP8)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>"]) == [THINK, THINK_END]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    with live_server(directory, ["--max-total-tokens", "8192"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def ask(server: LiveServer, client: openai.OpenAI) -> Any:
    """Creates a chat completion; `write` is what the model writes."""

    def create(write: str | None = None, **options: Any) -> Any:
        extra = dict(options.pop("extra", {}))
        if write is not None:
            extra["guided_choice"] = [write]
        # It may reason first, which a random model does not end.
        bias = {str(THINK): -100}
        given: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": 400}
        given |= {"logit_bias": bias} | options
        return client.chat.completions.create(model=server.model, extra_body=extra, **given)

    return create


def joined(stream: Any) -> dict[str, Any]:
    """What the deltas of a stream are together."""
    result: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            result["content"] += delta.content or ""
            result["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.type == "function"
                    assert call.index == len(result["calls"])
                    result["calls"].append([call.function.name, ""])
                result["calls"][call.index][1] += call.function.arguments
            result["finish"] = choice.finish_reason or result["finish"]
    return result


def whole(response: Any) -> dict[str, Any]:
    """The same of an answer that is not streamed."""
    (choice,) = response.choices
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": [[c.function.name, c.function.arguments] for c in message.tool_calls or ()],
        "finish": choice.finish_reason,
    }


def both(ask: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """An answer, which is the same streamed or not."""
    found = whole(ask(*args, **options))
    assert joined(ask(*args, **options, stream=True)) == found
    return found


def test_calls_that_the_model_decides_on(ask: Any) -> None:
    tools = [WEATHER, CLOCK]
    assert both(ask, CALLS, tools=tools) == {
        "content": "I look.",
        "reasoning": "",
        "calls": [["weather", FIRST], ["clock", "{}"]],
        "finish": "tool_calls",
    }
    one = both(ask, CALLS, tools=tools, parallel_tool_calls=False)
    assert one["calls"] == [["weather", FIRST]]
    only_clock = both(ask, CALLS, tools=[CLOCK])
    assert only_clock["calls"] == [["clock", "{}"]]
    assert f'{{"name": "weather", "arguments": {FIRST}}}' in only_clock["content"]
    for options in ({"tools": tools, "tool_choice": "none"}, {}):
        assert both(ask, CALLS, **options)["content"] == CALLS
    assert whole(ask("Hello.", tools=tools))["finish"] == "stop"


def test_a_call_that_is_cut_off_is_not_one_to_act_on(ask: Any) -> None:
    for max_tokens in (60, 80):
        found = both(ask, CALLS, tools=[WEATHER, CLOCK], max_tokens=max_tokens)
        assert found["finish"] == "length"
        for name, arguments in found["calls"]:
            assert name == "weather"
            assert FIRST.startswith(arguments)


def test_results_go_back_to_the_model(ask: Any) -> None:
    message = ask(CALLS, tools=[WEATHER, CLOCK]).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls
    ]
    answer = ask("It is fine.", messages=[*MESSAGES, message, *results], tools=[WEATHER, CLOCK])
    assert answer.choices[0].message.content == "It is fine."
    message.tool_calls[0].function.arguments = "{"
    with pytest.raises(openai.BadRequestError, match="arguments of a tool call are an object"):
        ask("x", messages=[*MESSAGES, message, *results])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_required_call_follows_the_schema_of_its_function(ask: Any, seed: int) -> None:
    options: Any = {"tools": [WEATHER, CLOCK], "temperature": 1.0, "seed": seed}
    found = both(ask, tool_choice="required", parallel_tool_calls=False, **options)
    ((name, arguments),) = found["calls"]
    assert found["finish"] == "tool_calls"
    assert found["content"] == ""
    if name == "weather":
        Weather.model_validate_json(arguments)
    else:
        assert (name, arguments) == ("clock", "{}")
    for name in ("clock", "weather"):
        choice = {"type": "function", "function": {"name": name}}
        assert both(ask, tool_choice=choice, **options)["calls"][0][0] == name


def test_the_clients_stream_parses_arguments(server: LiveServer, client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=server.model,
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        logit_bias={str(THINK): -100},
    ) as stream:
        events = list(stream)
        completion = stream.get_final_completion()
    (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert isinstance(done.parsed_arguments, Weather)
    calls: Any = completion.choices[0].message.tool_calls
    (call,) = calls
    assert call.function.parsed_arguments == done.parsed_arguments
    parsed = client.chat.completions.parse(
        model=server.model,
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        logit_bias={str(THINK): -100},
    )
    calls = parsed.choices[0].message.tool_calls
    (same,) = calls
    assert same.function.parsed_arguments == done.parsed_arguments


def test_reasoning_is_told_apart_and_bound_by_nothing(ask: Any) -> None:
    """The template begins it; the model ends it when it likes, then follows its schema."""
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    options: Any = {"extra": extra, "logit_bias": {str(THINK_END): 3.0}, "seed": 2}
    options |= {"temperature": 1.0}
    found = both(ask, "Yes.", **options)
    assert found["reasoning"]
    assert found["content"] == "Yes."
    assert found["finish"] == "stop"
    response = ask("Yes.", **options)
    details = response.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < response.usage.completion_tokens
    called = both(ask, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, **options)
    assert called["reasoning"]
    assert called["calls"] == [["clock", "{}"]]
    raw = both(ask, "Yes.", **options | {"extra": extra | {"separate_reasoning": False}})
    assert raw["reasoning"] == ""
    assert raw["content"].endswith("</think>Yes.")
    assert found["reasoning"] in raw["content"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "expected tools with it, found none"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        r"expected a function of tools \(clock\), found 'x'",
    ),
    ({"tools": [CLOCK, CLOCK]}, "tools", "expected different names, found 'clock' twice"),
    (
        {
            "tools": [CLOCK],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "tool_choice",
        "does not go with another form",
    ),
]


@pytest.mark.parametrize(("options", "param", "message"), REFUSED)
def test_what_cannot_be_chosen_is_refused(
    ask: Any, options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(**options)
    assert caught.value.param == param
