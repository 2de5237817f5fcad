"""Checks of values that a caller gives, with one form of refusal: what was expected, and what came.

A number is checked as the float32 that it is used as. Whole numbers may be of any integer type
(NumPy's too), never bool.
"""

import json
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from srt.errors import RequestError
from srt.values import describe, is_integer

# As Python's numbers, since NumPy would convert what they are compared with to float32.
# Longest schema, regular expression or grammar, in characters.
MAX_SOURCE = 262_144
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def refuse(name: str, expected: str, value: object) -> RequestError:
    """The error about a bad sampling parameter."""
    return RequestError(f"sampling parameter {name}: expected {expected}, found {describe(value)}")


def integer(name: str, value: object, expected: str, low: int, high: int | None = None) -> int:
    """The integer `value`, from `low` to `high`."""
    if not is_integer(value):
        raise refuse(name, expected, value)
    number = int(value)  # type: ignore[call-overload]
    if number < low or (high is not None and number > high):
        raise refuse(name, expected, value)
    return int(number)


def number(name: str, value: object, expected: str, low: float, high: float = math.inf) -> float:
    """The number `value`, from `low` to `high`, which float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise refuse(name, expected, value)
    try:
        result = float(value)
    except OverflowError:
        raise refuse(name, expected, value) from None
    if not low <= result <= high or abs(result) > FLOAT32_MAX:
        raise refuse(name, expected, value)
    return result


def flag(name: str, value: object) -> bool:
    """The truth value `value`."""
    if not isinstance(value, (bool, np.bool_)):
        raise refuse(name, "True or False", value)
    return bool(value)


def texts(name: str, value: object) -> tuple[str, ...]:
    """One text, several, or None for no text."""
    expected = "a text that is not empty, or several"
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    elif isinstance(value, (bytes, Mapping)):
        raise refuse(name, expected, value)
    result = _elements(name, expected, value)
    for text in result:
        if not isinstance(text, str) or not text:
            raise refuse(name, expected, value)
        if has_surrogates(text):
            raise refuse(name, "texts of Unicode characters, without lone surrogates", text)
    return result


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Several token ids, or None for none."""
    expected = "a list of token ids >= 0"
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)):
        raise refuse(name, expected, value)
    result = _elements(name, expected, value)
    if not all(is_integer(token) and token >= 0 for token in result):
        raise refuse(name, expected, value)
    return tuple(int(token) for token in result)


def _elements(name: str, expected: str, value: object) -> tuple[Any, ...]:
    """The elements of anything that has some; arrays and tensors of no dimension have none, though
    they look as if.
    """
    elements = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(elements, Iterable):
        raise refuse(name, expected, value)
    return tuple(elements)


def logit_bias(name: str, value: object) -> dict[int, float]:
    """What is added to the logits of some tokens. Keys may be texts, as in JSON."""
    expected = "an object of token ids >= 0 and finite numbers"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refuse(name, expected, value)
    result = {}
    for key, bias in value.items():
        token: object = key
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20:
            token = int(key)
        result[integer(name, token, expected, 0)] = number(name, bias, expected, -math.inf)
    return result


def json_schema(name: str, value: object) -> str | None:
    """A JSON schema as a text, of a text or an object."""
    expected = "a JSON schema: an object, true or false, or its text"
    if value is None:
        return None
    try:
        schema = json.loads(value) if isinstance(value, (str, bytes)) else value
        if not isinstance(schema, (Mapping, bool)):
            raise refuse(name, expected, value)
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise refuse(name, expected, value) from error


def source(name: str, value: object) -> None:
    """A text that is compiled: Unicode, and of a length that can be."""
    if not isinstance(value, str):
        raise RequestError(f"{name}: expected a text, found {describe(value)}")
    if has_surrogates(value) or len(value) > MAX_SOURCE:
        raise RequestError(
            f"{name}: expected at most {MAX_SOURCE:,} characters, without lone surrogates, found "
            f"{describe(value)}"
        )


def has_surrogates(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, which no encoding of Unicode has a place for.
    Python makes one of each byte of an argument that is not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
