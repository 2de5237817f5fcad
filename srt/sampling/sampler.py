"""From logits to the next tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from srt.errors import SrtError
from srt.sampling.sampling_params import SamplingParams


def make_generator(params: SamplingParams) -> torch.Generator:
    """The source of one request's random numbers, so that its output does not depend on what else
    runs.
    """
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def sample(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> list[int]:
    """The next token of each request.

    Args:
        logits: `[B, vocab_size]` float32.
        params: Sampling parameters of each row.
        generators: Random numbers of each row; a greedy row draws none.

    Raises:
        SrtError: A row has NaN or infinity.
    """
    largest, most_likely = logits.max(dim=-1)
    # NaN is the largest of all to max, so that this sees every row that cannot be sampled.
    if not largest.isfinite().all():
        raise SrtError(
            "logits are not finite: the activations left the range of their dtype; "
            "run with dtype bfloat16, which has that of float32"
        )
    tokens: list[int] = most_likely.tolist()
    for row, (row_params, generator) in enumerate(zip(params, generators, strict=True)):
        if not row_params.is_greedy:
            tokens[row] = _draw(logits[row], row_params, generator)
    return tokens


def next_token_probs(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The distribution that a token is drawn from: temperature, then top-k, then top-p over what
    top-k left.

    Args:
        logits: `[vocab_size]` float32.
        params: Not greedy.

    Returns:
        Probabilities in falling order, float32, and the token id of each; both `[n]` with n the
        number of candidates.
    """
    vocab_size = logits.numel()
    count = vocab_size if params.top_k == -1 else min(params.top_k, vocab_size)
    # Shifted before the division, which a tiny temperature would otherwise let overflow.
    scaled = (logits - logits.max()) / params.temperature
    values, ids = (
        scaled.sort(descending=True) if count == vocab_size else scaled.topk(count, sorted=True)
    )
    probs = values.softmax(dim=-1)
    if params.top_p < 1:
        # A token stays while those before it have not reached top_p; the first always does.
        before = probs.cumsum(dim=-1) - probs
        keep = max(1, int((before < params.top_p).sum()))
        probs, ids = probs[:keep] / probs[:keep].sum(), ids[:keep]
    return probs, ids


def _draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    probs, ids = next_token_probs(logits, params)
    return int(ids[torch.multinomial(probs, 1, generator=generator)])
