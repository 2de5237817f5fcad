"""Which tensors of a checkpoint a model does without, and why: what loading skips and inspection
lists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from srt.checkpoint.kv_scales import is_kv_scale
from srt.checkpoint.weight_names import canonical_name, is_derived_buffer, split_tensor_name
from srt.checkpoint.weight_scales import UNUSED_SCALE_NAMES

# Nobody has as many layers as numbers of ten digits count, and Python refuses to read long ones.
_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")


@dataclass(frozen=True)
class UnusedTensors:
    """The tensors that a text model does without.

    Attributes:
        skipped_modules: Modules of the wrapper around it, in canonical names.
        tied: The output projection is the table of embeddings.
        num_layers: Decoder layers.
        num_predicting_layers: Layers after these, which predict further tokens.
        has_scales: The checkpoint's format has scales; else one is no tensor that it may hold.
    """

    skipped_modules: tuple[str, ...] = ()
    tied: bool = False
    num_layers: int = 0
    num_predicting_layers: int = 0
    has_scales: bool = True

    def reason(self, tensor: str) -> str | None:
        """Why the model does without the tensor of this name, in any spelling; None if it does
        not.
        """
        name = canonical_name(tensor)
        if name.startswith(tuple(f"{module}." for module in self.skipped_modules)):
            return "text does without"
        if self.has_scales and is_kv_scale(name):
            return "only for an FP8 KV cache (--kv-cache-dtype fp8_e4m3)"
        if self.has_scales and split_tensor_name(name)[1] in UNUSED_SCALE_NAMES:
            return "activations stay in 16 bits"
        if self.tied and name.startswith("lm_head."):
            return "lm_head is tied to the embeddings"
        if is_derived_buffer(name):
            return "follows from the configuration"
        layer = _LAYER.match(name)
        first = self.num_layers
        if layer is not None and first <= int(layer[1]) < first + self.num_predicting_layers:
            return "predicts further tokens, for speculative decoding"
        return None
