"""How well a model predicts a text: perplexity over sliding windows.

A window of tokens moves over the text by a stride. Each token but the text's first is scored once,
in the first window that reaches it, given the tokens of that window before it; so the context of a
score is at least `window - stride` tokens after the first window. This is the procedure of
https://huggingface.co/docs/transformers/perplexity, and its results are comparable with others of
the same tokenizer, window and stride only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from srt.errors import RequestError
from srt.mem_cache.allocator import SlotArray
from srt.model_executor.model_runner import ExtendInput, ModelRunner

# Tokens of one forward pass: bounds the memory of their logits, which is this times the vocabulary.
_CHUNK = 256


@dataclass(frozen=True)
class Perplexity:
    """The result.

    Attributes:
        nll: Sum of -ln p over the scored tokens, in nats.
        scored: Number of scored tokens.
    """

    nll: float
    scored: int

    @property
    def perplexity(self) -> float:
        """`exp(nll / scored)`."""
        return math.exp(self.nll / self.scored)


def compute_perplexity(
    runner: ModelRunner,
    token_ids: Sequence[int],
    window: int,
    stride: int,
    progress: Callable[[int], object] = lambda _: None,
) -> Perplexity:
    """Perplexity of a text.

    Args:
        runner: A model whose cache is free and has room for a window.
        token_ids: The text, at least two tokens.
        window: Tokens that the model sees at once.
        stride: Tokens by which windows are apart, 1 to `window`.
        progress: Called with the number of tokens that have been scored since the last call.

    Raises:
        RequestError: The text is too short, or window and stride do not go together or with the
            model.
    """
    longest = min(runner.config.context_length, runner.allocator.available_size)
    if len(token_ids) < 2:
        raise RequestError(f"perplexity needs 2 tokens at least, found {len(token_ids)}")
    if not 2 <= window <= longest:
        raise RequestError(
            f"window {window}: expected 2 to {longest}, the model's longest sequence"
        )
    if not 1 <= stride < window:
        raise RequestError(f"stride {stride}: expected 1 to {window - 1}, less than the window")
    row, slots = runner.req_to_token_pool.alloc(), runner.allocator.alloc(window)
    assert row is not None
    assert slots is not None
    try:
        nll, scored = 0.0, 1  # the first token has no prediction
        for begin in range(0, len(token_ids), stride):
            end = min(begin + window, len(token_ids))
            nll += _window_nll(runner, token_ids[begin:end], scored - begin, row, slots)
            progress(end - scored)
            scored = end
            if end == len(token_ids):
                break
    finally:
        runner.allocator.free(slots)
        runner.req_to_token_pool.free(row)
    return Perplexity(nll, scored - 1)


def _window_nll(
    runner: ModelRunner, token_ids: Sequence[int], first: int, row: int, slots: SlotArray
) -> float:
    """Sum of -ln p of the tokens from the index `first`, at least 1, of a window on."""
    runner.req_to_token_pool.table[row, : len(token_ids)] = slots[: len(token_ids)]
    if first > 1:  # what is only context
        runner.extend([ExtendInput(token_ids[: first - 1], 0, row)])
    nll = 0.0
    # The logits after a token predict the next; nothing is predicted after the last.
    for start in range(first - 1, len(token_ids) - 1, _CHUNK):
        end = min(start + _CHUNK, len(token_ids) - 1)
        logits = runner.extend([ExtendInput(token_ids[start:end], start, row, all_logits=True)])
        targets = torch.tensor(token_ids[start + 1 : end + 1])
        nll -= _log_probs(logits, targets)
    return nll


def _log_probs(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Sum of ln p of the targets `[L]` under logits `[L, vocab_size]`."""
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return float((chosen - logits.logsumexp(1)).double().sum())
