"""Fields that several of OpenAI's requests have, and what becomes of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from srt.errors import RequestError
from srt.sampling.sampling_params import SamplingParams
from srt.serve.errors import ApiError

Stop = Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]]
MAX_ANSWERS = 128
# As many as OpenAI gives; each costs bytes of every chunk.
MAX_TOP_LOGPROBS = 20


class RequestModel(BaseModel):
    """A request; a field that it does not know is refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(RequestModel):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    # Usage comes once, at the end.
    continuous_usage_stats: Literal[False] | None = None


class SamplingFields(RequestModel):
    """How tokens are chosen: OpenAI's fields, and those that vLLM and SGLang add."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    # Who asks and what for: nothing here depends on it.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def sampling_params(
        self, top_logprobs: int | None, structure: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """The parameters for the engine, without the most tokens.

        Args:
            top_logprobs: How many alternatives each token has; None for no log-probabilities.
            structure: What the text follows, as sampling parameters.

        Raises:
            ApiError: 400, for what the schema does not say.
        """
        given: Mapping[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias,
            # OpenAI's may be negative.
            "seed": None if self.seed is None else self.seed % 2**64,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "min_new_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "return_logprob": top_logprobs is not None or None,
            "top_logprobs_num": top_logprobs,
            "return_prompt_logprob": self.prompt_logprobs is not None or None,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if self.prompt_logprobs is not None:
            given["top_logprobs_num"] = max(self.prompt_logprobs, top_logprobs or 0)
        try:
            # The most tokens are decided later; no least number is too large here.
            return SamplingParams(
                **given, **(structure or {}), max_new_tokens=max(512, self.min_tokens or 0)
            )
        except RequestError as error:
            words = str(error).removeprefix("sampling parameter ")
            raise ApiError(400, words, param=words.partition(":")[0]) from error


def check_model(name: str | None, names: tuple[str, ...]) -> None:
    """Whether a request's model is served.

    Raises:
        ApiError: 404.
    """
    if name is not None and name not in names:
        raise ApiError(
            404,
            f"the model {name!r} does not exist here; served is {', '.join(map(repr, names))}",
            param="model",
            code="model_not_found",
        )
