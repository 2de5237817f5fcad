"""Messages of a conversation, checked before a chat template sees them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from srt.errors import RequestError
from srt.sampling.checks import has_surrogates
from srt.values import describe

Message = Mapping[str, Any]

# What the caller of the template decides, and names that peers take for something else.
_RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize"})
# Names of a message's reasoning, the one that templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# A template that tells a call without text from a message by its content being none.
_ASKS_FOR_NO_CONTENT = re.compile(r"""\bcontent(['"]\])?\s+is\s+(not\s+)?none\b""")


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


def as_template_sees(
    message: Message, template: str, *, arguments_as_text: bool = False
) -> dict[str, Any]:
    """What a template is given for a checked message.

    As in transformers there is no key that is None, and the reasoning is under the names that
    templates look for. OpenAI's role `developer` is `system` to templates that do not know it. The
    arguments of tool calls are objects, which templates write as JSON themselves, or texts for
    those that do not; a call without text has content None where the template asks for that.

    Raises:
        RequestError: The arguments of a tool call are not an object.
    """
    result = {key: value for key, value in message.items() if value is not None}
    if result["role"] == "developer" and "developer" not in template:
        result["role"] = "system"
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    calls = result.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return result
    if not calls:  # templates ask whether there is the key
        del result["tool_calls"]
        return result
    result["tool_calls"] = [_with_arguments(call, as_text=arguments_as_text) for call in calls]
    if not result["content"] and _ASKS_FOR_NO_CONTENT.search(template):
        result["content"] = None
    return result


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    """A tool call whose arguments are an object, or a text that holds one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or arguments is None:
        return call
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise RequestError(
            "the arguments of a tool call are an object, or its JSON; found "
            f"{describe(arguments)} (function {describe(function.get('name'))})"
        )
    if as_text:
        given = arguments if isinstance(arguments, str) else json.dumps(value, ensure_ascii=False)
        value = given.strip() or "{}"
    return {**call, "function": {**function, "arguments": value}}


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
