"""How the tokens of one request are chosen and when it ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from srt.errors import RequestError
from srt.sampling import checks
from srt.sampling.random_numbers import SEED_LIMIT
from srt.values import describe

_OPENAI_PENALTY = "a number from -2 to 2"
# Each takes some 150 bytes a token; OpenAI's API ends at 20.
MAX_TOP_LOGPROBS = 1000


@dataclass(frozen=True)
class DistributionParams:
    """How the distribution that a token is drawn from is made of the model's. A checkpoint's
    generation_config.json gives defaults for these.

    Attributes:
        temperature: Divisor of the logits; 0, or what float32 cannot tell from it (below 1.2e-38),
            takes the most likely token (greedy) and ignores the next three.
        top_k: Sample among the k most likely tokens; -1 or 0 for all.
        top_p: Sample among the fewest most likely tokens whose probabilities reach this sum, in (0,
            1].
        min_p: Sample among tokens at least this share as likely as the most likely one, in [0, 1].
        repetition_penalty: Divides the logits above 0 of all tokens that the prompt or the output
            has, and multiplies those below 0; 1 for none.

    Raises:
        RequestError: A value out of range.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        above_0 = math.nextafter(0, 1)
        self._set("temperature", checks.number("temperature", self.temperature, _FINITE, 0))
        top_k = checks.integer(
            "top_k", self.top_k, "an integer >= 1, or -1 or 0 for all tokens", -1
        )
        self._set("top_k", top_k or -1)
        self._set("top_p", checks.number("top_p", self.top_p, "a number in (0, 1]", above_0, 1))
        self._set("min_p", checks.number("min_p", self.min_p, "a number in [0, 1]", 0, 1))
        penalty = checks.number(
            "repetition_penalty",
            self.repetition_penalty,
            "a number > 0",
            checks.FLOAT32_TINY,
        )
        self._set("repetition_penalty", penalty)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature < checks.FLOAT32_TINY or self.top_k == 1


