"""Prompts and conversations as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from srt.checkpoint.files import explain
from srt.configs.hf_transformers import load_tokenizer
from srt.errors import RequestError
from srt.managers.chat_template import get_renderer
from srt.managers.messages import Message, check_message, check_template_kwargs, check_text

__all__ = ["Message", "encode", "encode_chat", "load_tokenizer"]

# Names of a message's reasoning, the one that templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens that the tokenizer adds.

    Raises:
        RequestError: The text is not Unicode, or the tokenizer cannot encode it.
    """
    check_text("the prompt", text)
    return _encode(tokenizer, text)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation whose next message is the model's, by the tokenizer's chat
    template.

    A message's content may be a list of parts (`{"type": "text", "text": ...}`), which are joined
    by line breaks; that of an assistant may be None, which stands for no text.

    Args:
        tokenizer: The tokenizer.
        messages: Each an object with `role` and `content`.
        template_kwargs: Further variables for the template.

    Raises:
        RequestError: There is no template, or several without a default; it refuses the messages,
            fails on them, or does not end within its limits.
    """
    text = render_chat(tokenizer, messages, template_kwargs)
    check_text("the conversation", text)
    # The template has written the special tokens already.
    return _encode(tokenizer, text, add_special_tokens=False)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text that the chat template makes of a conversation, for :func:`encode_chat`; up to the
    beginning of the next answer with `add_generation_prompt`.
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
    checked = [check_message(message) for message in messages]
    variables = {
        **tokenizer.special_tokens_map,
        "messages": [_as_template_sees(message) for message in checked],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **check_template_kwargs(template_kwargs),
    }
    return get_renderer().render(template, variables)


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
