"""Prompts and conversations as token ids."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from srt.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Of Mistral's own form; all of its tokenizers begin with these tokens.
_TEKKEN_FILE = "tekken.json"
_TEKKEN_BOS, _TEKKEN_EOS = "<s>", "</s>"


def load_tokenizer(directory: Path) -> Any | None:
    """The tokenizer in a checkpoint directory, or None if it has none (then only token ids can be
    given).

    Where Mistral's tekken.json is the only one and transformers cannot convert it, a warning says
    so.

    Raises:
        CheckpointError: It has one that cannot be read.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return _load_tekken(directory) if (directory / _TEKKEN_FILE).is_file() else None
    from transformers import AutoTokenizer  # loads slowly

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(
            "the tokenizer cannot be read", file=directory, found=" ".join(str(error).split())
        ) from error


def _load_tekken(directory: Path) -> Any | None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            directory, local_files_only=True, bos_token=_TEKKEN_BOS, eos_token=_TEKKEN_EOS
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        logger.warning(
            "%s cannot be read by this version of transformers, so that only token ids can be "
            "given: %s",
            directory / _TEKKEN_FILE,
            " ".join(str(error).split()),
        )
        return None
    # The file does not say that a prompt begins with a token of its own.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{_TEKKEN_BOS} $A", special_tokens=[(_TEKKEN_BOS, tokenizer.bos_token_id)]
    )
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens that the tokenizer adds."""
    # Whether it is too long is ours to say.
    ids: list[int] = tokenizer.encode(text, verbose=False)
    return ids


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation whose next message is the model's, by the tokenizer's chat
    template.

    Raises:
        RequestError: There is no template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise RequestError("the tokenizer has no chat template; give the prompt as plain text")
    if not messages:
        raise RequestError("a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError(f"expected messages with 'role' and 'content', found {message!r}")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
    except TemplateError as error:
        raise RequestError(f"the chat template refuses the messages: {error}") from error
    # The template has written the special tokens already.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
