"""Options that the generating commands share, and the engine they describe."""

import argparse
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from srt.configs.engine_config import EngineConfig
from srt.configs.option import option_of, show_help
from srt.errors import OptionError, RequestError
from srt.utils.kernels import load_kernels
from srt.utils.text_streams import read_stdin

if TYPE_CHECKING:
    from srt.entrypoints.engine import Engine

T = TypeVar("T")


def add_model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Options of the model and how it is held; returns their group."""
    group = parser.add_argument_group("model")
    _add(group, "model")
    return group


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options of the model and how it runs."""
    _add(add_model_options(parser), "serving")


def add_sampling_defaults(group: argparse._ArgumentGroup) -> None:
    """Options of what holds for requests that do not say themselves how tokens are chosen."""
    _add(group, "sampling")


def _add(group: argparse._ArgumentGroup, kind: str) -> None:
    add_flags(group, EngineConfig, kind)


def add_flags(group: argparse._ArgumentGroup, config: type[Any], kind: str) -> None:
    """The flags of one kind of a dataclass of options; what they set has the option's name."""
    types, spelling = get_type_hints(config), spell_flags(config)
    for field in fields(config):
        option = option_of(field)
        flag = option.flag
        if flag is None or flag.group != kind:
            continue
        is_on = field.default is True
        text = flag.help or (f"do not {option.help}" if is_on else option.help)
        text = show_help(field, text, spelling).replace("%", "%%")
        if isinstance(field.default, bool):
            action = "store_false" if is_on else "store_true"
            group.add_argument(*flag.names, action=action, dest=field.name, help=text)
            continue
        kinds = (types[field.name], *get_args(types[field.name]))
        if any(get_origin(kind) is tuple for kind in kinds):
            group.add_argument(
                *flag.names,
                dest=field.name,
                action="append",
                default=None,
                metavar=flag.metavar,
                help=text,
            )
            continue
        numbers = {int, float} & {*kinds}
        group.add_argument(
            *flag.names,
            dest=field.name,
            type=numbers.pop() if numbers else str,
            choices=option.choices,
            default=None if field.default is MISSING else field.default,
            required=field.default is MISSING,
            metavar=flag.metavar,
            help=text,
        )


def spell_flags(config: type[Any]) -> dict[str, str]:
    """Each option of a dataclass as the command line spells it."""
    flags = {field.name: option_of(field).flag for field in fields(config)}
    return {name: name if flag is None else flag.names[0] for name, flag in flags.items()}


def make_config(args: argparse.Namespace, **options: Any) -> EngineConfig:
    """What the flags say about the engine, and `options`, which win.

    Raises:
        OptionError: As of EngineConfig, in which flags stand for the options' names.
    """
    return read_flags(args, EngineConfig, **options)


def read_flags(args: argparse.Namespace, config: type[T], **options: Any) -> T:
    """What the flags say about a dataclass of options, and `options`, which win.

    Raises:
        OptionError: As of the dataclass, in which flags stand for the options' names.
    """
    spelling = spell_flags(config)
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if name in spelling and not (isinstance(value, list) and not value)
    }
    try:
        return config(**(given | options))
    except OptionError as error:
        flag = spelling.get(error.option, error.option)
        raise OptionError(flag, error.expected, error.found) from error


def make_engine(args: argparse.Namespace, config: EngineConfig) -> "Engine":
    """An engine, with signals taken care of while its modules load."""
    with args.signals.importing():
        load_kernels()
        from srt.entrypoints.engine import Engine

    return Engine(config)


def read_text(file: Path, what: str) -> str:
    """Content of a text file, or of stdin for `-`.

    Raises:
        RequestError: It cannot be read or is not UTF-8; the message calls it `what`.
    """
    if str(file) == "-":
        return read_stdin(what)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {what}: {error}") from error
