"""Which tokens end an answer: those that config.json, generation_config.json, the tokenizer and its
chat template name, all together.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from srt import Engine, SamplingParams
from srt.checkpoint.generation_config import read_eos_token_ids
from srt.configs.hf_transformers import load_tokenizer
from srt.errors import CheckpointError
from srt.managers.special_tokens import end_token_ids, special_token_texts
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_text_model import FP8
from srt.test.tiny_tokenizer import BOS, EOS, UNK, VOCAB_SIZE, make_tokenizer, write_tokenizer

register_cpu_ci(est_time=12, suite="per-commit")

LOOP = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}"
# As real ones write an answer, without the rest.
TEMPLATES = {
    "chatml": (
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + PROMPT + "x{% endif %}",
        {"<|im_end|>"},
    ),
    "llama 3": (
        LOOP + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
        "<|eot_id|>" + PROMPT + "x{% endif %}",
        {"<|eot_id|>"},
    ),
    "gemma": (
        "{{ bos_token }}" + LOOP + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role"
        " }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}",
        {"<end_of_turn>"},
    ),
    "phi 3": (
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + PROMPT + "x{% else %}"
        "{{ eos_token }}{% endif %}",
        {"<|end|>"},
    ),
    "llama 2": (
        LOOP + "{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} "
        "{{ m.content }} </s>{% endif %}{% endfor %}",
        {"</s>"},
    ),
    # The end of a message that is not the last of an answer is another token.
    "harmony": (
        LOOP + "<|start|>{{ m.role }}<|message|>{{ m.content }}{% if m.role == 'assistant' and "
        "loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
        "{% endfor %}",
        {"<|return|>"},
    ),
    "the longest token counts": (LOOP + "{{ m.content }}<|end|>>" + "{% endfor %}", {"<|end|>>"}),
    "no token": (LOOP + "{{ m.content }}\n{% endfor %}", set()),
    "an ordinary text": (LOOP + "{{ m.content }}<stop>{% endfor %}", set()),
    "the next conversation": (LOOP + "{{ m.content }}{% endfor %}{{ bos_token }}", set()),
    "no answers": ("{{ raise_exception('no') }}", set()),
    "broken": ("{% for %}", set()),
}
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<start_of_turn>",
    "<|end|>",
    "<|end|>>",
    "<|return|>",
]


def special_tokenizer(template: str | None) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_after_an_answer(name: str) -> None:
    template, expected = TEMPLATES[name]
    tokenizer = special_tokenizer(template)
    ids = {tokenizer.convert_tokens_to_ids(token) for token in expected}
    assert end_token_ids(tokenizer) == ids | {EOS}


def test_a_tokenizer_without_template_or_end() -> None:
    tokenizer = special_tokenizer(None)
    assert end_token_ids(tokenizer) == {EOS}
    tokenizer.eos_token = None
    assert end_token_ids(tokenizer) == frozenset()


def test_texts_of_special_tokens() -> None:
    tokenizer = special_tokenizer(None)
    texts = special_token_texts(tokenizer)
    assert (texts[UNK], texts[BOS], texts[EOS]) == ("<unk>", "<s>", "</s>")
    assert set(texts.values()) == {"<unk>", "<s>", "</s>", *SPECIAL}
    for token in range(len(tokenizer)):
        assert (tokenizer.decode([token], skip_special_tokens=True) == "") == (token in texts)


def test_all_files_count() -> None:
    a: tuple[Path, dict[str, Any]] = (Path("a"), {"eos_token_id": 5})
    files = [a, (Path("b"), {"eos_token_id": [6, 7]}), (Path("c"), {})]
    assert read_eos_token_ids(files) == {5, 6, 7}
    for value in ("2", True, [1, None], {"a": 1}, 1.0):
        with pytest.raises(CheckpointError, match=r"eos_token_id is neither.*file: b"):
            read_eos_token_ids([a, (Path("b"), {"eos_token_id": value})])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose files disagree about the end: 40, 50, the tokenizer's 2, and 60."""
    directory = tmp_path_factory.mktemp("ends")
    config = TINY_CONFIG | {"vocab_size": VOCAB_SIZE + 8, "eos_token_id": 40}
    write_checkpoint(directory, config, quantize(make_tensors(config)), FP8)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [50, 51]}))
    special_tokenizer(TEMPLATES["chatml"][0]).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(path: Path) -> Any:
    with Engine(path, max_total_tokens=256, progress=False) as engine:
        yield engine


