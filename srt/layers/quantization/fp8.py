"""FP8 (float8_e4m3fn) weights with per-tensor or per-channel scales, as `quant_method: fp8`
checkpoints hold them.

Two spellings are in use: Mistral's in Hugging Face form (`weight_scale_inv`,
`modules_to_not_convert`) and AutoFP8's (`weight_scale`, `ignored_layers`). The scale multiplies the
stored weight in both. Activations stay in 16 bits, so the activation scales of a static checkpoint
are not needed.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from srt.errors import CheckpointError, UnsupportedConfigError
from srt.layers.parameter import Fp8WeightParameter, WeightScaleParameter
from srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from srt.layers.quantization.unquant import (
    UnquantizedLinearMethod,
    flatten_rows,
    restore_rows,
)
from srt.model_loader.checkpoint import TensorMeta
from srt.model_loader.weight_names import canonical_name, split_tensor_name
from srt.model_loader.weight_utils import pack_weight_

logger = logging.getLogger(__name__)

WEIGHT_SCALE_NAMES = ("weight_scale", "weight_scale_inv")
# For 8-bit activations and KV caches, neither of which W8A16 has.
UNUSED_SCALE_NAMES = (
    "activation_scale",
    "input_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
)


@dataclass(frozen=True)
class Fp8Config(QuantizationConfig):
    """`quant_method: fp8`.

    Attributes:
        ignored_layers: Modules that stay unquantized, in canonical names. An entry stands for the
            module of that name, for all below it, and for every module whose name contains it as
            whole components (`lm_head`, `mlp.gate`).
        plain_layers: Exact canonical names of modules that the checkpoint turned out to hold
            unquantized.
    """

    ignored_layers: tuple[str, ...] = ()
    plain_layers: frozenset[str] = frozenset()

    @classmethod
    def get_name(cls) -> str:
        return "fp8"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Fp8Config":
        fmt = config.get("fmt") or "e4m3"
        if fmt != "e4m3":
            raise UnsupportedConfigError(
                f"FP8 weights of format {fmt!r} are not supported; expected 'e4m3'"
            )
        if config.get("weight_block_size") is not None:
            raise UnsupportedConfigError(
                f"block-scaled FP8 (weight_block_size {config['weight_block_size']}) is not "
                "supported; "
                "expected per-tensor or per-channel scales"
            )
        scheme = config.get("activation_scheme") or "dynamic"
        if scheme not in ("dynamic", "static"):
            raise UnsupportedConfigError(
                f"FP8 activation_scheme {scheme!r} is not supported; expected 'dynamic' or 'static'"
            )
        ignored: list[str] = []
        for key in ("modules_to_not_convert", "ignored_layers"):
            names = config.get(key) or []
            if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
                raise UnsupportedConfigError(
                    f"{key} in quantization_config: expected a list of names, found {names!r}"
                )
            ignored += [canonical_name(name.removesuffix(".weight")) for name in names]
        return cls(ignored_layers=tuple(ignored))

    def is_ignored(self, module: str) -> bool:
        """Whether `module` (any spelling of its full name) stays unquantized."""
        name = canonical_name(module)
        dotted = f".{name}."
        return name in self.plain_layers or any(
            f".{entry}." in dotted for entry in self.ignored_layers
        )

    def adapt_to(self, metas: Iterable[TensorMeta]) -> "Fp8Config":
        modules: dict[str, dict[str, TensorMeta]] = {}
        unused = 0
        for meta in metas:
            module, parameter = split_tensor_name(meta.name)
            modules.setdefault(module, {})[parameter] = meta
            unused += parameter in UNUSED_SCALE_NAMES
        if unused:
            logger.info(
                "%d activation and KV cache scales are not needed with 16-bit activations", unused
            )
        plain: set[str] = set()
        for module, tensors in modules.items():
            weight = tensors.get("weight")
            scale = next((tensors[name] for name in WEIGHT_SCALE_NAMES if name in tensors), None)
            if weight is None:
                continue
            is_fp8 = weight.torch_dtype == torch.float8_e4m3fn
            if is_fp8 and scale is None:
                raise CheckpointError(
                    "an FP8 weight has no scale",
                    file=weight.file,
                    tensor=weight.name,
                    expected=f"a tensor {module}.weight_scale or {module}.weight_scale_inv",
                    found="neither",
                )
            if not is_fp8 and scale is not None:
                raise CheckpointError(
                    "a scale belongs to a weight that is not FP8",
                    file=scale.file,
                    tensor=scale.name,
                    expected="a float8_e4m3fn weight",
                    found=f"{weight.name} is {str(weight.torch_dtype).removeprefix('torch.')}",
                )
            if not is_fp8:
                plain.add(canonical_name(module))
        return replace(self, plain_layers=frozenset(plain))

    def get_linear_method(self, prefix: str, shard_names: Iterable[str]) -> LinearMethodBase:
        if self.is_ignored(prefix):
            return UnquantizedLinearMethod()
        ignored = {name: self.is_ignored(name) for name in shard_names}
        if not any(ignored.values()):
            return Fp8LinearMethod()
        if all(ignored.values()):
            return UnquantizedLinearMethod()
        raise UnsupportedConfigError(
            "layers that are merged must be all FP8 or all unquantized; found "
            + ", ".join(
                f"{name} {'unquantized' if value else 'FP8'}" for name, value in ignored.items()
            )
        )

    def parameter_name(self, name: str) -> str | None:
        if name in UNUSED_SCALE_NAMES:
            return None
        return "weight_scale" if name in WEIGHT_SCALE_NAMES else name


class Fp8LinearMethod(LinearMethodBase):
    """FP8 weight `[N, K]`, 16-bit activations (W8A16), scale per tensor or per channel.

    Every shard of a merged layer keeps its own scale: where they differ, the per-channel kernel
    runs over scales `[N]`.
    """

    def create_weights(
        self,
        layer: nn.Module,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
    ) -> None:
        weight = torch.empty(output_size, input_size, dtype=torch.float8_e4m3fn)
        scale = torch.empty(output_size, dtype=torch.float32)
        layer.register_parameter(
            "weight", Fp8WeightParameter(weight, shard_sizes, (torch.float8_e4m3fn,))
        )
        layer.register_parameter("weight_scale", WeightScaleParameter(scale, shard_sizes))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed = pack_weight_(layer.get_parameter("weight").data)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        scale = layer.get_parameter("weight_scale").data
        if (scale == scale[0]).all():
            scale = scale[:1].clone()
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        ops = torch.ops.sgl_kernel
        scale = cast(Tensor, layer.weight_scale)
        scaled_mm = (
            ops.fp8_per_tensor_scaled_mm_cpu.default
            if scale.numel() == 1
            else ops.fp8_per_channel_scaled_mm_cpu.default
        )
        rows = flatten_rows(x)
        out = scaled_mm(rows, layer.weight, scale, bias, out_dtype or x.dtype, True)
        return restore_rows(out, x)
