"""The perplexity of a text by an engine's model, as `srt perplexity` tells it."""

import sys
import time
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from srt.entrypoints.engine import Engine
from srt.errors import RequestError
from srt.managers.tokenizer import encode
from srt.perplexity.sliding_window import Perplexity, compute_perplexity


@dataclass(frozen=True)
class PerplexityReport:
    """How well a model predicts a text.

    Attributes:
        result: The perplexity.
        tokens: Tokens of the text.
        window: Tokens that the model saw at once.
        stride: Tokens by which windows were apart.
        seconds: What it took.
    """

    result: Perplexity
    tokens: int
    window: int
    stride: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "perplexity": self.result.perplexity,
            "nll": self.result.nll,
            "tokens": self.tokens,
            "scored_tokens": self.result.scored,
            "window": self.window,
            "stride": self.stride,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return (
            f"perplexity {self.result.perplexity:.4f} of {self.tokens} tokens, "
            f"window {self.window}, stride {self.stride}, {self.seconds:.1f} s"
        )


def measure_perplexity(
    engine: Engine,
    text: str,
    *,
    tokens: int | None,
    window: int,
    stride: int,
    show_progress: bool,
) -> PerplexityReport:
    """Perplexity of a text.

    Args:
        engine: No request runs in it, and its cache has room for a window.
        text: The text.
        tokens: How many of its first tokens count; None for all.
        window: Tokens that the model sees at once.
        stride: Tokens by which windows are apart, less than the window.
        show_progress: Show a progress bar on stderr if that is a terminal.

    Raises:
        RequestError: The checkpoint has no tokenizer, or as of `compute_perplexity`.
    """
    if engine.tokenizer is None:
        raise RequestError(f"{engine.config.model_path} has no tokenizer")
    ids = encode(engine.tokenizer, text)[:tokens]
    start = time.perf_counter()
    silent = not (show_progress and sys.stderr.isatty())
    with tqdm(total=len(ids) - 1, unit="token", leave=False, disable=silent) as bar:
        result = compute_perplexity(engine.model_runner, ids, window, stride, bar.update)
    return PerplexityReport(result, len(ids), window, stride, time.perf_counter() - start)
