"""How the tokens of one request are chosen and when it ends."""

import math
from dataclasses import dataclass

from srt.errors import RequestError
from srt.sampling.random_numbers import SEED_LIMIT


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, checked when they are made.

    Attributes:
        max_new_tokens: Most tokens to generate, at least 1.
        temperature: Divisor of the logits; 0 takes the most likely token (greedy) and ignores the
            next three.
        top_k: Sample among the k most likely tokens; -1 for all.
        top_p: Sample among the fewest most likely tokens whose probabilities reach this sum, in (0,
            1].
        min_p: Sample among tokens at least this share as likely as the most likely one, in [0, 1].
        stop: Texts that end the generation; the output ends before them. A single text may be given
            as it is.
        stop_token_ids: Tokens that end the generation besides the model's own; not part of the
            text.
        ignore_eos: Generate on past the model's end-of-sequence tokens.
        seed: Seed of this request's random numbers, from 0 to 2**64 - 1; each gives others. None
            takes fresh ones.
        return_logprob: Return the log-probability of each generated token.
        top_logprobs_num: With it, those of this many of the most likely tokens.
        return_prompt_logprob: Return them for the prompt's tokens too; such a prompt is computed
            anew even where the cache has a prefix of it.

    Raises:
        RequestError: A value out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    return_prompt_logprob: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check(
            "max_new_tokens",
            self.max_new_tokens,
            _is_int(self.max_new_tokens, 1),
            "an integer >= 1",
        )
        _check(
            "temperature",
            self.temperature,
            _is_real(self.temperature) and self.temperature >= 0,
            "a finite number >= 0",
        )
        _check(
            "top_k",
            self.top_k,
            self.top_k == -1 or _is_int(self.top_k, 1),
            "an integer >= 1, or -1 for all tokens",
        )
        _check(
            "top_p", self.top_p, _is_real(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"
        )
        _check(
            "min_p", self.min_p, _is_real(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]"
        )
        _check(
            "top_logprobs_num",
            self.top_logprobs_num,
            _is_int(self.top_logprobs_num, 0),
            "an integer >= 0",
        )
        _check(
            "stop", stop, all(isinstance(s, str) and s for s in stop), "texts that are not empty"
        )
        ids = self.stop_token_ids
        _check("stop_token_ids", ids, all(_is_int(i, 0) for i in ids), "token ids >= 0")
        seed = self.seed
        _check(
            "seed",
            seed,
            seed is None or (_is_int(seed, 0) and seed < SEED_LIMIT),
            "an integer from 0 to 2**64 - 1, or None",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature == 0 or self.top_k == 1


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok:
        raise RequestError(f"sampling parameter {name}: expected {expected}, found {value!r}")
