"""OpenAI's own client against a live server of the demo model."""

import asyncio
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from srt import Engine, SamplingParams
from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import DEMO_MODEL, LiveServer, live_server, wait_until

register_cpu_ci(est_time=30, suite="per-commit")

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    if not DEMO_MODEL.is_dir():
        pytest.skip("needs the demo model: make demo-model")
    options = ["--served-model-name", "demo", "--served-model-name", "other"]
    with live_server(options=[*options, "--max-total-tokens", "20000"]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def greedy() -> str:
    with Engine(DEMO_MODEL, progress=False, max_total_tokens=2000) as engine:
        params = SamplingParams(temperature=0, max_new_tokens=24)
        return engine.generate(messages=MESSAGES, sampling_params=params).text


def test_a_chat_completion_is_that_of_the_engine(client: openai.OpenAI, greedy: str) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_completion_tokens=24
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (greedy, "assistant")
    assert choice.finish_reason == "stop"
    assert answer.model == "demo"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = client.chat.completions.create(
        model="other", messages=MESSAGES, temperature=0, max_tokens=24
    )
    assert again.choices == answer.choices
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1


def test_a_stream_is_the_answer_in_pieces_with_usage(client: openai.OpenAI, greedy: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            temperature=0,
            max_tokens=24,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", ""]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [greedy, greedy]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_seeds_decide_and_answers_of_one_request_differ(client: openai.OpenAI) -> None:
    def texts(seed: int, n: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=1.2, seed=seed, n=n, max_tokens=16
        )
        return [choice.message.content for choice in answer.choices]

    several = texts(7, 3)
    assert len(set(several)) == 3
    assert texts(7, 3) == several
    assert texts(7, 1) == several[:1]
    assert texts(8, 1) != several[:1]
    assert texts(-1, 1) == texts(2**64 - 1, 1)


def test_stop_texts_and_least_lengths(client: openai.OpenAI, greedy: str) -> None:
    word = greedy.split()[2]
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, stop=[word], max_tokens=24
    )
    assert answer.choices[0].message.content == greedy[: greedy.index(word)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].to_dict()["stop_reason"] == word
    longer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        temperature=0,
        max_tokens=24,
        extra_body={"min_tokens": 24, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1},
    )
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 24
    assert longer.choices[0].finish_reason == "length"


def test_logprobs_of_a_chat_streamed_or_not(client: openai.OpenAI, greedy: str) -> None:
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**arguments).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert "".join(entry.token for entry in whole.content).startswith(greedy)
    for entry in whole.content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert len(entry.top_logprobs) == 3
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**arguments, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content if logprobs is not None else None) or []
    assert [entry.to_dict() for entry in streamed] == [entry.to_dict() for entry in whole.content]


def test_completions_of_texts_and_tokens(client: openai.OpenAI, server: LiveServer) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    answer = client.completions.create(model="demo", prompt=prompts, temperature=0, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1]
    body = httpx.post(f"{server.url}/tokenize", json={"model": "demo", "prompt": prompts[0]})
    ids = body.json()["tokens"]
    tokens = client.completions.create(model="demo", prompt=ids, temperature=0, max_tokens=6)
    assert tokens.choices[0].text == answer.choices[0].text
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": prompts[0]}
    pieces = client.completions.create(
        model="demo", prompt=ids, temperature=0, max_tokens=6, stream=True, echo=True
    )
    joined = "".join(chunk.choices[0].text for chunk in pieces)
    assert joined == prompts[0] + answer.choices[0].text


