"""What requests need of a model besides its weights."""

from dataclasses import dataclass, replace
from typing import Any

from srt.checkpoint.hub import resolve_model
from srt.configs.engine_config import EngineConfig
from srt.configs.model_config import ModelConfig
from srt.entrypoints.request_builder import RequestBuilder
from srt.errors import RequestError
from srt.managers.special_tokens import end_token_ids
from srt.managers.tokenizer import load_tokenizer
from srt.sampling.sampling_defaults import get_sampling_defaults
from srt.sampling.sampling_params import DistributionParams


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint without its weights.

    Attributes:
        model_config: What it says about the model; ends of an answer are also those of the
            tokenizer.
        tokenizer: Its tokenizer, or None.
        builder: Makes requests for it.
    """

    model_config: ModelConfig
    tokenizer: Any | None
    builder: RequestBuilder

    @classmethod
    def load(cls, config: EngineConfig) -> "ModelFiles":
        """Reads the files.

        Raises:
            SrtError: The checkpoint cannot be used; the message says why.
        """
        model_config = ModelConfig.from_pretrained(
            resolve_model(config.model_path, config.revision, progress=config.progress),
            config.dtype,
            config.context_length,
            config.quantization,
        )
        defaults = (
            DistributionParams()
            if config.sampling_defaults == "greedy"
            else get_sampling_defaults(model_config.path)
        )
        tokenizer = load_tokenizer(model_config.path)
        if config.template_needed_by is not None and not has_chat_template(tokenizer):
            raise RequestError(
                f"{config.template_needed_by} needs a chat template, which {config.model_path} "
                "does not have"
            )
        if tokenizer is not None:
            ends = model_config.eos_token_ids | end_token_ids(tokenizer)
            model_config = replace(model_config, eos_token_ids=ends)
        return cls(model_config, tokenizer, RequestBuilder(model_config, tokenizer, defaults))


def has_chat_template(tokenizer: Any | None) -> bool:
    """Whether conversations can be given to a tokenizer."""
    return tokenizer is not None and bool(tokenizer.chat_template)
