"""Prompts and conversations as token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from srt.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_tokenizer(directory: Path) -> Any | None:
    """The tokenizer in a checkpoint directory, or None if it has none (then only token ids can be
    given).

    Raises:
        CheckpointError: It has one that cannot be read.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # loads slowly

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(
            "the tokenizer cannot be read", file=directory, found=" ".join(str(error).split())
        ) from error


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
