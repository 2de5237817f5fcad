"""What a quantization format must provide.

A `QuantizationConfig` is one checkpoint's description of its format; it hands each linear layer the
`LinearMethodBase` that declares, prepares and multiplies that layer's weight.

Configurations import no Torch, so that a checkpoint can be inspected in a fraction of a second;
their methods do, once a layer asks for one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from srt.checkpoint.checkpoint import TensorMeta

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class QuantizeMethodBase(ABC):
    """How one layer holds and applies its weight."""

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Turns the loaded parameters of `layer` into the form that `apply` reads, and drops the
        originals.

        Parameters are all that may change: a packed cache holds these and restores them without
        this call. What `apply` runs is told by them and by what `create_weights` set.
        """


class LinearMethodBase(QuantizeMethodBase):
    """How a linear layer `y = x W^T + b` holds and applies its weight."""

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        input_size: int,
        output_size: int,
        shard_sizes: Mapping[str, int],
    ) -> None:
        """Registers on `layer` the parameters that a checkpoint fills.

        Args:
            layer: The layer that will own them.
            input_size: K.
            output_size: N.
            shard_sizes: Output rows of each merged shard by its id, in order; they add up to N.
                Empty if nothing is merged.
        """

    @abstractmethod
    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiplies.

        Args:
            layer: A layer whose weights are processed.
            x: `[..., K]`, bfloat16 or float16.
            bias: `[N]` float32, or None.
            out_dtype: Dtype of the result: that of `x` (None) or float32.

        Returns:
            `[..., N]`.
        """


class QuantizationConfig(ABC):
    """How the linear layers of a checkpoint are held."""

    @abstractmethod
    def adapt_to(self, metas: Iterable[TensorMeta]) -> QuantizationConfig:
        """This config completed with what only the checkpoint's tensors tell, after checking that
        they are consistent with it.

        Reads headers only.

        Raises:
            CheckpointError: A tensor contradicts the format.
        """

    @abstractmethod
    def get_linear_method(self, prefix: str, shard_names: Iterable[str]) -> LinearMethodBase:
        """The method for a linear layer.

        Args:
            prefix: The layer's full module name.
            shard_names: Full name of each module merged into it, if any.

        Raises:
            UnsupportedConfigError: The shards of one layer are not all quantized the same way.
        """

    @abstractmethod
    def parameter_name(self, name: str) -> str | None:
        """The parameter that a checkpoint tensor fills, or None if the tensor is not needed.

        Args:
            name: Last component of the tensor's name, such as `weight_scale_inv`.
        """
