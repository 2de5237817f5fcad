"""Prompts and conversations as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from srt.errors import RequestError
from srt.managers.chat_template import get_renderer
from srt.model_loader.files import explain
from srt.model_loader.hf_transformers import load_tokenizer

__all__ = ["Message", "encode", "encode_chat", "load_tokenizer"]

Message = Mapping[str, Any]

# Names of a message's reasoning, the one that templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens that the tokenizer adds.

    Raises:
        RequestError: The tokenizer cannot encode it.
    """
    return _encode(tokenizer, text)


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation whose next message is the model's, by the tokenizer's chat
    template.

    Raises:
        RequestError: There is no template, or several without a default; it refuses the messages,
            fails on them, or does not end within its limits.
    """
    template = tokenizer.chat_template
    if not template:
        raise RequestError("the tokenizer has no chat template; give the prompt as plain text")
    if not isinstance(template, str):
        raise RequestError(
            f"the tokenizer has several chat templates ({', '.join(template)}) and none of them is "
            "the default; give the prompt as plain text"
        )
    if not messages:
        raise RequestError("a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError(f"expected messages with 'role' and 'content', found {message!r}")
    variables = {
        **tokenizer.special_tokens_map,
        "messages": [_as_template_sees(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    text = get_renderer().render(template, variables)
    # The template has written the special tokens already.
    return _encode(tokenizer, text, add_special_tokens=False)


def _as_template_sees(message: Message) -> dict[str, Any]:
    """What transformers gives a template: no key that is None, and the reasoning under the names
    that templates look for.
    """
    result = {key: value for key, value in message.items() if value is not None}
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    try:
        # Whether it is too long is ours to say.
        ids: list[int] = tokenizer.encode(text, verbose=False, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's errors are plain ones, its panics not even that
        raise RequestError(f"the tokenizer fails on the text: {explain(error)}") from error
    return ids