IM_END = VOCAB_SIZE + SPECIAL.index("<|im_end|>")


@pytest.mark.parametrize("token", [40, 50, 51, EOS, IM_END])
def test_every_source_ends_an_answer(engine: Engine, token: int) -> None:
    bias = {token: 1000.0}
    output = engine.generate("hi", SamplingParams(logit_bias=bias))
    assert (output.token_ids, output.matched_stop, output.text) == ((token,), token, "")
    ignoring = engine.generate(
        "hi", SamplingParams(logit_bias=bias, ignore_eos=True, max_new_tokens=3)
    )
    assert ignoring.token_ids == (token,) * 3
    least = engine.generate("hi", SamplingParams(logit_bias=bias, min_new_tokens=4))
    assert len(least.token_ids) == 5
    assert token not in least.token_ids[:4]


def test_a_stop_text_that_is_a_special_token(engine: Engine) -> None:
    bias = {VOCAB_SIZE: 1000.0}  # <|im_start|>, which ends nothing by itself
    params: dict[str, Any] = {"logit_bias": bias, "max_new_tokens": 3}
    output = engine.generate("hi", SamplingParams(**params))
    assert (output.text, output.finish_reason) == ("", "length")
    shown = engine.generate("hi", SamplingParams(**params, skip_special_tokens=False))
    assert shown.text == "<|im_start|>" * 3
    for stop in ("<|im_start|>", "start|><|im", "<|im_start|><|im_start|>"):
        output = engine.generate("hi", SamplingParams(**params, stop=stop))
        assert (output.finish_reason, output.matched_stop) == ("stop", stop)
        assert output.completion_tokens == (1 if stop == "<|im_start|>" else 2)


def test_generation_defaults_of_the_checkpoint(path: Path) -> None:
    """Sampling as generation_config.json says, unless the request or the engine say otherwise."""
    file = path / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({"do_sample": True, "temperature": 3.0, "top_k": 50}))
    try:
        with Engine(path, max_total_tokens=256, progress=False) as engine:
            seeded = [
                engine.generate("hi", SamplingParams(seed=s, max_new_tokens=8, ignore_eos=True))
                for s in range(3)
            ]
            explicit = engine.generate(
                "hi",
                SamplingParams(
                    seed=1, max_new_tokens=8, ignore_eos=True, temperature=3, top_k=50, top_p=1
                ),
            )
            greedy = engine.generate(
                "hi", {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            )
        assert len({output.token_ids for output in seeded}) == 3
        assert explicit.token_ids == seeded[1].token_ids
        with Engine(
            path, max_total_tokens=256, sampling_defaults="greedy", progress=False
        ) as engine:
            output = engine.generate("hi", {"max_new_tokens": 8, "ignore_eos": True})
        assert output.token_ids == greedy.token_ids
    finally:
        file.write_text(before)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        # transformers looks the unknown token up by the unknown token, for ever.
        ("unk_token", "", "RecursionError"),
        ("unk_token", {"__type": "AddedToken", "content": ""}, "RecursionError"),
        ("eos_token", 7, "TypeError"),
        ("bos_token", "\ud800", "surrogates"),
        ("extra_special_tokens", [[]], "TypeError"),
    ],
    ids=str,
)
def test_special_tokens_that_cannot_be_looked_up(
    key: str, value: object, found: str, tmp_path: Path
) -> None:
    """They are errors of the tokenizer's files, not of the first request."""
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=f"the tokenizer cannot be read.*{found}"):
        load_tokenizer(tmp_path)
