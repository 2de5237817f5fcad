"""Penalties, biases and the least length, against transformers' processors and the definitions of
OpenAI's interface.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from srt.errors import RequestError
from srt.sampling.logit_adjuster import LogitAdjuster
from srt.sampling.sampler import TokenSampler, next_token_probs
from srt.sampling.sampling_params import DistributionParams, SamplingParams
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="per-commit")

VOCAB_SIZE = 40
TOKEN_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
LOGITS = st.lists(
    st.floats(-30, 30, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE, unique=True
).map(torch.tensor)


def adjusted(
    logits: Tensor,
    prompt: list[int],
    output: list[int],
    ending: tuple[int, ...] = (),
    **params: Any,
) -> Tensor:
    adjuster = LogitAdjuster(SamplingParams(**params), prompt)
    before = logits.clone()
    result = adjuster.adjust(logits, output, ())
    assert torch.equal(logits, before)
    return result


@settings(deadline=None, max_examples=50, derandomize=True)
@given(LOGITS, TOKEN_IDS, TOKEN_IDS, st.floats(0.1, 5))
def test_repetition_penalty_is_that_of_transformers(
    logits: Tensor, prompt: list[int], output: list[int], penalty: float
) -> None:
    ids = torch.tensor([prompt + output], dtype=torch.int64)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None])[0]
    result = adjusted(logits, prompt, output, repetition_penalty=penalty)
    torch.testing.assert_close(result, expected, rtol=3e-7, atol=1e-30)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(LOGITS, TOKEN_IDS, TOKEN_IDS, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalties_are_those_of_openai(
    logits: Tensor, prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence; the prompt does not
    count.
    """
    expected = logits.double()
    for token in range(VOCAB_SIZE):
        count = output.count(token)
        expected[token] -= count * frequency + float(count > 0) * presence
    result = adjusted(
        logits, prompt, output, presence_penalty=presence, frequency_penalty=frequency
    )
    assert torch.equal(result, expected.float())


@settings(deadline=None, max_examples=50, derandomize=True)
@given(LOGITS, st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100)))
def test_logit_bias_is_added(logits: Tensor, bias: dict[int, float]) -> None:
    expected = logits.double()
    for token, value in bias.items():
        expected[token] += value
    assert torch.equal(adjusted(logits, [1], [2], logit_bias=bias), expected.float())


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    LOGITS,
    st.floats(0.1, 5),
    st.one_of(st.just(-1), st.integers(1, 2 * VOCAB_SIZE)),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_the_distribution_is_that_of_transformers(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = hf.TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k != -1:
        scores = hf.TopKLogitsWarper(top_k)(None, scores)
    falling = scores[0].softmax(-1).double().sort(descending=True).values
    edges = falling.cumsum(-1)
    scores = hf.TopPLogitsWarper(top_p)(None, scores)
    scores = hf.MinPLogitsWarper(min_p)(None, scores)
    expected = scores[0].softmax(-1)
    params = DistributionParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs, ids = next_token_probs(logits, params)
    result = torch.zeros(VOCAB_SIZE).index_put((ids,), probs)
    near = (edges - top_p).abs().min() < 1e-6 or (falling - min_p * falling[0]).abs().min() < 1e-6
    # A token at the very edge of top-p or min-p is kept by one of the sums and not by the other.
    tolerance = float(falling[(result > 0).sum() - 1 :].max()) + 1e-6 if near else 1e-6
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=tolerance)


def test_penalties_follow_the_output_token_by_token() -> None:
    generator = np.random.default_rng(0)
    prompt, output = (
        generator.integers(0, 300, 50).tolist(),
        generator.integers(0, 300, 400).tolist(),
    )
    logits = torch.from_numpy(generator.normal(size=300).astype(np.float32) * 5)
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.1)
    grown = LogitAdjuster(params, prompt)
    # Tokens are also taken back, as by a retry.
    for length in [*range(400), 100, 101, 399]:
        fresh = LogitAdjuster(params, prompt).adjust(logits, output[:length], ())
        assert torch.equal(grown.adjust(logits, output[:length], ()), fresh)


def test_order_is_repetition_then_presence_then_bias() -> None:
    logits = torch.tensor([8.0, -8.0, 8.0])
    params: dict[str, Any] = {
        "repetition_penalty": 2,
        "presence_penalty": 1,
        "logit_bias": {0: 10, 2: 10},
    }
    assert adjusted(logits, [0], [1], **params).tolist() == [14.0, -17.0, 18.0]


def test_tokens_that_would_end_the_output_are_impossible_until_min_new_tokens() -> None:
    logits = torch.tensor([3.0, 9.0, 7.0, 8.0])
    params = SamplingParams(temperature=0, min_new_tokens=2, stop_token_ids=[3, 10**6])
    sampler = TokenSampler(params)
    eos = frozenset([1, -1])
    assert [sampler.choose(logits, [0] * n, eos) for n in range(4)] == [2, 2, 1, 1]
    ignoring = TokenSampler(SamplingParams(temperature=0, min_new_tokens=2, ignore_eos=True))
    assert ignoring.choose(logits, [], eos) == 1
    everything = TokenSampler(SamplingParams(min_new_tokens=1, stop_token_ids=range(4)))
    with pytest.raises(RequestError, match="no token that is possible"):
        everything.choose(logits, [])


@pytest.mark.parametrize("temperature", [0, 1e-37, 1.0, 3e38])
def test_extreme_values_stay_numbers(temperature: float) -> None:
    """Nothing becomes NaN or infinite that a draw would then fail on."""
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=1e-37,
        logit_bias={0: 3e38, 1: -3e38},
        seed=1,
    )
    logits = torch.tensor([3e38, -3e38, 1.0, -math.inf])
    token = TokenSampler(params, [0, 1, 2, 3]).choose(logits, [0])
    assert token in ((0, 1, 2) if temperature == 3e38 else (0, 2))


def test_plain_greedy_never_leaves_the_fast_path() -> None:
    assert TokenSampler(SamplingParams(temperature=0)).takes_largest(0)
    assert TokenSampler(SamplingParams(temperature=0, min_new_tokens=3)).takes_largest(3)
    for params in ({"min_new_tokens": 3}, {"logit_bias": {1: 1}}, {"presence_penalty": 1}):
        adjusting = SamplingParams.from_mapping({"temperature": 0, **params})
        assert not TokenSampler(adjusting).takes_largest(2)