def test_logprobs_of_a_completion_streamed_or_not(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "demo",
        "prompt": "Party 🎉🎊 and",
        "temperature": 1.5,  # so that characters of several tokens come
        "seed": 3,
        "max_tokens": 40,
        "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**arguments).choices[0].logprobs
    assert whole is not None
    streamed: dict[str, list[Any]] = {name: [] for name in whole.to_dict()}
    for chunk in client.completions.create(**arguments, stream=True):
        part = chunk.choices[0].logprobs
        for name, values in (part.to_dict() if part is not None else {}).items():
            assert isinstance(values, list)
            streamed[name] += values
    assert streamed == whole.to_dict()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_a_prompt_as_the_engine_does(client: openai.OpenAI, max_tokens: int) -> None:
    prompt = "The capital of France is Paris."
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == choice.text
    assert choice.text.startswith(prompt)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text.startswith(token, offset)
    with Engine(DEMO_MODEL, progress=False, max_total_tokens=2000) as engine:
        own = SamplingParams(temperature=0, max_new_tokens=1, return_prompt_logprob=True)
        expected = engine.generate(prompt, own).prompt_logprobs
    assert expected is not None
    values = [None if entry is None else entry.logprob for entry in expected]
    assert logprobs.token_logprobs[: len(values)] == values
    assert len(logprobs.token_logprobs) == len(values) + max_tokens
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens


class Capital(BaseModel):
    country: str
    capital: str


def test_parse_returns_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Capital, temperature=0, max_tokens=80
    )
    assert isinstance(answer.choices[0].message.parsed, Capital)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"guided_choice": ["yes (sure)", "no"]}, ("yes (sure)", "no")),
        ({"guided_regex": "[0-9]{2}"}, tuple(f"{i:02}" for i in range(100))),
        ({"structured_outputs": {"choice": ["a.b"]}}, ("a.b",)),
        ({"ebnf": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"response_format": {"type": "text"}, "regex": "q"}, ("q",)),
    ],
)
def test_extras_of_vllm_and_sglang(
    client: openai.OpenAI, field: dict[str, Any], expected: tuple[str, ...]
) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=20, extra_body=field
    )
    assert answer.choices[0].message.content in expected


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_forced_call_has_arguments_that_follow_the_schema(
    client: openai.OpenAI, choice: Any
) -> None:
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 100,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    answer = client.chat.completions.create(**arguments)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    with client.chat.completions.stream(**arguments) as stream:
        message = stream.get_final_completion().choices[0].message
    (streamed,) = message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    # The conversation goes on with the call and its result.
    messages = [*MESSAGES, answer.choices[0].message.to_dict()]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    after = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=5
    )
    assert after.choices[0].message.tool_calls is None


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
REFUSED: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"temperature": 3}, openai.BadRequestError, "temperature: .*less than or equal to 2, found 3"),
    ({"temperature": "hot"}, openai.BadRequestError, "temperature: .*number, found 'hot'"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ({"n": 0}, openai.BadRequestError, "n: "),
    ({"messages": []}, openai.BadRequestError, "messages: "),
    ({"messages": [{"content": "x"}]}, openai.BadRequestError, r"messages\[0\]\.role.*required"),
    (
        {"model": "gpt"},
        openai.NotFoundError,
        "'gpt' does not exist here; served is 'demo', 'o",
    ),
    ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError, "unknown field frobnicate"),
    ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias: .*token ids"),
    ({"logit_bias": {"99999999": 1}}, openai.BadRequestError, "logit_bias: .*found 99999999"),
    ({"stop": ["a", ""]}, openai.BadRequestError, r"stop\[1\]"),
    ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs: expected logprobs"),
    (
        {"stream": True, "extra_body": {"prompt_logprobs": 1}},
        openai.BadRequestError,
        "stream: expected false",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        openai.BadRequestError,
        r"stream_options\.continuous_usage_stats: ",
    ),
    ({"extra_body": {"regex": "(a"}}, openai.BadRequestError, "regex cannot be used"),
    (
        {"extra_body": {"json_schema": {"type": "integer", "maximum": 10**400}}},
        openai.BadRequestError,
        "json_schema cannot be used",
    ),
    ({"tools": [WEATHER]}, openai.BadRequestError, "tools: "),
    ({"tool_choice": "required"}, openai.BadRequestError, "expected tools with it"),
    ({"messages": [{"role": "user", "content": "x " * 9000}]}, openai.BadRequestError, "context"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        openai.BadRequestError,
        "given text only",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_refusals_name_the_field_what_was_expected_and_what_came(
    client: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIStatusError], message: str
) -> None:
    arguments: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 2}
    with pytest.raises(kind, match=message) as raised:
        client.chat.completions.create(**arguments | change)
    assert isinstance(raised.value.body, dict)
    assert set(raised.value.body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": NaN}', b'{"a":' * 100_000, b'{"a": "\\ud800"}'],
)
def test_a_body_that_is_no_json_object_is_a_400(server: LiveServer, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_suffix_and_best_of_are_refused(client: openai.OpenAI) -> None:
    for change in ({"suffix": "x"}, {"best_of": 3}):
        arguments: dict[str, Any] = {"model": "demo", "prompt": "a"} | change
        with pytest.raises(openai.BadRequestError, match=next(iter(change))):
            client.completions.create(**arguments)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nosuch")


def test_async_streams_end_at_the_server_when_they_are_left(server: LiveServer) -> None:
    async def work() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await client.close()

    asyncio.run(work())
    wait_until(lambda: metric(server, "srt_num_requests_running") == 0)


def metric(server: LiveServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[-1])


def test_the_same_bytes_alone_and_beside_others(client: openai.OpenAI, server: LiveServer) -> None:
    """Also streamed, and on a second server whose cache is too small: requests are retracted."""
    requests: list[dict[str, Any]] = [
        {
            "model": "demo",
            "messages": [{"role": "user", "content": f"Write {i + 2} words about {i}."}],
            "max_tokens": 48,
            "temperature": 0 if i % 2 else 1.0,
            "seed": i,
            "logprobs": True,
            "extra_body": {"ignore_eos": True},
        }
        for i in range(16)
    ]

    def answer(request: dict[str, Any], of: openai.OpenAI = client) -> list[Any]:
        choices = of.chat.completions.create(**request).choices
        return [choice.to_dict() for choice in choices]

    def streamed(request: dict[str, Any]) -> str:
        chunks = client.chat.completions.create(**request, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = [answer(request) for request in requests[:4]]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(answer, requests))
        texts = list(pool.map(streamed, requests[:4]))
    assert together[:4] == alone
    assert texts == [one[0]["message"]["content"] for one in alone]
    options = ["--served-model-name", "demo", "--max-total-tokens", "300", "--disable-graph"]
    with live_server(options=options) as second, ThreadPoolExecutor(16) as pool:
        other = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0)
        assert list(pool.map(lambda request: answer(request, other), requests)) == together
        wait_until(lambda: metric(second, "srt_retractions_total") > 0)


def test_no_number_of_an_answer_is_one_that_json_lacks(client: openai.OpenAI) -> None:
    bias = {str(token): -100 for token in range(2000)}
    answer = client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        logit_bias=bias,
        max_tokens=3,
        logprobs=True,
        top_logprobs=20,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert all(math.isfinite(entry.logprob) for entry in logprobs.content or [])
