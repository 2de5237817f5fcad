"""What a linear layer needs of the way in which its weight is held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class LinearMethodBase(ABC):
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
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Turns the loaded parameters of `layer` into the form that `apply` reads, and drops the
        originals.

        Parameters are all that may change: a packed cache holds these and restores them without
        this call. What `apply` runs is told by them and by what `create_weights` set.
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
