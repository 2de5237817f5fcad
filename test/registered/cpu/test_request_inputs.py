"""The forms in which prompts, token ids, messages and sampling parameters are accepted, and the one
error for all others.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt import Engine, SamplingParams
from srt.errors import RequestError
from srt.managers.tokenizer import ChatOptions, encode_chat, render_chat
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import TEXT_CONFIG, write_text_model
from srt.test.tiny_tokenizer import VOCAB_SIZE, make_tokenizer

register_cpu_ci(est_time=12, suite="per-commit")

CONFIG = TEXT_CONFIG | {"max_position_embeddings": 128}
GREEDY = SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
IDS = [5, 9, 100]
INTEGER_DTYPES = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("inputs")
    write_text_model(directory, CONFIG)
    with Engine(directory, max_total_tokens=512, progress=False) as engine:
        yield engine


SINGLE = [
    *(np.array(IDS, dtype=dtype) for dtype in INTEGER_DTYPES),
    *(torch.tensor(IDS, dtype=d) for d in (torch.uint8, torch.int16, torch.int32, torch.int64)),
    tuple(IDS),
    [np.int64(i) for i in IDS],
    np.array([[5, 9, 100], [1, 1, 1]]).T[:, 0],
]


@pytest.mark.parametrize("ids", SINGLE, ids=lambda ids: f"{type(ids).__name__}")
def test_one_input_of_token_ids(engine: Engine, ids: Any) -> None:
    expected = engine.generate(input_ids=IDS, sampling_params=GREEDY).token_ids
    assert engine.generate(input_ids=ids, sampling_params=GREEDY).token_ids == expected


@pytest.mark.parametrize(
    "ids",
    [
        [IDS, [7]],
        [np.array(IDS), torch.tensor([7])],
        (tuple(IDS), range(7, 8)),
        np.array([IDS, [7, 8, 9]]),
        torch.tensor([IDS, [7, 8, 9]], dtype=torch.int32),
        [np.array(IDS)],
    ],
    ids=str,
)
def test_several_inputs_of_token_ids(engine: Engine, ids: Any) -> None:
    outputs = engine.generate(input_ids=ids, sampling_params=GREEDY)
    assert len(outputs) == len(ids)
    expected = engine.generate(input_ids=IDS, sampling_params=GREEDY).token_ids
    assert outputs[0].token_ids == expected


@pytest.mark.parametrize(
    "ids",
    [
        5,
        "abc",
        b"abc",
        {1: 2},
        {1, 2},
        [1.0, 2.0],
        [True],
        ["a"],
        [None],
        [1, [2]],
        [[1], None],
        [[1], [None]],
        [[[1]]],
        np.array(5),
        np.array([1.5]),
        np.array([True]),
        np.array([[[1]]]),
        torch.tensor(3),
        torch.tensor([1.0]),
        torch.tensor([[True]]),
    ],
    ids=str,
)
def test_what_are_no_token_ids(engine: Engine, ids: Any) -> None:
    with pytest.raises(RequestError, match="input_ids: expected token ids or a list of lists"):
        engine.generate(input_ids=ids, sampling_params=GREEDY)


@pytest.mark.parametrize(
    "ids", [[], [[]], np.array([], dtype=np.int64), np.empty((1, 0), np.int32)]
)
def test_no_token_ids(engine: Engine, ids: Any) -> None:
    with pytest.raises(RequestError, match="request 0: the prompt is empty"):
        engine.generate(input_ids=ids, sampling_params=GREEDY)


@pytest.mark.parametrize("ids", [[-1], [VOCAB_SIZE], [2**70], np.array([2**63], np.uint64)])
def test_token_ids_out_of_range(engine: Engine, ids: Any) -> None:
    with pytest.raises(RequestError, match="expected token ids from 0 to 258, found"):
        engine.generate(input_ids=ids, sampling_params=GREEDY)
    with pytest.raises(RequestError, match="expected token ids from 0 to 258, found 259"):
        engine.generate("x", SamplingParams(logit_bias={VOCAB_SIZE: 1}))


@pytest.mark.parametrize(
    "prompt",
    [b"text", 5, 1.5, {"a": 1}, ["a", b"b"], ["a", None], [["a"]], {"a"}, object()],
    ids=str,
)
def test_what_are_no_prompts(engine: Engine, prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt: expected a text or a list of texts, found"):
        engine.generate(prompt, GREEDY)


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff", "ok \udfff"])
def test_lone_surrogates(engine: Engine, text: str) -> None:
    with pytest.raises(RequestError, match="the prompt is not Unicode text: character"):
        engine.generate(text, GREEDY)
    with pytest.raises(RequestError, match="the conversation is not Unicode text: character"):
        engine.generate(messages=[{"role": "user", "content": text}], sampling_params=GREEDY)


def test_empty_lists_and_several_texts(engine: Engine) -> None:
    assert engine.generate([], GREEDY) == []
    texts = engine.generate(("a", "b"), [GREEDY, {"max_new_tokens": 1}])
    assert [output.completion_tokens for output in texts] == [3, 1]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("hot", "expected one or 1, found 3"),
        (0.7, "sampling_params: expected SamplingParams, found 0.7"),
        ([0.7], "sampling_params: expected SamplingParams, found 0.7"),
        ({"heat": 1}, "no sampling parameter 'heat'"),
        ({"temperature": "x"}, "sampling parameter temperature"),
        ([GREEDY, GREEDY], "expected one or 1, found 2"),
    ],
    ids=str,
)
def test_sampling_params_of_other_types(engine: Engine, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate("x", params)


def text_of(*messages: Any, **kwargs: Any) -> str:
    return render_chat(make_tokenizer(), messages, ChatOptions(kwargs))


def test_contents_of_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    assert text_of({"role": "user", "content": parts}) == "<s>user:a\nb\nc</s><s>assistant:"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    for message in (call, call | {"content": None}, {"role": "assistant", "content": None}):
        assert text_of(message) == "<s>assistant:</s><s>assistant:"
    assert text_of({"role": "user", "content": []}) == "<s>user:</s><s>assistant:"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("hello", "expected messages with 'role' and 'content', found 'hello'"),
        (None, "expected messages with 'role' and 'content', found None"),
        ({"content": "x"}, "expected messages with 'role' and 'content'"),
        ({"role": "user"}, "expected messages with 'role' and 'content'"),
        ({"role": 5, "content": "x"}, "role is a text; found 5"),
        ({"role": "user", "content": None}, "content is a text or a list of parts; found None"),
        ({"role": "user", "content": b"x"}, "content is a text or a list of parts; found b'x'"),
        ({"role": "user", "content": 5}, "content is a text or a list of parts; found 5"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "given text only; found 'image_url'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "found {'type': 'text'}"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "found {'type': 'text', 't"),
        ({"role": "user", "content": [5]}, "given text only; found 5"),
    ],
    ids=str,
)
def test_what_are_no_messages(message: Any, problem: str) -> None:
    with pytest.raises(RequestError) as info:
        encode_chat(make_tokenizer(), [message])
    assert problem in str(info.value)


@pytest.mark.parametrize(
    "messages", [{"role": "user", "content": "x"}, "hello", 5, [[], "x"], [None]], ids=str
)
def test_what_are_no_conversations(engine: Engine, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        engine.generate(messages=messages, sampling_params=GREEDY)


def test_variables_of_the_template(engine: Engine) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ tools }}"
    messages = [{"role": "user", "content": "x"}]
    assert (
        render_chat(tokenizer, messages, ChatOptions({"enable_thinking": False})) == "x|False|None"
    )
    assert render_chat(tokenizer, messages, ChatOptions({"tools": [1]})) == "x||[1]"
    for name in ("messages", "add_generation_prompt", "tokenize"):
        with pytest.raises(RequestError, match="is not a variable of templates"):
            render_chat(tokenizer, messages, ChatOptions({name: True}))
    for wrong in ("x", [1], {1: 2}):
        with pytest.raises(RequestError, match="chat_template_kwargs: expected an object"):
            render_chat(tokenizer, messages, ChatOptions(wrong))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="chat_template_kwargs go with messages"):
        engine.generate("x", GREEDY, chat_template_kwargs={"a": 1})


def test_a_request_of_a_server_takes_the_same_forms(engine: Engine) -> None:
    engine.add_request("array", input_ids=np.array(IDS), sampling_params={"max_new_tokens": 2})
    parts = [{"type": "text", "text": "x"}]
    engine.add_request(
        "parts",
        messages=[{"role": "user", "content": parts}],
        sampling_params=GREEDY,
        chat_template_kwargs={"enable_thinking": True},
    )
    done = []
    while engine.has_work:
        done += [chunk.rid for chunk in engine.step() if chunk.output is not None]
    assert sorted(done) == ["array", "parts"]
    with pytest.raises(RequestError, match="input_ids: expected"):
        engine.add_request("bad", input_ids=5)  # type: ignore[arg-type]
    assert not engine.has_work


def test_defaults_stand_in_for_none(engine: Engine) -> None:
    """The path of a checkpoint without generation_config.json: greedy."""
    assert not (engine.model_config.path / "generation_config.json").exists()
    none: dict[str, Any] = {"temperature": None, "stop": None, "seed": None}
    for params in (None, SamplingParams(), SamplingParams(**none), {}, none):
        output = engine.generate(input_ids=IDS, sampling_params=params)
        greedy = engine.generate(input_ids=IDS, sampling_params={"temperature": 0})
        assert output.token_ids == greedy.token_ids


def test_penalties_do_not_depend_on_the_batch(engine: Engine) -> None:
    params = [
        SamplingParams(
            temperature=t, seed=3, repetition_penalty=1.5, frequency_penalty=0.5, max_new_tokens=20
        )
        for t in (0, 1, 2)
    ]
    prompts = ["abc", "abcabc", "x"]
    together = engine.generate(prompts, params)
    alone = [engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    plain = engine.generate("abc", SamplingParams(temperature=0, max_new_tokens=20))
    assert plain.token_ids != together[0].token_ids


def test_log_probabilities_are_the_models_own(engine: Engine, tmp_path: Path) -> None:
    """Before biases, penalties and temperature, and for a token that these made certain."""
    own = {"return_logprob": True, "top_logprobs_num": VOCAB_SIZE, "max_new_tokens": 1}
    plain = engine.generate(input_ids=IDS, sampling_params={"temperature": 0, **own})
    biased = engine.generate(
        input_ids=IDS,
        sampling_params={
            "temperature": 2,
            "logit_bias": {77: 1000},
            "repetition_penalty": 2,
            **own,
        },
    )
    assert biased.token_ids == (77,)
    assert plain.logprobs is not None and biased.logprobs is not None
    assert biased.logprobs[0].logprob == dict(plain.logprobs[0].top)[77]
    assert biased.logprobs[0].top == plain.logprobs[0].top
