"""Quantizes a bf16, fp16 or f32 checkpoint to FP8 while it is loaded, layer by layer.

The result is the same, bit for bit, as that of loading what `srt quantize` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from srt.checkpoint.dtypes import FLOAT_DTYPES, join_names
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.checkpoint.formats.schemes import QUANTIZATION_CHOICES, Scheme
from srt.checkpoint.formats.weight_format import OnlineFp8Weight, PlainWeight, WeightFormat
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.weight_names import canonical_name, is_decoder_module, split_tensor_name
from srt.errors import CheckpointError, UnsupportedConfigError


@dataclass(frozen=True)
class OnlineFp8Config(QuantizationConfig):
    """Linear layers inside decoder layers become FP8; everything else stays as it is.

    Attributes:
        scheme: Which elements are going to share a scale.
        dtypes: Dtype code of each module's weight in the checkpoint, by canonical name.
    """

    has_scales = False

    scheme: Scheme
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
            if meta.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    "cannot quantize a weight of this dtype",
                    file=meta.file,
                    tensor=meta.name,
                    expected=join_names(FLOAT_DTYPES),
                    found=meta.dtype_name,
                )
            dtypes[canonical_name(module)] = meta.dtype
        return replace(self, dtypes=dtypes)

    def weight_formats(self, prefix: str, shard_names: Sequence[str]) -> tuple[WeightFormat, ...]:
        if not is_decoder_module(prefix):
            return (PlainWeight(),)
        names = map(canonical_name, (prefix, *shard_names))
        found = {self.dtypes[name] for name in names if name in self.dtypes}
        # Shards of different dtypes are loaded in the one that holds them all exactly.
        return (OnlineFp8Weight(self.scheme, found.pop() if len(found) == 1 else "F32"),)
