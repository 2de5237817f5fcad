"""Text that is released piece by piece while tokens come."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from srt.configs.hf_transformers import load_tokenizer
from srt.managers.special_tokens import special_token_texts
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_tokenizer import make_tokenizer

register_cpu_ci(est_time=12, suite="per-commit")

DEMO = Path(__file__).parents[3] / ".demo/SmolLM2-135M-Instruct-FP8"


@cache
def byte_tokenizer() -> Any:
    """Single bytes, and three tokens that look like those of chat templates."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@cache
def metaspace_tokenizer() -> Any:
    """Words with a mark instead of a space, and bytes for the rest, as Llama 2's."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = [
        "\u2581Hello",
        "\u2581",
        "a",
        "\u2581world",
        ".",
        "\u2581.",
        "\u65e5",
        "\ufffd",
        "\u2581\u2581",
    ]
    vocab |= {word.replace("_", "\u2581"): 259 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@cache
def demo_tokenizer() -> Any:
    return load_tokenizer(DEMO)


def pieces_of(
    tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        prompt,
        special_tokens=special_token_texts(tokenizer),
        skip_special_tokens=skip,
    )
    pieces = [*map(detokenizer.append, output), detokenizer.finish()]
    assert detokenizer.text == "".join(pieces)
    return pieces


def check_against_decode(tokenizer: Any, prompt: list[int], output: list[int], skip: bool) -> None:
    """The pieces are what decoding everything at once adds to the prompt's text."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if not whole.startswith(before):
        # The output has completed the prompt's last character.
        before = before.removesuffix("\ufffd")
        assert whole.startswith(before)
    assert "".join(pieces_of(tokenizer, prompt, output, skip=skip)) == whole[len(before) :]


# Tokens that begin and continue characters are as likely as all others together.
BYTES = st.one_of(
    st.integers(0, 261),
    st.sampled_from(make_tokenizer().encode("\u65e5\U0001f600\u00e9\ufffd a")),
)
TEXT_BYTES = st.text(max_size=8).map(lambda text: make_tokenizer().encode(text))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.lists(BYTES, max_size=12), st.lists(BYTES, max_size=40), st.booleans())
def test_any_bytes(prompt: list[int], output: list[int], skip: bool) -> None:
    check_against_decode(byte_tokenizer(), prompt, output, skip)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(TEXT_BYTES, st.integers(0, 32))
def test_a_text_cut_anywhere_into_prompt_and_output(ids: list[int], cut: int) -> None:
    check_against_decode(byte_tokenizer(), ids[:cut], ids[cut:], True)


@pytest.mark.skipif(not DEMO.is_dir(), reason="run: make demo-model")
@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    st.lists(st.integers(0, 49151), max_size=8),
    st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300)), max_size=30),
    st.booleans(),
)
def test_any_tokens_of_the_demo_model(prompt: list[int], output: list[int], skip: bool) -> None:
    check_against_decode(demo_tokenizer(), prompt, output, skip)


METASPACE = st.lists(
    st.one_of(
        st.sampled_from([[1], [2], *([i] for i in range(259, 268))]),
        # Bytes come as whole characters: what an invalid run is depends on what follows it.
        st.sampled_from("\u00e9\u65e5\U0001f600").map(lambda c: [3 + b for b in c.encode()]),
    ),
    max_size=15,
).map(lambda groups: [token for group in groups for token in group])


@settings(deadline=None, max_examples=200, derandomize=True)
@given(METASPACE, METASPACE, st.booleans())
def test_words_and_bytes(prompt: list[int], output: list[int], skip: bool) -> None:
    check_against_decode(metaspace_tokenizer(), prompt, output, skip)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("make", [byte_tokenizer, metaspace_tokenizer])
def test_a_character_that_prompt_and_output_share(cut: int, make: Any) -> None:
    tokenizer = make()
    ids = [3 + b for b in "\U0001f600".encode()]
    if make is byte_tokenizer:
        ids = tokenizer.encode("\U0001f600")
    assert "".join(pieces_of(tokenizer, ids[:cut], ids[cut:])) == "\U0001f600"


def test_a_replacement_character_that_was_generated_is_text() -> None:
    ids = byte_tokenizer().encode("a\ufffd")
    assert "".join(pieces_of(byte_tokenizer(), [], ids)) == "a\ufffd"
    # One at the prompt's end is the prompt's.
    assert "".join(pieces_of(byte_tokenizer(), ids, byte_tokenizer().encode("b"))) == "b"


