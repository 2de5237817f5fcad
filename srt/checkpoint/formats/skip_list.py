"""Which modules a checkpoint's configuration says are not quantized.

Formats differ in the syntax of an entry; what they share is that the prefix of an entry need not be
that of the tensors. Both sides are compared by their canonical names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from srt.checkpoint.weight_names import canonical_name
from srt.errors import UnsupportedConfigError

if TYPE_CHECKING:
    import regex

_REGEX_PREFIX = "re:"
# An expression comes with the checkpoint; matching some takes for ever. Python's own module cannot
# be told when to stop.
_MATCH_SECONDS = 1.0


@dataclass(frozen=True)
class ModulePatterns:
    """A set of modules.

    Attributes:
        names: Canonical names. One stands for the module of that name, for all below it, and for
            every module whose name contains it as whole components (`lm_head`, `mlp.gate`).
        patterns: Regular expressions that match at the start of a module's name, with or without
            the prefixes of wrappers.
    """

    names: tuple[str, ...] = ()
    patterns: tuple[regex.Pattern[str], ...] = ()

    @classmethod
    def parse(
        cls, entries: Iterable[str], *, regex: bool = False, wildcards: bool = False
    ) -> ModulePatterns:
        """Reads a list of entries: names, which may end in `.weight`, and, where a format has them,
        `re:` expressions or shell wildcards, which must match a whole name.

        Raises:
            UnsupportedConfigError: An expression cannot be compiled.
        """
        names, patterns = [], []
        for entry in entries:
            if regex and entry.startswith(_REGEX_PREFIX):
                patterns.append(_compile(entry.removeprefix(_REGEX_PREFIX)))
            elif wildcards and any(c in entry for c in "*?["):
                # Without its wrapper's prefix it matches canonical names, with it the others.
                for glob in {entry, canonical_name(entry)}:
                    patterns.append(_compile(translate(glob)))
            else:
                names.append(canonical_name(entry.removesuffix(".weight")))
        return cls(tuple(names), tuple(patterns))

    def matches(self, module: str) -> bool:
        """Whether `module`, the full name of a module in any spelling, is in the set."""
        name = canonical_name(module)
        dotted = f".{name}."
        if any(f".{entry}." in dotted for entry in self.names):
            return True
        if not self.patterns:
            return False
        # An expression is written for the names of its author's checkpoint: `model.layers...`.
        spellings = dict.fromkeys(
            (
                module,
                name,
                f"model.{name}",
                f"language_model.{name}",
                f"language_model.model.{name}",
                f"model.language_model.{name}",
            )
        )
        return any(_matches(p, spelling) for p in self.patterns for spelling in spellings)


NO_MODULES = ModulePatterns()


def read_names(config: Mapping[str, Any], *keys: str) -> list[str]:
    """The lists of names under `keys`, one after another; absent and null ones are empty.

    Raises:
        UnsupportedConfigError: One is not a list of names.
    """
    result: list[str] = []
    for key in keys:
        names = config.get(key) or []
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise UnsupportedConfigError(
                f"{key} in quantization_config: expected a list of names, found {names!r}"
            )
        result += names
    return result


def _matches(pattern: regex.Pattern[str], name: str) -> bool:
    try:
        return pattern.match(name, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        raise UnsupportedConfigError(
            f"{_REGEX_PREFIX}{pattern.pattern[:200]} in quantization_config: matching {name} takes "
            f"more than {_MATCH_SECONDS:.0f} seconds"
        ) from None


def _compile(expression: str) -> regex.Pattern[str]:
    import regex  # few checkpoints need it

    try:
        return regex.compile(expression)
    except (regex.error, OverflowError, RecursionError) as error:
        raise UnsupportedConfigError(
            f"{_REGEX_PREFIX}{expression} in quantization_config is no regular expression: {error}"
        ) from error
