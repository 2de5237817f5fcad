"""Float32 activations: the reference mode (`--dtype float32`) that the others are judged by.

The kernels multiply 16-bit activations. In this mode every weight is dequantised exactly once, when
it is loaded, and Torch multiplies in float32: four times the memory of FP8, and slower. It is for
finding out what a rounding costs, not for serving.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srt.layers.linear import LinearBase
from srt.layers.quantization.linear_method import LinearMethodBase
from srt.layers.quantization.mixed_linear import LinearPart, MixedLinearMethod

# Rows of the identity that one product takes.
_ROWS = 256


def dequantize(layer: LinearBase | LinearPart, method: LinearMethodBase) -> Tensor:
    """`[N, K]` float32, the weight of a layer that `method` has processed, whatever its format.

    It is the product with the identity: each sum has one term, so the stored value times its scale
    comes out with the one rounding of that product.
    """
    columns = []
    for first in range(0, layer.input_size, _ROWS):
        rows = torch.zeros(
            min(_ROWS, layer.input_size - first), layer.input_size, dtype=torch.bfloat16
        )
        rows.diagonal(first).fill_(1)
        columns.append(method.apply(layer, rows, None, torch.float32))
    return torch.cat(columns).T.contiguous()


class Float32LinearMethod(LinearMethodBase):
    """Multiplies in float32 by the dequantised weight of another method.

    Args:
        method: The checkpoint format's own.
    """

    def __init__(self, method: LinearMethodBase) -> None:
        self.method = method

    def create_weights(
        self,
        layer: nn.Module,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
    ) -> None:
        self.method.create_weights(layer, input_size, output_size, shard_sizes)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer, (LinearBase, LinearPart))
        self.method.process_weights_after_loading(layer)
        weight = dequantize(layer, self.method)
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        layer.weight = nn.Parameter(weight, requires_grad=False)

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return F.linear(x, layer.get_parameter("weight"), bias)


def use_float32(model: nn.Module) -> None:
    """Lets every linear layer of a model that is not loaded yet multiply in float32."""
    for module in model.modules():
        if not isinstance(module, (LinearBase, LinearPart)):
            continue
        # Of a layer that is held in several ways, each part is dequantised.
        if not isinstance(module.quant_method, MixedLinearMethod):
            module.quant_method = Float32LinearMethod(module.quant_method)
