"""The distribution that tokens are drawn from, and how they are drawn."""

import pytest
import torch

from srt.sampling.random_numbers import uniform
from srt.sampling.sampler import TokenSampler, draw, next_token_probs, sample
from srt.sampling.sampling_params import DistributionParams, SamplingParams
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="per-commit")

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.0, 2.5])
FALLING = [1, 4, 3, 0, 2]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1)])
def test_greedy(params: SamplingParams) -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    assert sample(logits, [TokenSampler(params)] * 2, [[], []]) == [1, 3]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature: float) -> None:
    probs, ids = next_token_probs(LOGITS, DistributionParams(temperature=temperature))
    assert ids.tolist() == list(range(5))
    torch.testing.assert_close(probs, (LOGITS / temperature).softmax(-1))


@pytest.mark.parametrize("k", [2, 3, 5, 50])
def test_top_k(k: int) -> None:
    probs, ids = next_token_probs(LOGITS, DistributionParams(temperature=1, top_k=k))
    assert ids.tolist() == FALLING[:k]
    torch.testing.assert_close(probs, LOGITS[FALLING[:k]].softmax(-1))


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    falling = LOGITS.softmax(-1)[FALLING]
    for keep in range(1, 5):
        edge = float(falling[:keep].sum())
        for top_p, expected in ((edge - 1e-3, keep), (edge + 1e-3, keep + 1)):
            probs, ids = next_token_probs(LOGITS, DistributionParams(temperature=1, top_p=top_p))
            assert ids.tolist() == FALLING[:expected]
            torch.testing.assert_close(probs, falling[:expected] / falling[:expected].sum())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token(value: float) -> None:
    logits = torch.stack([LOGITS, LOGITS, LOGITS])
    logits[1, 3] = value
    params = [SamplingParams(temperature=0)] * 2 + [SamplingParams(top_k=1, temperature=2)]
    assert sample(logits, [TokenSampler(p) for p in params], [[]] * 3) == [1, None, 1]


@pytest.mark.parametrize("keep", range(1, 6))
def test_min_p_is_relative_to_the_most_likely(keep: int) -> None:
    falling = LOGITS.softmax(-1)[FALLING]
    share = float(falling[keep - 1] / falling[0]) * (1 - 1e-4)
    for params in (
        DistributionParams(temperature=1, min_p=share),
        DistributionParams(temperature=1, min_p=share, top_k=5),
    ):
        probs, ids = next_token_probs(LOGITS, params)
        assert ids.tolist() == FALLING[:keep]
        torch.testing.assert_close(probs, falling[:keep] / falling[:keep].sum())


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.999, 0.9999999])
def test_top_p_over_a_large_vocabulary(top_p: float) -> None:
    """More candidates than are sorted at first."""
    logits = torch.randn(5000)
    falling, order = logits.softmax(-1).sort(descending=True)
    count = int(((falling.cumsum(-1) - falling) < top_p).sum())
    probs, ids = next_token_probs(logits, DistributionParams(temperature=1, top_p=top_p))
    assert ids.numel() == probs.numel()
    # float32 sums of thousands of probabilities differ by a few tokens at the very end.
    assert abs(ids.numel() - count) <= 0.002 * count
    assert torch.equal(ids[:200], order[: ids.numel()][:200])


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of the two most likely, the first has a probability of 0.62.
    _, ids = next_token_probs(LOGITS, DistributionParams(temperature=1, top_k=2, top_p=0.6))
    assert ids.tolist() == [1]


def test_tiny_temperature_does_not_overflow() -> None:
    probs, ids = next_token_probs(LOGITS * 1e30, DistributionParams(temperature=1e-30))
    assert probs[ids.tolist().index(1)] == 1


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=1.5, top_k=4, seed=0)
    sampler = TokenSampler(params)
    count = 4000
    drawn = torch.tensor([sampler.choose(LOGITS, range(n)) for n in range(count)])
    probs, ids = next_token_probs(LOGITS, params.distribution())
    frequencies = torch.bincount(drawn, minlength=5)[ids] / count
    # Five standard deviations of a binomial frequency.
    assert ((frequencies - probs).abs() < 5 * (probs * (1 - probs) / count).sqrt()).all()
    assert 2 not in drawn


def first_tokens(seed: int | None) -> list[int]:
    sampler = TokenSampler(SamplingParams(temperature=1, seed=seed))
    return [sampler.choose(torch.zeros(1000), range(n)) for n in range(8)]


def test_a_seed_repeats_and_does_not_depend_on_the_batch() -> None:
    params = SamplingParams(temperature=1, seed=11)
    other = SamplingParams(temperature=1, seed=12)
    logits = torch.zeros(3, 1000)
    samplers = [TokenSampler(p) for p in (other, params, other)]
    batched = [sample(logits, samplers, [range(n)] * 3)[1] for n in range(8)]
    assert first_tokens(11) == batched
    assert len(set(batched)) > 1
    assert first_tokens(None) != first_tokens(None)


def test_a_choice_can_be_made_again_and_out_of_order() -> None:
    """A pass that failed is repeated, and speculation asks for several positions at once."""
    sampler = TokenSampler(SamplingParams(temperature=1, seed=3))
    logits = torch.zeros(1000)
    backwards = [sampler.choose(logits, range(n)) for n in reversed(range(8))]
    assert backwards[::-1] == first_tokens(3)
    assert uniform(3, 5) == uniform(3, 5) != uniform(3, 6)


def test_every_seed_is_another_one() -> None:
    """Torch's generator begins alike for seeds that are equal modulo 2**32."""
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1, *(7 + (i << 32) for i in range(50))]
    assert len({tuple(first_tokens(seed)) for seed in seeds}) == len(seeds)


def test_random_numbers_are_uniform_and_stay_as_they_are() -> None:
    numbers = torch.tensor([uniform(1, n) for n in range(20000)], dtype=torch.float64)
    assert ((numbers >= 0) & (numbers < 1)).all()
    # Five standard deviations of each moment.
    for power in (1, 2, 3):
        moment, deviation = 1 / (power + 1), (1 / (2 * power + 1) - 1 / (power + 1) ** 2) ** 0.5
        assert abs(numbers.pow(power).mean() - moment) < 5 * deviation / len(numbers) ** 0.5
    pairs = numbers[:-1] - 0.5, numbers[1:] - 0.5
    assert abs((pairs[0] * pairs[1]).mean()) < 5 / 12 / len(numbers) ** 0.5
    # Seeded outputs of a later version are those of this one.
    assert [uniform(0, 0), uniform(2**64 - 1, 2)] == [0.156742553465558, 0.7954079987620503]


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 0.75, 1 - 2**-53])
def test_draw_finds_where_the_sum_passes_and_never_an_impossible_token(number: float) -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert draw(probs, number) == {0.0: 1, 0.25: 3, 0.5: 3, 0.75: 4}.get(number, 4)
    assert draw(torch.tensor([0.0, 1e-38, 0.0]), number) == 1
