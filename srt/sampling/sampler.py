"""From logits to the next tokens."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from srt.errors import RequestError
from srt.sampling.grammar import Grammar
from srt.sampling.logit_adjuster import LogitAdjuster
from srt.sampling.random_numbers import random_seed, uniform
from srt.sampling.sampling_params import DistributionParams, SamplingParams

# Candidates that are sorted at first for top-p: nearly always enough, and the whole vocabulary
# takes milliseconds.
_TOP_P_CANDIDATES = 256


class TokenSampler:
    """Chooses the tokens of one request. A choice depends on the logits, the tokens generated
    before and the seed, never on what else runs, and can be made again.

    Args:
        params: The request's parameters.
        prompt_ids: Its prompt.
        grammar: What its output follows, or None.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self._grammar = grammar
        self._distribution = params.distribution()
        self._seed = random_seed() if params.seed is None else params.seed
        self._adjuster = LogitAdjuster(params, prompt_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._ignore_eos = params.ignore_eos

    def takes_largest(self, length: int) -> bool:
        """Whether the token after `length` generated ones is the one with the largest logit."""
        if self._grammar is not None:
            return False
        return self._distribution.is_greedy and not self._adjuster.concerns(length)

    def choose(
        self,
        logits: Tensor,
        output_ids: Sequence[int],
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> int:
        """The token that follows `output_ids`.

        Args:
            logits: `[vocab_size]` float32, without NaN.
            output_ids: Tokens generated so far.
            eos_token_ids: The model's end-of-sequence tokens.

        Raises:
            RequestError: The parameters leave no token possible.
        """
        is_adjusted = self._adjuster.concerns(len(output_ids))
        if is_adjusted:
            ending = self._stop_ids if self._ignore_eos else self._stop_ids | eos_token_ids
            logits = self._adjuster.adjust(logits, output_ids, ending)
        if self._grammar is not None:
            mask = torch.from_numpy(self._grammar.mask(output_ids))
            logits = logits.masked_fill(~mask, -math.inf)
        if (is_adjusted or self._grammar is not None) and not math.isfinite(logits.max()):
            raise RequestError("the sampling parameters leave no token that is possible")
        token = self._draw(logits, len(output_ids))
        if self._grammar is not None:
            # While the model computes on the token.
            self._grammar.prepare([*output_ids, token])
        return token

    def _draw(self, logits: Tensor, length: int) -> int:
        if self._distribution.is_greedy:
            return int(logits.numpy().argmax())
        probs, ids = next_token_probs(logits, self._distribution)
        return int(ids[draw(probs, uniform(self._seed, length))])


def sample(
    logits: Tensor,
    samplers: Sequence[TokenSampler],
    outputs: Sequence[Sequence[int]],
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[int | None]:
    """The next token of each request.

    Args:
        logits: `[B, vocab_size]` float32.
        samplers: That of each row.
        outputs: The tokens that each row's request has generated so far.
        eos_token_ids: The model's end-of-sequence tokens.

    Returns:
        Token ids; None for a row with NaN or infinity, which has none.
    """
    array = logits.numpy()
    tokens: list[int | None] = array.argmax(axis=-1).tolist()
    for row, (sampler, output_ids) in enumerate(zip(samplers, outputs, strict=True)):
        # NaN is the largest of all to argmax, so that this sees every row that cannot be sampled.
        if not math.isfinite(array[row, tokens[row]]):
            tokens[row] = None
        elif not sampler.takes_largest(len(output_ids)):
            tokens[row] = sampler.choose(logits[row], output_ids, eos_token_ids)
    return tokens


def draw(probs: Tensor, number: float) -> int:
    """The index at which the running sum of `probs`, `[n]` float32, passes `number` of its total;
    one whose probability is 0 is never drawn.
    """
    sums = probs.numpy().cumsum(dtype=np.float64)
    index = int(sums.searchsorted(number * sums[-1], side="right"))
    # The product may round up to the total.
    return min(index, int(sums.searchsorted(sums[-1], side="left")))


def next_token_probs(logits: Tensor, params: DistributionParams) -> tuple[Tensor, Tensor]:
    """The distribution that a token is drawn from: temperature, then top-k, then top-p and min-p
    over what top-k left.

    Args:
        logits: `[vocab_size]` float32.
        params: Not greedy.

    Returns:
        Probabilities, float32, and the token id of each; both `[n]` with n the number of
        candidates. In falling order if any of the limits is set.
    """
    vocab_size = logits.numel()
    # Shifted before the division, which a tiny temperature would otherwise let overflow.
    scaled = (logits - logits.max()) / params.temperature
    if params.top_k != -1:
        values, ids = scaled.topk(min(params.top_k, vocab_size), sorted=True)
        probs = values.softmax(dim=-1)
    elif params.top_p < 1 or params.min_p > 0:
        probs, ids = _most_likely(scaled.softmax(dim=-1), params)
    else:
        return scaled.softmax(dim=-1), torch.arange(vocab_size)
    keep = probs.numel()
    if params.top_p < 1:
        # A token stays while those before it have not reached top_p; the first always does.
        before = probs.cumsum(dim=-1) - probs
        keep = max(1, int((before < params.top_p).sum()))
    if params.min_p > 0:
        keep = min(keep, int((probs >= params.min_p * probs[0]).sum()))
    if keep < probs.numel():
        probs, ids = probs[:keep] / probs[:keep].sum(), ids[:keep]
    return probs, ids


def _most_likely(probs: Tensor, params: DistributionParams) -> tuple[Tensor, Tensor]:
    """As many of the most likely tokens, in falling order, as top-p and min-p can keep."""
    count = min(_TOP_P_CANDIDATES, probs.numel())
    while True:
        values, ids = probs.topk(count, sorted=True)
        enough = values.sum() >= params.top_p or values[-1] < params.min_p * values[0]
        if enough or count == probs.numel():
            return values, ids
        count = min(8 * count, probs.numel())
