"""Prompts and conversations as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srt.checkpoint.files import explain
from srt.configs.hf_transformers import load_tokenizer
from srt.errors import RequestError
from srt.managers.chat_template import TemplateFailedError, get_renderer
from srt.managers.messages import (
    Message,
    as_template_sees,
    check_message,
    check_template_kwargs,
    check_text,
)

__all__ = ["ChatOptions", "Message", "encode", "encode_chat", "load_tokenizer"]

# Stands at the end of a content that is to be continued. No template writes it; one that trims
# contents takes the white space.
_CONTINUED = "Zqx9vContinuedZqx9v "


@dataclass(frozen=True)
class ChatOptions:
    """How a chat template is rendered besides the messages.

    Attributes:
        template_kwargs: Further variables of the template.
        tools: Functions that the model may call, each `{"type": "function", "function": {...}}`.
        add_generation_prompt: End with the beginning of the model's next message.
        continue_final_message: End with the last message, which the model goes on with.
    """

    template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens that the tokenizer adds.

    Raises:
        RequestError: The text is not Unicode, or the tokenizer cannot encode it.
    """
    check_text("the prompt", text)
    return _encode(tokenizer, text)


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], options: ChatOptions | None = None
) -> list[int]:
    """Token ids of a conversation, by the tokenizer's chat template.

    A message's content may be a list of parts (`{"type": "text", "text": ...}`), which are joined
    by line breaks; that of an assistant may be None, which stands for no text. The arguments of a
    tool call may be a text that holds JSON, as in OpenAI's API.

    Args:
        tokenizer: The tokenizer.
        messages: Each an object with `role` and `content`.
        options: How the template is rendered.

    Raises:
        RequestError: There is no template, or several without a default; it refuses the messages,
            fails on them, or does not end within its limits.
    """
    return encode_rendered(tokenizer, render_chat(tokenizer, messages, options))


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Token ids of what :func:`render_chat` returned.

    Raises:
        RequestError: The text is not Unicode, or the tokenizer cannot encode it.
    """
    check_text("the conversation", text)
    # The template has written the special tokens already.
    return _encode(tokenizer, text, add_special_tokens=False)


def render_chat(
    tokenizer: Any, messages: Sequence[Message], options: ChatOptions | None = None
) -> str:
    """The text that the chat template makes of a conversation, for :func:`encode_chat`."""
    options = options or ChatOptions()
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
    if options.continue_final_message:
        if options.add_generation_prompt:
            raise RequestError(
                "continue_final_message: expected add_generation_prompt false with it"
            )
        checked[-1]["content"] += _CONTINUED
    variables = {
        **tokenizer.special_tokens_map,
        "tools": list(options.tools) if options.tools else None,
        "documents": None,
        "add_generation_prompt": options.add_generation_prompt,
        **check_template_kwargs(options.template_kwargs),
    }

    def render(*, arguments_as_text: bool) -> str:
        seen = [
            as_template_sees(message, template, arguments_as_text=arguments_as_text)
            for message in checked
        ]
        return get_renderer().render(template, variables | {"messages": seen})

    try:
        text = render(arguments_as_text=False)
    except TemplateFailedError:
        # DeepSeek's templates put the arguments of calls between texts of theirs.
        if not any(message.get("tool_calls") for message in checked):
            raise
        text = render(arguments_as_text=True)
    return _up_to_final_content(text) if options.continue_final_message else text


def _up_to_final_content(text: str) -> str:
    """A rendered conversation up to the end of its last message's content, as in transformers:
    where the template trims contents, white space at the end is gone.
    """
    before, found, after = text.rpartition(_CONTINUED.strip())
    if not found:
        raise RequestError(
            "continue_final_message: the chat template does not write the last message's content"
        )
    return before if after.startswith(" ") else before.rstrip()


def _encode(tokenizer: Any, text: str, **options: Any) -> list[int]:
    try:
        # Whether it is too long is ours to say.
        ids: list[int] = tokenizer.encode(text, verbose=False, **options)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library's errors are plain ones, its panics not even that
        raise RequestError(f"the tokenizer fails on the text: {explain(error)}") from error
    return ids
