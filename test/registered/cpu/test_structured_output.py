"""Output that follows JSON schemas, regular expressions and grammars."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srt import Engine, SamplingParams
from srt.cli.main import main
from srt.entrypoints.outputs import GenerateOutput
from srt.errors import RequestError
from srt.sampling.grammar import GrammarCompiler
from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import DEMO_MODEL

register_cpu_ci(est_time=25, suite="per-commit")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Describe somebody."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if not DEMO_MODEL.is_dir():
        pytest.skip("needs the demo model: make demo-model")
    with Engine(DEMO_MODEL, progress=False, max_total_tokens=20_000) as engine:
        yield engine


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 120, "temperature": 0} | values))


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_json_follows_its_schema(engine: Engine, temperature: float) -> None:
    all_params = [params(json_schema=PERSON, temperature=temperature, seed=i) for i in range(6)]
    for output in engine.generate(messages=[MESSAGES] * 6, sampling_params=all_params):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), PERSON)


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", 'gr"een', 7]},
        {"const": {"x": [1]}},
        {"type": "string", "pattern": "^[a-z]{2,4}$"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "format": "date"},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda one, two: {
                "type": "object",
                "properties": {"a": one, "b c": two},
                "required": ["a"],
                "additionalProperties": False,
            },
            inner,
            inner,
        ),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(schema=SCHEMAS, seed=st.integers(0, 9))
def test_random_schemas_are_followed(engine: Engine, schema: dict[str, Any], seed: int) -> None:
    # Far from what a model would write by itself, so that the grammar decides.
    own = params(json_schema=schema, temperature=3.0, seed=seed, max_new_tokens=300)
    output = engine.generate(messages=MESSAGES, sampling_params=own)
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), schema)


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        ({"regex": "[A-Z][a-z]{2,5} (yes|no)\\."}, "[A-Z][a-z]{2,5} (yes|no)\\."),
        ({"grammar": 'start: "x" /[0-9]{1,4}/ (" " "y")~2'}, "x[0-9]+ y y"),
        ({"grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"json_schema": {"type": "object"}}, r"\{.*\}"),
        ({"json_schema": "true"}, ".+"),
    ],
)
def test_text_follows_what_it_is_given(
    engine: Engine, structure: dict[str, Any], expected: str
) -> None:
    for seed in range(2):
        own = params(**structure, temperature=1.0, seed=seed, max_new_tokens=100)
        output = engine.generate(messages=MESSAGES, sampling_params=own)
        if output.finish_reason == "stop":
            assert re.fullmatch(expected, output.text, re.DOTALL), output.text


def test_it_depends_on_nothing_that_runs_beside_it_and_neither_do_the_others(
    engine: Engine,
) -> None:
    def own(i: int) -> SamplingParams:
        structure = {"json_schema": PERSON} if i % 2 else {}
        return params(**structure, temperature=0.9, seed=i, max_new_tokens=24, return_logprob=True)

    together = engine.generate(messages=[MESSAGES] * 6, sampling_params=[own(i) for i in range(6)])
    for i, output in enumerate(together):
        alone = engine.generate(messages=MESSAGES, sampling_params=own(i))
        assert (alone.token_ids, alone.logprobs) == (output.token_ids, output.logprobs)


def test_a_retracted_request_goes_on_where_it_was(engine: Engine) -> None:
    long = {"type": "array", "items": PERSON, "minItems": 20}
    own = [params(json_schema=long, temperature=0.9, seed=i, max_new_tokens=50) for i in range(3)]
    prompts = [[5, 9, i] for i in range(3)]
    expected = engine.generate(input_ids=prompts, sampling_params=own)
    with Engine(DEMO_MODEL, progress=False, max_total_tokens=100) as small:
        found = small.generate(input_ids=prompts, sampling_params=own)
        assert small.scheduler.num_retractions > 0
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_a_stream_that_ends_early_is_cut_off_within_the_grammar(engine: Engine) -> None:
    own = params(json_schema=PERSON, max_new_tokens=5)
    output = engine.generate(messages=MESSAGES, sampling_params=own)
    assert output.finish_reason == "length"
    assert output.text.startswith('{"name": "')


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (
            {"json_schema": {"not": {}}},
            r'json_schema cannot be used: Unimplemented keys: \["not"\]',
        ),
        ({"json_schema": {"type": "strange"}}, "Invalid type: strange"),
        ({"json_schema": {"$ref": "http://127.0.0.1:9/x"}}, "json_schema cannot be used: .*x"),
        ({"json_schema": {"$ref": "file:///etc/passwd"}}, "json_schema cannot be used"),
        ({"json_schema": {"$ref": "#"}}, "json_schema cannot be used"),
        ({"json_schema": False}, "Unsatisfiable"),
        ({"json_schema": {"type": "integer", "maximum": 10**400}}, "json_schema cannot be used"),
        ({"json_schema": {"type": "number", "minimum": -(10**400)}}, "json_schema cannot be used"),
        ({"json_schema": "{"}, "expected a JSON schema"),
        ({"json_schema": [1]}, "expected a JSON schema"),
        ({"json_schema": "[" * 100_000}, "expected a JSON schema"),
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group"),
        ({"regex": 7}, "sampling parameter regex: expected a text, found 7"),
        ({"regex": "a" * 300_000}, "at most 262,144 characters"),
        ({"grammar": "start: nothing"}, "grammar cannot be used: .*nothing"),
        ({"grammar": "x ::="}, "grammar cannot be used"),
        ({"regex": "a", "grammar": "b"}, "found regex and grammar"),
        ({"regex": "a", "ignore_eos": True}, "does not go with ignore_eos"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_it_runs(
    engine: Engine, structure: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(messages=MESSAGES, sampling_params=params(**structure))
    assert not engine.has_work


HOSTILE = [
    {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    {"regex": "(a|b|ab)*c" * 500},
    {"regex": "(.*a){25}"},
    {"json_schema": {"type": "string", "pattern": "(x+x+)+y", "minLength": 100_000}},
    {"json_schema": {"enum": [f"{i:05}" for i in range(20_000)]}},
    {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    {"grammar": "start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(50))},
    {"grammar": 'start: start start | "a"'},
]


@pytest.mark.parametrize("structure", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_sources_end_soon_and_harm_nobody_else(
    engine: Engine, structure: dict[str, Any]
) -> None:
    """They run or are refused; requests beside them get what they get alone."""
    plain = params(max_new_tokens=8)
    expected = engine.generate(messages=MESSAGES, sampling_params=plain).text
    try:
        both = [params(**structure, max_new_tokens=8), plain]
        outputs = engine.generate(messages=[MESSAGES] * 2, sampling_params=both)
    except RequestError:
        return
    assert outputs[1].text == expected
    assert outputs[0].error is None or "grammar" in outputs[0].error


def test_a_grammar_that_is_being_compiled_keeps_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = params(json_schema=PERSON, seed=1, temperature=0.9, max_new_tokens=24)
    expected = engine.generate(input_ids=[5, 9], sampling_params=own).token_ids
    plain = engine.generate(input_ids=[5, 8], sampling_params=params(max_new_tokens=6)).token_ids
    may_compile, compile_now = threading.Event(), GrammarCompiler.compile

    def compile_later(compiler: GrammarCompiler, source: tuple[str, str]) -> Any:
        assert may_compile.wait(60)
        return compile_now(compiler, source)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    for rid in ("bound", "aborted"):
        engine.add_request(rid, input_ids=[5, 9], sampling_params=own, check_grammar=False)
    assert engine.step() == []  # returns, although it has nothing to compute
    more = params(max_new_tokens=6)
    engine.add_request("plain", input_ids=[5, 8], sampling_params=more)
    engine.abort("aborted")
    found = outputs_of(engine, 2)
    assert found["plain"].token_ids == plain
    assert found["aborted"].finish_reason == "abort"
    assert engine.has_work
    may_compile.set()
    assert outputs_of(engine, 1)["bound"].token_ids == expected
    assert not engine.has_work


def outputs_of(engine: Engine, count: int) -> dict[str, GenerateOutput]:
    """Runs requests until so many have ended."""
    outputs: dict[str, GenerateOutput] = {}
    while len(outputs) < count:
        chunks = engine.step()
        outputs |= {str(one.rid): one.output for one in chunks if one.output is not None}
    return outputs


def test_what_is_not_checked_and_cannot_be_compiled_ends_alone(engine: Engine) -> None:
    own = params(max_new_tokens=4)
    expected = engine.generate(input_ids=[5, 8], sampling_params=own).token_ids
    bad = params(json_schema={"not": {}})
    engine.add_request("bad", input_ids=[5, 9], sampling_params=bad, check_grammar=False)
    engine.add_request("good", input_ids=[5, 8], sampling_params=own)
    found = outputs_of(engine, 2)
    assert "json_schema cannot be used" in (found["bad"].error or "")
    assert found["good"].token_ids == expected


def test_a_grammar_that_takes_more_and_more_work_ends_with_an_error(engine: Engine) -> None:
    """Each further letter has many more readings."""
    ambiguous = params(
        grammar='start: start start | "a"',
        max_new_tokens=400,
        min_new_tokens=390,
        temperature=1.0,
        seed=1,
    )
    outputs = engine.generate(
        input_ids=[[5, 9], [5, 8]], sampling_params=[ambiguous, params(max_new_tokens=4)]
    )
    assert "cannot follow its grammar any further" in (outputs[0].error or "")
    assert outputs[1].error is None


def test_a_schema_of_many_optional_fields_is_followed(engine: Engine) -> None:
    fields = {f"p{i}": {"type": "integer", "minimum": 0, "maximum": 9} for i in range(400)}
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    own = params(json_schema=schema, temperature=1.0, seed=3, max_new_tokens=60)
    output = engine.generate(messages=MESSAGES, sampling_params=own)
    assert output.error is None
    if output.finish_reason == "stop":
        jsonschema.validate(json.loads(output.text), schema)


def test_what_leaves_no_token_ends_the_request_with_an_error(engine: Engine) -> None:
    outputs = engine.generate(
        messages=[MESSAGES] * 2,
        sampling_params=[
            params(regex="yes", min_new_tokens=100),
            params(max_new_tokens=4),
        ],
    )
    assert "no token that is possible" in (outputs[0].error or "")
    assert outputs[1].error is None


def test_the_command_takes_a_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: Engine
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(PERSON))
    command = ["generate", "--model", str(DEMO_MODEL), "--quiet", "--prompt", "Describe somebody."]
    command += ["--temperature", "0", "--max-new-tokens", "120"]
    assert main([*command, "--json-schema", str(file)]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), PERSON)
    assert main([*command, "--json-schema", str(tmp_path / "none")]) == 2
    assert "cannot read the JSON schema" in capsys.readouterr().err
