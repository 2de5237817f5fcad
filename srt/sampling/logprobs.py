"""Log-probabilities of tokens, by the model's own distribution: before temperature, top-k and
top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """One token and what else could have come.

    Attributes:
        token_id: The token.
        logprob: Its natural log-probability.
        top: The most likely tokens and their log-probabilities, in falling order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of one token a row.

    Args:
        logits: `[B, vocab_size]` float32.
        token_ids: The token of each row.
        top: How many of the most likely tokens to list.
    """
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    return [
        TokenLogprob(
            token,
            float(logprobs[row, token]),
            tuple(zip(ids[row].tolist(), values[row].tolist(), strict=True)),
        )
        for row, token in enumerate(token_ids)
    ]
