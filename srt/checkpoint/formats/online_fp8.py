"""Quantizes a bf16, fp16 or f32 checkpoint to FP8 while it is loaded, layer by layer.

The result is the same, bit for bit, as that of loading what `srt quantize` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from srt.checkpoint.checkpoint import DTYPES, TensorMeta
from srt.checkpoint.dtypes import QUANTIZATION_CHOICES
from srt.checkpoint.weight_names import canonical_name, is_decoder_module, split_tensor_name
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig

_SOURCE_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class OnlineFp8Config(QuantizationConfig):
    """Linear layers inside decoder layers become FP8; everything else stays as it is.

    Attributes:
        scheme: Name of a scheme of `srt.layers.quantization.fp8_quantization`.
        dtypes: Dtype code of each module's weight in the checkpoint, by canonical name.
    """

    scheme: str
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_choice(cls, choice: str) -> OnlineFp8Config:
        """The configuration for one of QUANTIZATION_CHOICES.

        Raises:
            UnsupportedConfigError: It is none of them.
        """
        if choice not in QUANTIZATION_CHOICES:
            raise UnsupportedConfigError(
                f"quantization {choice!r} is not supported; "
                f"expected one of {', '.join(QUANTIZATION_CHOICES)}"
            )
        return cls(QUANTIZATION_CHOICES[choice])

    def adapt_to(self, metas: Iterable[TensorMeta]) -> OnlineFp8Config:
        dtypes = {}
        for meta in metas:
            module, parameter = split_tensor_name(meta.name)
            if parameter != "weight" or not is_decoder_module(module):
                continue
            if meta.dtype not in _SOURCE_DTYPES:
                raise CheckpointError(
                    "cannot quantize a weight of this dtype",
                    file=meta.file,
                    tensor=meta.name,
                    expected=" or ".join(DTYPES[dtype][0] for dtype in _SOURCE_DTYPES),
                    found=DTYPES[meta.dtype][0],
                )
            dtypes[canonical_name(module)] = meta.dtype
        return replace(self, dtypes=dtypes)

    def get_linear_method(self, prefix: str, shard_names: Iterable[str]) -> LinearMethodBase:
        from srt.layers.quantization.fp8_quantization import SCHEMES
        from srt.layers.quantization.online_fp8_linear import OnlineFp8LinearMethod
        from srt.layers.quantization.unquant import UnquantizedLinearMethod

        if not is_decoder_module(prefix):
            return UnquantizedLinearMethod()
        names = map(canonical_name, (prefix, *shard_names))
        found = {self.dtypes[name] for name in names if name in self.dtypes}
        # Shards of different dtypes are loaded in the one that holds them all exactly.
        dtype = found.pop() if len(found) == 1 else "F32"
        return OnlineFp8LinearMethod(SCHEMES[self.scheme], DTYPES[dtype][0])

    def parameter_name(self, name: str) -> str | None:
        return name
