"""What quantizers call the scheme of a module's weight, told from its tensors' names, dtypes and
shapes, also for schemes that do not run here.

Works on headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from srt.checkpoint.dtypes import FLOAT_DTYPES, FP8_DTYPE
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_scales import (
    ZERO_POINT_NAME,
    find_scale,
    group_modules,
    is_scale_per_shard,
    scale_layout,
)

UNQUANTIZED = "unquantized"
FLOATS = ("F64", *FLOAT_DTYPES)

# What holds a module's weight, by the format: Hugging Face's and most others', GPTQ's and AWQ's,
# compressed-tensors', gpt-oss's, EXL2's, AQLM's, HQQ's.
_WEIGHT_NAMES = ("weight", "qweight", "weight_packed", "blocks", "q_weight", "codes", "W_q")
# An exponent of two as a byte.
_EXPONENTS = ("U8", "F8_E8M0")
# Elements that share an exponent in the formats of the Open Compute Project.
_MX_GROUP = 32
# gpt-oss has several weights in one module.
_IN_EXPERTS = re.compile(r"(.+)_(blocks|scales)")
# bitsandbytes writes what belongs to a weight below the weight's name.
_BELOW_WEIGHT = re.compile(r"(.+)\.(weight\..+)")

Tensors = Mapping[str, TensorMeta]


def modules_with_weight(metas: Iterable[TensorMeta]) -> Iterator[tuple[str, TensorMeta, Tensors]]:
    """(name, what holds the weight, all tensors by parameter) of each module that has a weight."""
    modules: dict[str, dict[str, TensorMeta]] = {}
    for module, tensors in group_modules(metas).items():
        for parameter, meta in tensors.items():
            below = _BELOW_WEIGHT.fullmatch(f"{module}.{parameter}")
            expert = _IN_EXPERTS.fullmatch(parameter)
            if below is not None:
                modules.setdefault(below[1], {})[below[2]] = meta
            elif expert is not None:
                modules.setdefault(f"{module}.{expert[1]}", {})[expert[2]] = meta
            else:
                modules.setdefault(module, {})[parameter] = meta
    for module, tensors in sorted(modules.items()):
        weight = next((tensors[name] for name in _WEIGHT_NAMES if name in tensors), None)
        if weight is not None:
            yield module, weight, tensors


def name_scheme(
    tensors: Tensors, block: tuple[int, int] | None, quantization: Mapping[str, Any] | None
) -> str:
    """The scheme of a module, such as `fp8 per-block`, `NVFP4`, `int4 GPTQ` or `unquantized`.

    Args:
        tensors: The module's, by parameter.
        block: The size of blocks that the configuration gives.
        quantization: The configuration's block, for the number of bits where tensors hide it.
    """
    for names, scheme in (
        (("q_weight",), "EXL2"),
        (("codes", "codebooks"), "AQLM"),
        (("W_q",), "HQQ"),
        (("blocks", "scales"), "MXFP4"),
    ):
        if all(name in tensors for name in names):
            return scheme
    bits = _find_bits(quantization or {})
    if "qweight" in tensors:
        method = (quantization or {}).get("quant_method")
        is_gptq = "g_idx" in tensors if method not in ("gptq", "awq") else method == "gptq"
        return f"int{bits} {'GPTQ' if is_gptq else 'AWQ'}"
    if "weight_packed" in tensors and tensors["weight_packed"].dtype != "U8":
        return f"int{bits} compressed-tensors"
    weight = tensors.get("weight") or tensors.get("weight_packed")
    if weight is None:
        return UNQUANTIZED
    if weight.dtype == "U8":
        return _name_bytes(tensors)
    scheme = _name_whole_elements(weight, tensors, block)
    zero_point = ZERO_POINT_NAME in tensors and not scheme.endswith("zero point")
    return f"{scheme} with zero point" if zero_point else scheme


def _name_bytes(tensors: Tensors) -> str:
    """Two elements of four bits a byte."""
    scale = tensors.get("weight_scale")
    if "weight_global_scale" in tensors or "weight_scale_2" in tensors:
        return "NVFP4"
    if scale is not None and scale.dtype == FP8_DTYPE:
        return "NVFP4"
    if scale is not None and scale.dtype in _EXPONENTS:
        return "MXFP4"
    kinds = [name.rpartition("__")[2] for name in tensors if "bitsandbytes__" in name]
    if kinds or "weight.absmax" in tensors:
        return f"{kinds[0].upper() if kinds else '4-bit'} bitsandbytes"
    return "u8"


def _name_whole_elements(
    weight: TensorMeta, tensors: Tensors, block: tuple[int, int] | None
) -> str:
    scale = find_scale(tensors)
    if scale is None and weight.dtype in FLOATS:
        return UNQUANTIZED
    if weight.dtype == "I8" and "SCB" in tensors:
        return "int8 bitsandbytes"
    name = {FP8_DTYPE: "fp8", "F8_E5M2": "fp8 E5M2", "I8": "int8"}.get(
        weight.dtype, weight.dtype.lower()
    )
    if scale is None:
        return f"{name} without scale"
    layout = scale_layout(weight, scale, block)
    if layout is not None:
        return f"{name} {layout.value}"
    group = _find_group(weight, scale)
    if scale.dtype in _EXPONENTS and group == _MX_GROUP and weight.dtype == FP8_DTYPE:
        return "MXFP8"
    if is_scale_per_shard(scale):
        return f"{name} per-shard"
    if group is not None:
        return f"{name} per-group of {group}"
    return f"{name} with a scale of shape {list(scale.shape)}"


def _find_group(weight: TensorMeta, scale: TensorMeta) -> int | None:
    """Elements of a row that share a scale, where each row has scales of its own."""
    if len(weight.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != weight.shape[0]:
        return None
    columns = scale.shape[1]
    return weight.shape[1] // columns if columns > 1 and weight.shape[1] % columns == 0 else None


def _find_bits(quantization: Mapping[str, Any]) -> int:
    """Bits of a weight, by the keys of GPTQ, AWQ and compressed-tensors; 4 where none says it."""
    groups = quantization.get("config_groups")
    blocks: list[Any] = [quantization]
    if isinstance(groups, Mapping):
        blocks += [g.get("weights") for g in groups.values() if isinstance(g, Mapping)]
    for entry in blocks:
        if isinstance(entry, Mapping):
            for key in ("bits", "w_bit", "num_bits"):
                if isinstance(entry.get(key), int):
                    return int(entry[key])
    return 4
