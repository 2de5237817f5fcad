"""Which of the prompts that are being prefilled gets how much of a pass.

A prompt that one pass can compute is computed in the order of arrival. One that takes several keeps
others neither from their first token nor from their next one:

- prompts that are shorter get up to half of each of its passes, the shortest first. It has the
  other half, so it goes on, however many of them come;
- while others decode, which they do between its passes, these passes are short where there are many
  of them. A prompt of a few passes goes at full speed: nobody waits long for it.
"""

from collections.abc import Sequence
from typing import TypeVar

# A prompt of more full passes than this gives way to requests that decode, ...
_MANY_PASSES = 4
# ... by passes that are this part of a full one. Shorter ones would use the cores less well.
_SHORT_PASS = 4

T = TypeVar("T")


def share_out(
    prompts: Sequence[tuple[T, int]], chunk: int, *, others_decode: bool
) -> list[tuple[T, int]]:
    """The tokens of the next pass.

    Args:
        prompts: What is being prefilled, in the order of admission, each with the tokens that it
            may take, at least one.
        chunk: Most tokens of a pass.
        others_decode: Whether requests decode between passes.

    Returns:
        Those that get tokens, and how many.
    """
    first_lacks = prompts[0][1]
    if first_lacks <= chunk:
        return _in_order(prompts, chunk)
    if others_decode and first_lacks > _MANY_PASSES * chunk:
        chunk = max(1, chunk // _SHORT_PASS)
    shorter = [prompt for prompt in prompts[1:] if prompt[1] < first_lacks]
    shares = _in_order(sorted(shorter, key=lambda prompt: prompt[1]), chunk // 2)
    left = chunk - sum(count for _, count in shares)
    return [(prompts[0][0], left), *shares]


def _in_order(prompts: Sequence[tuple[T, int]], budget: int) -> list[tuple[T, int]]:
    shares: list[tuple[T, int]] = []
    for who, lacks in prompts:
        if budget == 0:
            break
        shares.append((who, min(budget, lacks)))
        budget -= shares[-1][1]
    return shares
