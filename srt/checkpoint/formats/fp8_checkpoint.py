"""What all FP8 checkpoints share: weights in float8_e4m3fn, scales that multiply them, activations
in 16 bits (W8A16).

A format (`Fp8Config`, `CompressedTensorsConfig`, ...) reads its own configuration into the few
facts of `Fp8CheckpointConfig`: what stays unquantized, and the size of blocks. Everything else the
tensors tell by their dtypes and shapes.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.dtypes import BYTE_DTYPE, FP8_DTYPE, SCALE_DTYPES, join_names
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.checkpoint.formats.skip_list import NO_MODULES, ModulePatterns
from srt.checkpoint.formats.weight_format import Fp8Weight, PlainWeight, WeightFormat
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_names import canonical_name
from srt.checkpoint.weight_scales import (
    UNUSED_SCALE_NAMES,
    WEIGHT_SCALE_NAMES,
    ZERO_POINT_NAME,
    Layout,
    find_scale,
    group_modules,
    is_scale_per_shard,
    scale_layout,
)
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.utils.arithmetic import ceil_div

logger = logging.getLogger(__name__)

# (block_n, block_k) where a configuration announces blocks without their size.
DEFAULT_BLOCK = (128, 128)
Config = TypeVar("Config", bound="Fp8CheckpointConfig")


def check_unquantized(metas: Iterable[TensorMeta]) -> None:
    """Raises CheckpointError if there is an FP8 tensor although no configuration announces any."""
    for meta in metas:
        if meta.dtype == FP8_DTYPE:
            raise CheckpointError(
                "an FP8 tensor in a checkpoint whose configuration says nothing of quantization",
                file=meta.file,
                tensor=meta.name,
                expected="a quantization_config in config.json",
                found="none",
            )


@dataclass(frozen=True)
class Fp8CheckpointConfig(QuantizationConfig):
    """An FP8 checkpoint.

    Attributes:
        names: Spellings, in lower case, of the format's `quant_method`, ours first.
        ignored: Modules that stay unquantized as the configuration says.
        targets: Modules that the format quantizes, or None for all linear layers.
        weight_block_size: (block_n, block_k) of grids of scales; None if there are none.
        named_block_sizes: Other sizes that the configuration gives modules by their names.
        byte_scales: Scales may be exponents of two that are stored as plain bytes.
        layouts: What the tensors of each module turned out to be, by canonical name: this counts
            where a configuration says something else.
    """

    has_scales = True
    names: ClassVar[tuple[str, ...]]

    ignored: ModulePatterns = NO_MODULES
    targets: ModulePatterns | None = None
    weight_block_size: tuple[int, int] | None = None
    named_block_sizes: tuple[tuple[ModulePatterns, tuple[int, int]], ...] = ()
    byte_scales: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @classmethod
    @abstractmethod
    def from_config(
        cls: type[Config], config: Mapping[str, Any], file: str | Path = CONFIG_FILE
    ) -> Config:
        """Reads `config`, the `quantization_config` of `file`.

        Raises:
            UnsupportedConfigError: It asks for something that this runtime does not run.
            CheckpointError: A value is no object where one should be.
        """

    def block_size(self, module: str) -> tuple[int, int] | None:
        for modules, block in self.named_block_sizes:
            if modules.matches(module):
                return block
        return self.weight_block_size

    def is_ignored(self, module: str) -> bool:
        """Whether `module` (any spelling of its full name) stays unquantized."""
        layout = self.layouts.get(canonical_name(module))
        if layout is not None:
            return layout is Layout.PLAIN
        if self.ignored.matches(module):
            return True
        return self.targets is not None and not self.targets.matches(module)

    def adapt_to(self: Config, metas: Iterable[TensorMeta]) -> Config:
        layouts: dict[str, Layout] = {}
        unused = 0
        surprising = []
        for module, tensors in group_modules(metas).items():
            unused += sum(name in UNUSED_SCALE_NAMES for name in tensors)
            layout = self._check_module(module, tensors)
            if layout is None:
                continue
            layouts[canonical_name(module)] = layout
            if layout is not Layout.PLAIN and self.is_ignored(module):
                surprising.append(module)
        if unused:
            logger.info(
                "%d scales of activations and of the KV cache are needed by no product", unused
            )
        if surprising:
            logger.warning(
                "%d modules are FP8 although the configuration lists them as unquantized, such as "
                "%s; they are run as FP8",
                len(surprising),
                surprising[0],
            )
        return replace(self, layouts=layouts)

    def _check_module(self, module: str, tensors: Mapping[str, TensorMeta]) -> Layout | None:
        """Layout of a module's weight, if it has one.

        Raises:
            CheckpointError: Weight and scale contradict each other, or there is more to the weight.
        """
        weight, scale = tensors.get("weight"), find_scale(tensors)
        zero_point = tensors.get(ZERO_POINT_NAME)
        if zero_point is not None:
            raise CheckpointError(
                "asymmetric weights are not supported",
                file=zero_point.file,
                tensor=zero_point.name,
                expected="weights that their scale alone multiplies",
                found="a zero point",
            )
        if weight is not None and weight.dtype == FP8_DTYPE and _is_embedding(module):
            raise CheckpointError(
                "an embedding table in FP8 is not supported",
                file=weight.file,
                tensor=weight.name,
                expected="bfloat16, float16 or float32",
                found=weight.dtype_name,
            )
        if weight is None:
            if scale is not None:
                raise CheckpointError(
                    "a scale has no weight",
                    file=scale.file,
                    tensor=scale.name,
                    expected=f"a tensor {module}.weight",
                    found="none",
                )
            return None
        if weight.dtype == FP8_DTYPE:
            if scale is None:
                names = " or ".join(f"{module}.{name}" for name in WEIGHT_SCALE_NAMES[:2])
                raise CheckpointError(
                    "an FP8 weight has no scale",
                    file=weight.file,
                    tensor=weight.name,
                    expected=f"a tensor {names}",
                    found="neither",
                )
            return self._check_scale(module, weight, scale)
        if scale is not None:
            raise CheckpointError(
                "a scale belongs to a weight that is not FP8",
                file=scale.file,
                tensor=scale.name,
                expected="a float8_e4m3fn weight",
                found=f"{weight.name} is {weight.dtype_name}",
            )
        return Layout.PLAIN

    def _check_scale(self, module: str, weight: TensorMeta, scale: TensorMeta) -> Layout:
        dtypes = (*SCALE_DTYPES, BYTE_DTYPE) if self.byte_scales else SCALE_DTYPES
        if scale.dtype not in dtypes:
            raise CheckpointError(
                "a weight scale has the wrong dtype",
                file=scale.file,
                tensor=scale.name,
                expected=join_names(dtypes),
                found=scale.dtype_name,
            )
        block = self.block_size(module)
        layout = scale_layout(weight, scale, block)
        if layout is not None:
            return layout
        if is_scale_per_shard(scale):  # only the merged layer knows how many shards it has
            return Layout.CHANNEL
        n = weight.shape[0]
        grid = ""
        if block is not None and len(weight.shape) == 2:
            block_n, block_k = block
            rows, columns = ceil_div(n, block_n), ceil_div(weight.shape[1], block_k)
            grid = f", or [{rows}, {columns}] for blocks of [{block_n}, {block_k}]"
        raise CheckpointError(
            "a weight scale has the wrong shape",
            file=scale.file,
            tensor=scale.name,
            expected=f"one element, [{n}], [{n}, 1]{grid}",
            found=list(scale.shape),
        )

    def weight_formats(self, prefix: str, shard_names: Sequence[str]) -> tuple[WeightFormat, ...]:
        # A layer that is not merged, or is merged in the file, has one format.
        is_whole = not shard_names or canonical_name(prefix) in self.layouts
        return tuple(map(self._weight_format, [prefix] if is_whole else shard_names))

    def _weight_format(self, module: str) -> WeightFormat:
        if self.is_ignored(module):
            return PlainWeight()
        layout, block = self.layouts.get(canonical_name(module)), self.block_size(module)
        if layout is None:
            layout = Layout.CHANNEL if block is None else Layout.BLOCK
        return Fp8Weight(layout, block if layout is Layout.BLOCK else None)

    def parameter_name(self, name: str) -> str:
        return "weight_scale" if name in WEIGHT_SCALE_NAMES else name


def _is_embedding(module: str) -> bool:
    """Whether the module is the language model's token table."""
    return canonical_name(module) == "embed_tokens"


def read_block_size(value: object) -> tuple[int, int] | None:
    """(block_n, block_k) of a configuration's `[block_n, block_k]`, or None if that is null.

    Raises:
        UnsupportedConfigError: It is something else.
    """
    if value is None:
        return None
    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(size, int) and size > 0 for size in value)
    ):
        return value[0], value[1]
    raise UnsupportedConfigError(
        f"weight_block_size {value!r} in quantization_config: expected two sizes [block_n, block_k]"
    )