def test_bytes_that_are_never_a_character_do_not_pile_up() -> None:
    """The time of a token does not grow, and text comes out."""

    class Counting:
        longest = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            text: str = byte_tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    tokenizer = Counting()
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    pieces = [detokenizer.append(3 + 255 - 60) for _ in range(300)]
    assert sum(map(len, pieces)) > 280
    assert tokenizer.longest < 64


def stops(
    pieces: str, stop: tuple[str, ...], *, skip: bool = True, min_new_tokens: int = 0
) -> tuple[str, str | None]:
    """Text and stop text of an output with special tokens."""
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(
        tokenizer,
        [],
        stop,
        special_tokens=special_token_texts(tokenizer),
        skip_special_tokens=skip,
        min_new_tokens=min_new_tokens,
    )
    for token in tokenizer.encode(pieces):
        detokenizer.append(token)
        if detokenizer.matched_stop is not None:
            break
    detokenizer.finish()
    return detokenizer.text, detokenizer.matched_stop


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("<|im_end|>", "one<think>\n"),
        ("\n<|im_end|>", "one<think>"),
        ("<|im_end|>\n<|im_start|>", "one<think>\n"),
        ("<|im_end|>\n<|im_start|>user", "one<think>\n"),
        ("end|>\n", "one<think>\n{<|im_}"),
        ("<think>", "one"),
        ("user", "one<think>\n{<|im_end|>}\n{<|im_start|>}"),
        ("<|im_end|>!", None),
    ],
)
def test_stop_texts_with_special_tokens(stop: str, expected: str | None, skip: bool) -> None:
    """Braces hold what is left out with special tokens."""
    text = "one<think>\n<|im_end|>\n<|im_start|>user two"
    found = None if expected is None else stop
    if expected is None:
        expected = "one<think>\n{<|im_end|>}\n{<|im_start|>}user two"
    expected = re.sub(r"\{.*?\}", "", expected) if skip else re.sub(r"[{}]", "", expected)
    assert stops(text, (stop,), skip=skip) == (expected, found)


@pytest.mark.parametrize(
    ("least", "expected"),
    [(0, "a"), (3, "a"), (4, "aEND b"), (8, "aEND b"), (9, "aEND bEND c")],
)
def test_stop_texts_do_not_count_before_min_new_tokens(least: int, expected: str) -> None:
    text, _ = stops("aEND bEND c", ("END",), min_new_tokens=least)
    assert text == expected


def stream(text: str, stop: tuple[str, ...] = (), prompt: str = "") -> tuple[list[str], Any]:
    """Pieces that come out when a text is generated byte by byte."""
    tokenizer = make_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode(prompt), stop)
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(detokenizer.append(token))
        if detokenizer.matched_stop is not None:
            break
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces, detokenizer


@pytest.mark.parametrize(
    "text", ["", "plain", "naïve café", "日本語", "a😀b👩‍👩‍👧c", " lead and trail "]
)
@pytest.mark.parametrize("prompt", ["", "Q: ", "日"])
def test_no_piece_holds_half_a_character(text: str, prompt: str) -> None:
    pieces, _ = stream(text, prompt=prompt)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_stays_incomplete_is_replaced() -> None:
    tokenizer = make_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    for token in tokenizer.encode("ab😀")[:-1]:
        detokenizer.append(token)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == "ab\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("one EEND", ("END",), "one E"),
        ("ababac rest", ("abac",), "ab"),
        ("x\n\nUser: y", ("User:", "\n\n"), "x"),
        ("END", ("END",), ""),
        ("cut 日本", ("本",), "cut 日"),
        ("aXYZb", ("YZ", "XYZb"), "aX"),
    ],
)
def test_stop_texts(text: str, stop: tuple[str, ...], expected: str) -> None:
    pieces, detokenizer = stream(text, stop)
    assert "".join(pieces) == expected
    assert (detokenizer.matched_stop is not None) == (expected != text)


def test_text_is_held_only_while_a_stop_text_may_follow() -> None:
    pieces, _ = stream("a EN d", ("END",))
    assert pieces == ["a", " ", "", "", "EN ", "d", ""]


def test_a_stop_text_within_one_token() -> None:
    class WordTokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(["Hello", " stop it"][i] for i in ids)

    detokenizer = IncrementalDetokenizer(WordTokenizer(), [], ("stop",))
    assert detokenizer.append(0) == "Hello"
    assert detokenizer.append(1) == " "
    assert detokenizer.matched_stop == "stop"
    assert detokenizer.finish() == ""
