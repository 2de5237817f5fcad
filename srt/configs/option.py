"""What is known of an option besides its name, type and default: help, check, choices and flag.

An option is a field of a dataclass that carries an :class:`Option` as its metadata; documentation,
errors and the command line are made from it.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from inspect import signature
from textwrap import fill
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from srt.errors import OptionError
from srt.values import is_integer

Wrong = tuple[str, object]
"""What was expected, in words, and what was found instead."""

Check = Callable[[Any], Wrong | None]
"""Tells what is wrong with a value; None if nothing is."""

_KEY = "option"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """How the command line spells an option. That of one that is true by default turns it off.

    Attributes:
        names: Ours, which messages use, and those that peers give it.
        group: `model`: all commands that load a model have it; `serving`: those that generate;
            `sampling`: those of them that let the user choose how tokens are drawn; `server`: the
            server.
        metavar: What stands for the value in the help; None for the choices.
        help: Instead of the option's, where the flag does more than set the option.
    """

    names: tuple[str, ...]
    group: Literal["model", "serving", "sampling", "server"]
    metavar: str | None = None
    help: str | None = None


@dataclass(frozen=True)
class Option:
    """What is known of an option.

    Attributes:
        help: What it does, beginning with a verb or a noun in lower case. Another option's name in
            braces becomes its spelling where the help is shown.
        check: Of values other than None; that is one if it is the default.
        choices: The values, if they are so few.
        unset: What None stands for.
        flag: None where the command line decides by itself.
    """

    help: str
    check: Check
    choices: tuple[str, ...] | None = None
    unset: str | None = None
    flag: Flag | None = None


def about(
    help: str,
    check: Check,
    *,
    choices: tuple[str, ...] | None = None,
    unset: str | None = None,
    flag: Flag | None = None,
) -> dict[str, Option]:
    """The metadata of a field that is an option."""
    return {_KEY: Option(help, check, choices, unset, flag)}


def option_of(field: "Field[Any]") -> Option:
    """What a field's metadata says."""
    option: Option = field.metadata[_KEY]
    return option


def check_options(config: Any) -> None:
    """Checks each option of a dataclass by itself.

    Raises:
        OptionError: About the first that is wrong.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        wrong = option_of(field).check(value)
        if wrong is not None:
            raise OptionError(field.name, *wrong)


def show_help(field: "Field[Any]", text: str, spelling: Mapping[str, str]) -> str:
    """A help text with its default, and with other options as they are spelled there."""
    unset = option_of(field).unset
    if field.default is not MISSING and not isinstance(field.default, bool):
        default = unset if field.default is None else field.default
        if default is not None:
            text += f" (default: {default})"
    return text.format_map(spelling)


def documented(config: type[Any] | None = None) -> Callable[[type[T]], type[T]]:
    """Puts the options of `config`, or else of the class itself, where its docstring says OPTIONS,
    and makes its signature that of `config`.
    """

    def complete(cls: type[T]) -> type[T]:
        if cls.__doc__ is not None:  # as it is under `python -OO`
            text = "\n".join(_paragraphs(config or cls))
            cls.__doc__ = cls.__doc__.replace("        OPTIONS", text)
        if config is not None:
            cls.__signature__ = signature(config)  # type: ignore[attr-defined]
        return cls

    return complete


def takes_arguments_of(
    _: Callable[P, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Tells type checkers that a method takes the arguments of a class's constructor."""
    return lambda method: method


def _paragraphs(config: type[Any]) -> Iterator[str]:
    spelling = {field.name: f"`{field.name}`" for field in fields(config)}
    for field in fields(config):
        text = show_help(field, option_of(field).help, spelling)
        if isinstance(field.default, bool):
            text += f" (default: {field.default})"
        text = f"{field.name}: {text[0].upper()}{text[1:]}."
        yield fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)


def one_of(choices: Sequence[str]) -> Check:
    """One of some words."""
    expected = f"one of {', '.join(choices)}"
    return lambda value: _unless(isinstance(value, str) and value in choices, expected, value)


def integer(largest: int | None = None) -> Check:
    """A whole number from 1 to the largest."""

    def check(value: Any) -> Wrong | None:
        if not is_integer(value) or value < 1:
            return "an integer >= 1", value
        return _unless(largest is None or value <= largest, f"at most {largest}", value)

    return check


def integers(largest: int) -> Check:
    """Several whole numbers from 1 to the largest."""
    check_one = integer(largest)

    def check(value: Any) -> Wrong | None:
        if not isinstance(value, (list, tuple, range)):
            return "a list of integers >= 1", value
        return next(filter(None, map(check_one, value)), None)

    return check


def natural(largest: int | None = None) -> Check:
    """A whole number from 0 to the largest."""

    def check(value: Any) -> Wrong | None:
        if not is_integer(value) or value < 0:
            return "an integer >= 0", value
        return _unless(largest is None or value <= largest, f"at most {largest}", value)

    return check


def seconds(value: Any) -> Wrong | None:
    """A time above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return _unless(is_number and 0 < value < math.inf, "a number of seconds above 0", value)


def share(value: Any) -> Wrong | None:
    """A number above 0, up to 1."""
    is_share = isinstance(value, (int, float)) and 0 < value <= 1
    return _unless(is_share, "a number in (0, 1]", value)


def truth(value: Any) -> Wrong | None:
    """True or False."""
    return _unless(isinstance(value, bool), "True or False", value)


def text(value: Any) -> Wrong | None:
    """Any text."""
    return _unless(isinstance(value, str), "a text", value)


def texts(value: Any) -> Wrong | None:
    """Several texts, none of them empty."""
    is_right = isinstance(value, (list, tuple)) and all(
        isinstance(one, str) and one for one in value
    )
    return _unless(is_right, "texts that are not empty", value)


def path(value: Any) -> Wrong | None:
    """A path that a file can have."""
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    return _unless(isinstance(name, str) and name != "" and "\0" not in name, "a path", value)


def _unless(is_right: bool, expected: str, value: object) -> Wrong | None:
    return None if is_right else (expected, value)
