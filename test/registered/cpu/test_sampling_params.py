"""Sampling parameters: what is refused, and what stands in for those that are not given."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srt.errors import CheckpointError, RequestError
from srt.sampling.sampling_defaults import get_sampling_defaults
from srt.sampling.sampling_params import DistributionParams, SamplingParams
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

HUGE = 10**5000  # repr refuses it
BAD: dict[str, list[Any]] = {
    "max_new_tokens": [0, 1.5, True, None, "3", np.float32(2)],
    "min_new_tokens": [-1, 1.5, 513, None],
    "temperature": [-0.1, float("nan"), float("inf"), 1e39, HUGE, "1", b"1", True, [1.0], 1j],
    "top_k": [-2, 1.5, "many", True],
    "top_p": [0.0, -1e-300, 1.01, float("nan"), HUGE, "x"],
    "min_p": [-0.1, 1.5, float("nan"), {}],
    "repetition_penalty": [0, -1, 1e-40, 1e39, float("nan"), "x"],
    "presence_penalty": [-2.1, 2.1, float("nan"), None, "x"],
    "frequency_penalty": [-2.1, 3, float("inf"), None],
    "logit_bias": [
        3,
        "x",
        [(1, 2.0)],
        {-1: 1},
        {"-1": 1},
        {1.5: 1},
        {1: "x"},
        {1: float("nan")},
        {1: 1e39},
        {True: 1},
        {"9" * 5000: 1},
    ],
    "top_logprobs_num": [-1, 1.0, None, 1001, 2**70],
    "stop": [("",), (3,), "", b"END", 3, ["a", b"b"], {"a": 1}, "\ud800", ["a\udcff"]],
    "stop_token_ids": [(-1,), [1.0], "12", b"12", 7, [True], {1: 2}, np.array([1.5])],
    "ignore_eos": [1, "false", None],
    "skip_special_tokens": [0, "no"],
    "return_logprob": ["yes", 1],
    "seed": [-1, 2**64, HUGE, 1.0, True, "x"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_named_on_one_line(name: str) -> None:
    for value in BAD[name]:
        match = f"sampling parameter {name}: expected .* found"
        with pytest.raises(RequestError, match=match) as info:
            SamplingParams(**{name: value})
        assert "\n" not in str(info.value)
        assert len(str(info.value)) < 500


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("stop", "END", ("END",)),
        ("stop", None, ()),
        ("stop", [], ()),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", {5}, (5,)),
        ("stop_token_ids", np.array([1, 2], dtype=np.uint8), (1, 2)),
        ("logit_bias", {"7": 1, np.int64(8): np.float32(0.5)}, {7: 1.0, 8: 0.5}),
        ("logit_bias", None, {}),
        ("max_new_tokens", np.int32(4), 4),
        ("max_new_tokens", 2**70, 2**70),
        ("top_k", 0, -1),
        ("top_k", np.int64(-1), -1),
        ("top_k", 2**40, 2**40),
        ("temperature", 1, 1.0),
        ("temperature", Fraction(1, 2), 0.5),
        ("temperature", np.float16(0.5), 0.5),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("ignore_eos", np.True_, True),
    ],
)
def test_what_peers_accept(name: str, value: Any, expected: object) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == expected
    assert type(getattr(params, name)) is type(expected)
    assert SamplingParams.from_mapping({name: value}) == params


def test_params_can_be_compared_and_hashed() -> None:
    assert len({SamplingParams(logit_bias={1: 2}), SamplingParams(logit_bias={1: 2})}) == 1


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 5e-324, np.float64(1e-46)])
def test_a_temperature_that_float32_cannot_tell_from_0_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).distribution().is_greedy


def test_unknown_names() -> None:
    with pytest.raises(RequestError, match="no sampling parameter 'topp'; expected max_new"):
        SamplingParams.from_mapping({"topp": 0.5})


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {"temperature": 0}),
        ({"eos_token_id": 2, "temperature": None}, {"temperature": 0}),
        # Qwen2.5, Llama 3.1, Gemma 3.
        (
            {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20},
            {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20},
        ),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        (
            {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
            {"temperature": 1, "top_k": 64, "top_p": 0.95},
        ),
        # Mistral Small: without do_sample.
        ({"temperature": 0.15}, {"temperature": 0.15}),
        ({"min_p": 0.1}, {"temperature": 1, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"repetition_penalty": 1.1}, {"temperature": 0, "repetition_penalty": 1.1}),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1}),
    ],
)
def test_defaults_of_generation_config(
    tmp_path: Path, generation: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    defaults = get_sampling_defaults(tmp_path)
    assert defaults == DistributionParams(**expected)
    given = SamplingParams(top_k=7, min_p=0).with_defaults(defaults)
    assert (given.top_k, given.min_p) == (7, 0)
    assert given.temperature == defaults.temperature


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("top_p", 0), ("top_k", 1.5), ("min_p", [1])]
)
def test_bad_defaults_name_file_and_key(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(
        CheckpointError, match=rf"has a bad {key}: expected.*generation_config.json"
    ):
        get_sampling_defaults(tmp_path)
