"""Messages of a conversation, checked before a chat template sees them."""

from collections.abc import Mapping
from typing import Any

from srt.errors import RequestError
from srt.sampling.checks import has_surrogates
from srt.values import describe

Message = Mapping[str, Any]

# What the caller of the template decides, and names that peers take for something else.
_RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize"})


def check_message(message: object) -> dict[str, Any]:
    """A message with its content as one text.

    Raises:
        RequestError: It is not an object with a role and a content that is text.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise _unlike_a_message(message)
    result = dict(message)
    is_call = result["role"] == "assistant" and bool(result.get("tool_calls"))
    if "content" not in result and not is_call:
        raise _unlike_a_message(message)
    if not isinstance(result["role"], str):
        raise RequestError(f"a message's role is a text; found {describe(result['role'])}")
    result["content"] = _content(result.get("content"), result["role"])
    return result


def _unlike_a_message(message: object) -> RequestError:
    return RequestError(f"expected messages with 'role' and 'content', found {describe(message)}")


def _content(content: object, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"a message's content is a text or a list of parts; found {describe(content)}"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                "a part of a message's content is {'type': 'text', 'text': ...}: this model is "
                f"given text only; found {describe(part if kind in (None, 'text') else kind)}"
            )
        texts.append(text)
    return "\n".join(texts)


def check_template_kwargs(kwargs: object) -> dict[str, Any]:
    """Variables for a chat template.

    Raises:
        RequestError: They are not an object, or one is decided elsewhere.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise RequestError(
            f"chat_template_kwargs: expected an object of names and values, found "
            f"{describe(kwargs)}"
        )
    for name in kwargs:
        if name in _RESERVED:
            raise RequestError(f"chat_template_kwargs: {name} is not a variable of templates")
    return dict(kwargs)


def check_text(what: str, text: str) -> None:
    """Refuses a text that UTF-8 has no bytes for; the error calls it `what`.

    Raises:
        RequestError: It holds a lone surrogate, which is what Python makes of bytes that are not
            UTF-8.
    """
    if has_surrogates(text):
        index, character = next((i, c) for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
        raise RequestError(
            f"{what} is not Unicode text: character {index} is {character!r}, half of a pair, "
            "or a byte that is not UTF-8"
        )
