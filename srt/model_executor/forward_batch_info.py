"""What one forward pass computes: which tokens of which requests, at which cache slots."""

from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from srt.mem_cache.memory_pool import TokenToKVPool


class ForwardMode(Enum):
    """Kind of a forward pass."""

    EXTEND = auto()
    """One or more prompt tokens of each request, after what the cache already holds of it."""

    DECODE = auto()
    """One token of each request."""


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass over T tokens of B requests; all tensors are int64 on the CPU.

    Attributes:
        forward_mode: EXTEND or DECODE.
        input_ids: `[T]`, the tokens of the requests one after another.
        positions: `[T]`, the place of each token in its request.
        out_cache_loc: `[T]`, the cache slot that each token's key and value go to.
        cache_starts: `[B]`, the slot of each request's first token.
        seq_lens: `[B]`, tokens of each request including those of this pass; 0 for a padding row.
        extend_lens: `[B]`, tokens of each request in this pass; they add up to T.
        kv_pool: The cache.
    """

    forward_mode: ForwardMode
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    cache_starts: Tensor
    seq_lens: Tensor
    extend_lens: Tensor
    kv_pool: TokenToKVPool

    def last_token_indices(self) -> Tensor:
        """`[B]`, the index within T of each request's last token, whose output predicts the next
        one.
        """
        return self.extend_lens.cumsum(0) - 1
