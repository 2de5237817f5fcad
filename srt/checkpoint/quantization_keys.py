"""How writers spell what runs here: one table for each key of a quantization configuration.

A checkpoint is made by one tool and read by many, and neither tools nor their versions agree on
spellings: case, dashes, names of dtypes. The tables hold, in lower case, all that are known from
the writers' and readers' sources (docs/formats.md names them) and what each means. What is not in a
table is refused by name: it may change what the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from srt.errors import UnsupportedConfigError

T = TypeVar("T")


class Block(Enum):
    """What an algorithm's name says of blocks."""

    NONE = "no blocks"
    DEFAULT = "blocks of 128 x 128 where the configuration gives no size"


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


# The classes that read a format's configuration are found by these names.
FP8, COMPRESSED_TENSORS, MODELOPT, FBGEMM_FP8, QUARK = (
    "fp8",
    "compressed-tensors",
    "modelopt",
    "fbgemm_fp8",
    "quark",
)
QUANT_METHOD: Key[str] = Key(
    "quant_method",
    {
        "fp8": FP8,
        "compressed-tensors": COMPRESSED_TENSORS,
        "compressed_tensors": COMPRESSED_TENSORS,
        "modelopt": MODELOPT,
        "modelopt_fp8": MODELOPT,
        "fbgemm_fp8": FBGEMM_FP8,
        "fbgemm-fp8": FBGEMM_FP8,
        "quark": QUARK,
    },
)

_E4M3 = dict.fromkeys(
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
# Codes of FP8 weights: DeepSeek ("e4m3"), MiniMax ("float8_e4m3fn").
WEIGHT_FORMAT: Key[bool] = Key("fmt", _E4M3, default=True)
# The same in Mistral's own params.json, and in Quark's configuration.
MISTRAL_WEIGHT_FORMAT: Key[bool] = Key("qformat_weight", _E4M3)
QUARK_DTYPE: Key[bool] = Key("dtype", _E4M3)
# Whether scales may be stored as exponents of two, in bytes.
SCALE_FORMAT: Key[bool] = Key(
    "scale_fmt",
    {
        **dict.fromkeys(("float", "float32", "fp32", "torch.float32"), False),
        **dict.fromkeys(("ue8m0", "e8m0", "float8_e8m0fnu", "torch.float8_e8m0fnu"), True),
    },
    default=False,
)
# Activations stay in 16 bits here; the key says only whether there are scales for them.
ACTIVATION_SCHEME: Key[str] = Key(
    "activation_scheme", {"dynamic": "dynamic", "static": "static"}, default="dynamic"
)
MISTRAL_ACTIVATION_SCHEME: Key[str] = Key(
    "qscheme_act", {"tensor": "static", "no_scales": "dynamic"}, default="dynamic"
)
# Weights of the experts of a mixture (transformers).
EXPERT_DTYPE: Key[bool] = Key("expert_dtype", {"fp8": True}, default=True)

# ModelOpt writes its own names of the block formats as they are, in lower case.
QUANT_ALGO: Key[Block] = Key(
    "quant_algo",
    {
        "fp8": Block.NONE,
        "fp8_per_channel_per_token": Block.NONE,
        "fp8_pc_pt": Block.NONE,
        "fp8_pb": Block.DEFAULT,
        "fp8_pb_wo": Block.DEFAULT,
        "fp8_pb_real": Block.DEFAULT,
    },
)
MIXED_PRECISION = "mixed_precision"

# compressed-tensors; "naive-quantized" is what early versions called it.
FORMAT: Key[bool] = Key(
    "format", {"float-quantized": True, "naive-quantized": True, "naive_quantized": True}
)
STRATEGY: Key[str] = Key(
    "strategy", {"tensor": "tensor", "channel": "channel", "block": "block"}, default="tensor"
)
# Names of whole schemes that a group may have instead of a description of its weights.
PRESETS: Mapping[str, tuple[int, int] | None] = {
    "fp8": None,
    "fp8_dynamic": None,
    "fp8_block": (128, 128),
}
# Quark's name for the elements that share a scale.
QSCHEME: Key[str] = Key("qscheme", {"per_tensor": "tensor", "per_channel": "channel"})

# Where configurations list the modules that stay unquantized.
SKIP_LISTS = (
    "modules_to_not_convert",  # transformers, Qwen, Mistral
    "ignored_layers",  # AutoFP8, MiniMax
    "ignore",  # compressed-tensors; ModelOpt in config.json
    "exclude_modules",  # ModelOpt in hf_quant_config.json
    "exclude",  # Quark
)
