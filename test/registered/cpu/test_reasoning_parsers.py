"""Reasoning is told from what follows it, and binds no answer to a schema before it has ended."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.entrypoints.engine import Engine
from srt.errors import RequestError
from srt.sampling.detokenizer import IncrementalDetokenizer
from srt.sampling.grammar import GrammarCompiler
from srt.sampling.sampling_params import SamplingParams
from srt.serve.parsers.choice import AnswerParsers, ChatAnswerParser, ToolChoice
from srt.serve.parsers.reasoning import MISTRAL_THINK, THINK, ReasoningFormat, ReasoningSplitter
from srt.serve.parsers.tool_calls import Tool
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import write_text_model
from srt.test.tiny_tokenizer import BOS, EOS, UNK, VOCAB_SIZE, make_tokenizer

register_cpu_ci(est_time=8, suite="per-commit")

TOOLS = {"add": Tool("add", {"type": "object"})}
BEGIN_ID, END_ID = 50, 51


def read(parser: ChatAnswerParser | None, pieces: Sequence[str]) -> tuple[str, str, list[str]]:
    """Reasoning, content and the names of calls."""
    assert parser is not None
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    reasoning = "".join(delta.reasoning for delta in deltas)
    names = [call.name for delta in deltas for call in delta.tool_calls if call.name]
    return reasoning, "".join(delta.content for delta in deltas), names


REASONED: list[tuple[ReasoningFormat, str, bool, tuple[str, str]]] = [
    (THINK, "<think>\nHm, 1 < 2.\n</think>\n\nYes.", False, ("Hm, 1 < 2.", "Yes.")),
    (THINK, "Hm.\n\nSo.</think>Yes.", True, ("Hm.\n\nSo.", "Yes.")),
    (THINK, "<think>Twice.</think>Yes.", True, ("Twice.", "Yes.")),
    (THINK, "<think>\n\n</think>\n\nYes. ", False, ("", "Yes. ")),
    (THINK, "</think>Yes.", True, ("", "Yes.")),
    (THINK, "never ends\n", True, ("never ends", "")),
    (THINK, "<think>cut </thin", False, ("cut </thin", "")),
    (THINK, "No <think> at the start.", False, ("", "No <think> at the start.")),
    (THINK, "A </think> alone.", False, ("", "A </think> alone.")),
    (THINK, "a</think>b</think>c<think>d", True, ("a", "b</think>c<think>d")),
    (THINK, "  Yes.", False, ("", "  Yes.")),
    (THINK, " <thin", False, ("", " <thin")),
    (THINK, "", True, ("", "")),
    (MISTRAL_THINK, "[THINK]Hm. [1][/THINK]Yes.", False, ("Hm. [1]", "Yes.")),
]


@pytest.mark.parametrize(("form", "text", "inside", "expected"), REASONED)
def test_reasoning_is_told_from_content(
    form: ReasoningFormat, text: str, inside: bool, expected: tuple[str, str]
) -> None:
    for pieces in ([text], list(text), [text[:9], text[9:]]):
        splitter = ReasoningSplitter(form, begins_inside=inside)
        assert read(ChatAnswerParser(splitter, None), pieces) == (*expected, [])


PIECES = st.sampled_from(["<think>", "</think>", "<thin", "</", "a", "b c", " ", "\n", "<", ">"])


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    parts=st.lists(PIECES, max_size=10), cuts=st.lists(PIECES, max_size=10), inside=st.booleans()
)
def test_where_a_text_is_cut_makes_no_difference(
    parts: list[str], cuts: list[str], inside: bool
) -> None:
    text = "".join(parts)
    at = len("".join(cuts)) % (len(text) + 1)

    def split(pieces: Sequence[str], *, verbatim: bool = False) -> tuple[str, str]:
        splitter = ReasoningSplitter(THINK, begins_inside=inside, verbatim=verbatim)
        return read(ChatAnswerParser(splitter, None), pieces)[:2]

    whole = split([text])
    assert split(list(text)) == whole
    assert split([text[:at], text[at:]]) == whole
    # Nothing is lost but marks and the white space around them.
    found = "".join("".join(whole).split())
    assert found in ("".join(text.split()), *_without_marks("".join(text.split())))
    assert "".join(split(list(text), verbatim=True)) == text


def _without_marks(text: str) -> list[str]:
    """What may be left of a text without its first mark, its first end, or both."""
    first = text.removeprefix("<think>")
    return [first, first.replace("</think>", "", 1), text.replace("</think>", "", 1)]


def make_parsers(**tokens: int) -> AnswerParsers:
    template = "{{ tools }}<tool_call><think>"
    return AnswerParsers(template, "auto", "auto", {}, {f"<{k}>": v for k, v in tokens.items()})


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n<think>\n", "<think>"])
def test_a_prompt_that_ends_inside_begins_the_reasoning(prompt: str) -> None:
    parsers = make_parsers()
    plan = parsers.plan(ToolChoice(TOOLS), prompt, SamplingParams(), separate_reasoning=True)
    text = (
        'Perhaps <tool_call>?</think>\n\nYes.\n<tool_call>{"name": "add", "arguments": {}}'
        "</tool_call>"
    )
    for pieces in ([text], list(text)):
        assert read(plan.make(), pieces) == ("Perhaps <tool_call>?", "Yes.", ["add"])


def test_a_prompt_that_has_reasoned_already_begins_with_content() -> None:
    """As templates write with `enable_thinking` false."""
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    plan = make_parsers().plan(ToolChoice(), prompt, SamplingParams(), separate_reasoning=True)
    assert read(plan.make(), ["Yes."]) == ("", "Yes.", [])


def test_reasoning_that_is_not_separated_is_content_as_written() -> None:
    plan = make_parsers().plan(ToolChoice(), "", SamplingParams(), separate_reasoning=False)
    assert plan.make() is None
    choice = ToolChoice(TOOLS)
    plan = make_parsers().plan(choice, "", SamplingParams(), separate_reasoning=False)
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    thought = f"<think>\nNot yet: {call}\n</think>\n\n"
    assert read(plan.make(), list(thought + call)) == ("", thought, ["add"])


@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        ("<think>\n", {"think": BEGIN_ID, "/think": END_ID}, (END_ID,)),
        ("", {"think": BEGIN_ID, "/think": END_ID}, (BEGIN_ID, END_ID)),
        ("<think>", {}, ()),
        ("", {"/think": END_ID}, ()),
        ("<think>\n\n</think>\n\n", {"think": BEGIN_ID, "/think": END_ID}, ()),
    ],
)
def test_a_schema_binds_what_follows_the_reasoning(
    prompt: str, tokens: dict[str, int], expected: tuple[int, ...]
) -> None:
    params = SamplingParams(json_schema={"type": "object"})
    plan = make_parsers(**tokens).plan(ToolChoice(), prompt, params, separate_reasoning=True)
    assert plan.params.reasoning_tokens == expected
    parser = plan.make()
    if not expected:  # the whole answer follows the schema, and is content
        assert parser is None
    elif prompt:
        assert read(parser, ["Hm.</think>{}"]) == ("Hm.", "{}", [])


def test_the_mask_is_free_until_reasoning_ends() -> None:
    compiler = GrammarCompiler(make_tokenizer(), VOCAB_SIZE, [EOS])
    one, other = (make_tokenizer().encode(letter)[0] for letter in "ab")
    tokens: Any = SamplingParams(regex="b", reasoning_tokens=[one])
    grammar = compiler.make(tokens)
    assert grammar is not None
    free = np.ones(VOCAB_SIZE, dtype=np.bool_)
    free[EOS] = False
    assert np.array_equal(grammar.mask(()), free)
    assert np.array_equal(grammar.mask((other, other)), free)
    assert grammar.mask((other, one)).nonzero()[0].tolist() == [other]
    assert grammar.mask((other, one, other)).nonzero()[0].tolist() == [EOS]
    grammar = compiler.make(SamplingParams(regex="b", reasoning_tokens=[BOS, one]))
    assert grammar is not None
    assert grammar.mask(()).nonzero()[0].tolist() == [BOS, other]
    assert np.array_equal(grammar.mask((BOS,)), free)
    assert grammar.mask((BOS, other, one)).nonzero()[0].tolist() == [other]
    assert grammar.mask((other,)).nonzero()[0].tolist() == [EOS]
    with pytest.raises(RequestError, match="reasoning_tokens: expected one or two token ids"):
        SamplingParams(reasoning_tokens=[1, 2, 3])


def test_an_engine_reasons_before_it_follows_a_schema(tmp_path: Path) -> None:
    with Engine(str(write_text_model(tmp_path)), progress=False) as engine:
        assert engine.tokenizer is not None
        (end,) = engine.tokenizer.encode("q")
        params = SamplingParams(
            max_new_tokens=200,
            temperature=1.0,
            seed=1,
            logit_bias={end: 3.0},
            regex="yes",
            reasoning_tokens=[end],
        )
        output = engine.generate("x", params)
        at = output.token_ids.index(end)
        assert at > 0
        assert engine.tokenizer.decode(output.token_ids[at + 1 : -1]) == "yes"
        assert output.finish_reason == "stop"


def test_special_tokens_that_are_shown_are_where_they_were() -> None:
    tokenizer = make_tokenizer()
    special = {UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
    begun, *rest = tokenizer.encode("é")
    ids = [BOS, *tokenizer.encode("a"), UNK, begun, BOS, begun, *rest, UNK]

    def text(**options: Any) -> str:
        detokenizer = IncrementalDetokenizer(tokenizer, [5], special_tokens=special, **options)
        for token in ids:
            detokenizer.append(token)
        detokenizer.finish()
        return detokenizer.text

    assert text(shown=(BOS,)) == "<s>a\ufffd<s>é"
    assert text(shown=(BOS, UNK), skip_special_tokens=False) == text(skip_special_tokens=False)
    assert text(shown=(BOS, UNK)) == text(skip_special_tokens=False)
