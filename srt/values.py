"""Values that callers give, as checks see them and errors show them."""

from numbers import Integral

_SHOWN = 200  # characters of a refused value


def describe(value: object) -> str:
    """A value as an error shows it: on one line, and not longer than a line can be read."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        return f"a value of type {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"


def is_integer(value: object) -> bool:
    """Whether it is a whole number of any integer type."""
    return isinstance(value, Integral) and not isinstance(value, bool)
