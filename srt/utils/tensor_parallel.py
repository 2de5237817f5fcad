"""How much of a model each rank holds (tensor parallelism: Shoeybi et al., "Megatron-LM", 2019).

Layers and the KV cache ask here for every size that ranks share out, so that the arithmetic stands
once.
"""

from dataclasses import dataclass

from srt.errors import UnsupportedConfigError


@dataclass(frozen=True)
class TensorParallel:
    """Ranks that hold a model together; the only one holds all of it.

    Attributes:
        size: How many ranks there are.
    """

    size: int = 1

    def part(self, total: int, unit: str, owner: str) -> int:
        """How many of `total` rows, columns or heads each rank holds.

        Args:
            total: Number of all.
            unit: What they are, in the plural, for the error.
            owner: The layer that they are of, for the error.

        Raises:
            UnsupportedConfigError: Ranks cannot hold equally many.
        """
        if total % self.size:
            raise UnsupportedConfigError(
                f"{owner}: {total} {unit} cannot be shared out among {self.size} ranks"
            )
        return total // self.size

    def kv_heads(self, total: int, owner: str) -> int:
        """How many of `total` heads of keys and values each rank holds, for its query heads: its
        part, or one that several ranks hold where there are fewer heads than ranks.

        Raises:
            UnsupportedConfigError: Ranks cannot hold equally many, nor equally many ranks each
                head.
        """
        if total < self.size and self.size % total == 0:
            return 1
        return self.part(total, "KV heads", owner)