_FINITE = "a finite number >= 0"
DISTRIBUTION_NAMES = tuple(entry.name for entry in fields(DistributionParams))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, checked when they are made.

    None stands for a default. That of the first five is the engine's (`sampling_defaults`): what
    the checkpoint's generation_config.json says, or greedy.

    Attributes:
        temperature: See :class:`DistributionParams`; likewise the next four.
        presence_penalty: Subtracted from the logits of all tokens generated so far, from -2 to 2.
        frequency_penalty: Subtracted from a token's logit once for each time that it was generated,
            from -2 to 2.
        logit_bias: Numbers added to the logits of some tokens, by token id.
        max_new_tokens: Most tokens to generate, at least 1.
        min_new_tokens: Tokens to generate before the request may end: until then end-of-sequence
            and stop tokens are impossible, and stop texts do not count.
        stop: Texts that end the generation; the output ends before them. A single text may be given
            as it is. They may contain special tokens (`<|im_end|>`), also where the output
            leaves these out.
        stop_token_ids: Tokens that end the generation besides the model's own; not part of the
            text.
        ignore_eos: Generate on past the model's end-of-sequence tokens.
        skip_special_tokens: Leave special tokens out of the text.
        shown_special_tokens: Those of them, by id, that stay in the text all the same, such as the
            marks of tool calls.
        seed: Seed of this request's random numbers, from 0 to 2**64 - 1; each gives others. None
            takes fresh ones.
        return_logprob: Return the log-probability of each generated token. Log-probabilities are
            the model's own, before anything that these parameters do to its logits.
        top_logprobs_num: With it, those of this many of the most likely tokens, 1000 at most.
        return_prompt_logprob: Return them for the prompt's tokens too; such a prompt is computed
            anew even where the cache has a prefix of it.
        json_schema: A JSON schema, as a text or an object, that the output follows; `{"type":
            "object"}` for any object.
        regex: Instead: a regular expression (Rust's syntax) that matches the whole output.
        grammar: Instead: a grammar, in the syntax of llguidance (Lark's) or of llama.cpp (GBNF).
        reasoning_tokens: With one of these three: the output may first reason, which follows
            nothing. The token that ends reasoning, where the prompt has begun it; or the tokens
            that begin and end it, where the output may begin with the first.

    Raises:
        RequestError: A value out of range.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    min_new_tokens: int = 0
    stop: Sequence[str] | str | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    return_prompt_logprob: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    shown_special_tokens: Sequence[int] | None = ()
    reasoning_tokens: Sequence[int] | None = ()

    def __post_init__(self) -> None:
        checked = self.distribution()
        for name in DISTRIBUTION_NAMES:
            if getattr(self, name) is not None:
                self._set(name, getattr(checked, name))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, checks.number(name, getattr(self, name), _OPENAI_PENALTY, -2, 2))
        self._set("logit_bias", checks.logit_bias("logit_bias", self.logit_bias))
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0)):
            value = checks.integer(name, getattr(self, name), f"an integer >= {least}", least)
            self._set(name, value)
        expected = f"an integer from 0 to {MAX_TOP_LOGPROBS}"
        count = checks.integer(
            "top_logprobs_num", self.top_logprobs_num, expected, 0, MAX_TOP_LOGPROBS
        )
        self._set("top_logprobs_num", count)
        if self.min_new_tokens > self.max_new_tokens:
            expected = f"an integer from 0 to max_new_tokens ({self.max_new_tokens})"
            raise checks.refuse("min_new_tokens", expected, self.min_new_tokens)
        self._set("stop", checks.texts("stop", self.stop))
        for name in ("stop_token_ids", "shown_special_tokens", "reasoning_tokens"):
            self._set(name, checks.token_ids(name, getattr(self, name)))
        if len(self.reasoning_tokens or ()) > 2:
            raise checks.refuse("reasoning_tokens", "one or two token ids", self.reasoning_tokens)
        for name in _FLAGS:
            self._set(name, checks.flag(name, getattr(self, name)))
        if self.seed is not None:
            expected = "an integer from 0 to 2**64 - 1, or None"
            self._set("seed", checks.integer("seed", self.seed, expected, 0, SEED_LIMIT - 1))
        self._set("json_schema", checks.json_schema("json_schema", self.json_schema))
        sources = [name for name in _SOURCES if getattr(self, name) is not None]
        for name in sources:
            checks.source("sampling parameter " + name, getattr(self, name))
        if len(sources) > 1:
            raise RequestError(
                f"sampling parameters: expected one of {', '.join(_SOURCES)}, found "
                f"{' and '.join(sources)}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_structured(self) -> bool:
        """Whether the output follows a schema, a regular expression or a grammar."""
        return any(getattr(self, name) is not None for name in _SOURCES)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """The parameters of an object such as a request in JSON has.

        Raises:
            RequestError: An unknown name, or a value out of range.
        """
        names = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in names:
                raise RequestError(
                    f"there is no sampling parameter {describe(name)}; expected {', '.join(names)}"
                )
        return cls(**values)

    def distribution(self, defaults: DistributionParams | None = None) -> DistributionParams:
        """The first five, with `defaults` (None: greedy) in the place of None."""
        given = {name: getattr(self, name) for name in DISTRIBUTION_NAMES}
        return replace(
            defaults or DistributionParams(),
            **{name: value for name, value in given.items() if value is not None},
        )

    def with_defaults(self, defaults: DistributionParams) -> "SamplingParams":
        """These parameters without None in the first five."""
        resolved = self.distribution(defaults)
        return replace(self, **{name: getattr(resolved, name) for name in DISTRIBUTION_NAMES})


_SOURCES = ("json_schema", "regex", "grammar")
_FLAGS = ("ignore_eos", "skip_special_tokens", "return_logprob", "return_prompt_logprob")
