"""How writers spell what runs here: tables of the values of a quantization configuration's keys.

A checkpoint is made by one tool and read by many, and neither tools nor their versions agree on
spellings: case, dashes, names of dtypes. A table holds, in lower case, all that are known from the
writers' and readers' sources (docs/formats.md names them) and what each means. What is not in a
table is refused by name: it may change what the weights are. The tables of one format are in its
module of `formats/`; what several have is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from srt.errors import UnsupportedConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Key(Generic[T]):
    """A key of a configuration and the spellings of its values.

    Attributes:
        name: The key.
        values: Spelling, in lower case, to what it means.
        default: What an absent key or null means; None if it must be there.
    """

    name: str
    values: Mapping[str, T]
    default: T | None = None

    def find(self, config: Mapping[str, Any]) -> T | None:
        """What `config` says; None if that is nothing which runs here."""
        value = config.get(self.name)
        if value is None:
            return self.default
        return self.values.get(value.lower()) if isinstance(value, str) else None

    def read(self, config: Mapping[str, Any], what: str) -> T:
        """What `config` says.

        Args:
            config: The object that may hold the key.
            what: Whose key it is, for the message.

        Raises:
            UnsupportedConfigError: It says something that does not run here.
        """
        meaning = self.find(config)
        if meaning is None:
            is_there = self.name in config
            found = (
                f"with {self.name} {config[self.name]!r}" if is_there else f"without {self.name}"
            )
            raise UnsupportedConfigError(
                f"{what} {found} is not supported; "
                f"expected one of {', '.join(map(repr, self.values))}"
            )
        return meaning


# Of the dtype of weights.
E4M3_SPELLINGS: Mapping[str, bool] = dict.fromkeys(
    (
        "e4m3",
        "e4m3fn",
        "fp8_e4m3",
        "fp8_e4m3fn",
        "float8_e4m3",
        "float8_e4m3fn",
        "torch.float8_e4m3fn",
    ),
    True,
)

# Where configurations list the modules that stay unquantized.
SKIP_LISTS = (
    "modules_to_not_convert",  # transformers, Qwen, Mistral
    "ignored_layers",  # AutoFP8, MiniMax
    "ignore",  # compressed-tensors; ModelOpt in config.json
    "exclude_modules",  # ModelOpt in hf_quant_config.json
    "exclude",  # Quark
)
