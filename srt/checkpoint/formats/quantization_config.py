"""What a checkpoint format provides: data on what each linear layer holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

from srt.checkpoint.formats.weight_format import WeightFormat
from srt.checkpoint.tensor_meta import TensorMeta

Config = TypeVar("Config", bound="QuantizationConfig")


class QuantizationConfig(ABC):
    """How the linear layers of a checkpoint are held.

    Attributes:
        has_scales: The checkpoint may hold scales: of weights, and of activations and the KV cache,
            which no product here needs.
    """

    has_scales: ClassVar[bool]

    @abstractmethod
    def adapt_to(self: Config, metas: Iterable[TensorMeta]) -> Config:
        """This config completed with what only the checkpoint's tensors tell, after checking that
        they are consistent with it.

        Reads headers only.

        Raises:
            CheckpointError: A tensor contradicts the format.
        """

    @abstractmethod
    def weight_formats(self, prefix: str, shard_names: Sequence[str]) -> tuple[WeightFormat, ...]:
        """What the weight of a linear layer is.

        Args:
            prefix: The layer's full module name.
            shard_names: Full name of each module merged into it, if any.

        Returns:
            One format for each of the shards, in their order, or one for all of the layer.
        """

    def block_size(self, module: str) -> tuple[int, int] | None:
        """(block_n, block_k) that a grid of scales of `module`, any spelling of its full name,
        would have in the checkpoint; None if it has none.
        """
        return None

    def parameter_name(self, name: str) -> str:
        """The parameter that a checkpoint tensor fills.

        Args:
            name: Last component of the tensor's name, such as `weight_scale_inv`.
        """
        return name
