"""`quant_method: compressed-tensors`, as llm-compressor and RedHatAI's checkpoints have it.

Source of the keys: https://github.com/neuralmagic/compressed-tensors (`quant_args.py`,
`quant_config.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.formats.fp8_checkpoint import Fp8CheckpointConfig, read_block_size
from srt.checkpoint.formats.skip_list import ModulePatterns, read_names
from srt.checkpoint.json_values import get_object
from srt.checkpoint.quantization_keys import SKIP_LISTS, Key
from srt.errors import UnsupportedConfigError

# "naive-quantized" is what early versions called it.
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

# Classes of modules that a target may name.
_LINEAR_CLASS = "Linear"


@dataclass(frozen=True)
class CompressedTensorsConfig(Fp8CheckpointConfig):
    """`quant_method: compressed-tensors` with FP8 weights per tensor, per channel or per block."""

    names = ("compressed-tensors", "compressed_tensors")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], file: str | Path = CONFIG_FILE
    ) -> CompressedTensorsConfig:
        for key in ("sparsity_config", "transform_config"):
            _refuse_transformed(config, key, file)
        groups = get_object(config, "config_groups", file)
        if not groups:
            raise UnsupportedConfigError(
                "compressed-tensors without config_groups is not supported"
            )
        blocks: dict[tuple[int, int], list[str]] = {}
        targets: list[str] = []
        for name in groups:
            if isinstance(groups[name], list):  # of targets, of the scheme that has this name
                group_targets, block = read_names(groups, name), _read_preset(name)
            else:
                group = get_object(groups, name, file)
                if not get_object(group, "weights", file):
                    continue  # of activations or of the KV cache
                block = _read_group(name, group, config.get("format"), file)
                group_targets = read_names(group, "targets")
            if block is not None:
                blocks.setdefault(block, []).extend(group_targets)
            targets += group_targets
        # A name is more specific than a class: the size that is for a class is for the rest.
        defaults = [block for block, found in blocks.items() if _LINEAR_CLASS in found]
        if len(defaults) > 1:
            raise UnsupportedConfigError(
                f"compressed-tensors groups that give {_LINEAR_CLASS} layers blocks of different "
                f"sizes are not supported; found {' and '.join(map(str, map(list, defaults)))}"
            )
        return cls(
            ignored=ModulePatterns.parse(read_names(config, *SKIP_LISTS), regex=True),
            targets=None
            if _LINEAR_CLASS in targets or not targets
            else ModulePatterns.parse(targets, regex=True),
            weight_block_size=next(iter([*defaults, *blocks]), None),
            named_block_sizes=tuple(
                (ModulePatterns.parse(found, regex=True), block) for block, found in blocks.items()
            ),
        )


def _read_preset(name: str) -> tuple[int, int] | None:
    """The block size of a scheme that is given by its name; None if it has no blocks."""
    if name.lower() not in PRESETS:
        raise UnsupportedConfigError(
            f"compressed-tensors scheme {name!r} is not supported; "
            f"expected one of {', '.join(map(repr, PRESETS))}"
        )
    return PRESETS[name.lower()]


def _refuse_transformed(config: Mapping[str, Any], key: str, file: str | Path) -> None:
    """Raises if weights are stored sparsely, or are to be multiplied by something first."""
    value = get_object(config, key, file)
    if value.get("format", "dense") != "dense" or value.get("config_groups"):
        raise UnsupportedConfigError(
            f"compressed-tensors with a {key} is not supported; expected none, found {value!r}"
        )


def _read_group(
    name: str, group: Mapping[str, Any], default_format: str | None, file: str | Path
) -> tuple[int, int] | None:
    """The block size of a group of FP8 weights; None if its scales are per tensor or channel."""
    fmt = group.get("format") or default_format
    weights = get_object(group, "weights", file)
    kind = weights.get("type")
    found = (
        f"format {fmt}, {weights.get('num_bits')}-bit {kind} weights, "
        f"strategy {weights.get('strategy')}, group_size {weights.get('group_size')}"
    )
    is_fp8 = weights.get("num_bits") == 8 and isinstance(kind, str) and kind.lower() == "float"
    if not FORMAT.find({"format": fmt}) or not is_fp8:
        raise UnsupportedConfigError(
            f"compressed-tensors group {name!r} ({found}) is not supported; "
            f"expected 8-bit float weights in the format {next(iter(FORMAT.values))}"
        )
    strategy = STRATEGY.find(weights)
    if strategy is None or weights.get("dynamic") or weights.get("symmetric") is False:
        raise UnsupportedConfigError(
            f"compressed-tensors group {name!r} ({found}) is not supported; expected static, "
            f"symmetric scales of the strategy {', '.join(STRATEGY.values)}"
        )
    activations = get_object(group, "input_activations", file)
    kind = activations.get("type")
    if activations and (activations.get("num_bits"), str(kind).lower()) != (8, "float"):
        raise UnsupportedConfigError(
            f"compressed-tensors group {name!r} with {activations.get('num_bits')}-bit "
            f"{kind} activations is not supported; expected none or 8-bit float"
        )
    if strategy != "block":
        return None
    structure = weights.get("block_structure")
    if isinstance(structure, str):  # early versions: "128x128"
        structure = [int(size) for size in structure.split("x") if size.isdecimal()]
    block = read_block_size(structure)
    if block is None:
        raise UnsupportedConfigError(
            f"compressed-tensors group {name!r} lacks block_structure; expected two sizes"
        )
    return block
