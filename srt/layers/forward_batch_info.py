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
    """One forward pass over T tokens of B requests; tensors are int64 on the CPU unless noted.

    A padding row of a decode pass is a request of one token in row PADDING_REQUEST and slot
    PADDING_SLOT.

    Attributes:
        forward_mode: EXTEND or DECODE.
        input_ids: `[T]`, the tokens of the requests one after another.
        positions: `[T]`, the place of each token in its request.
        out_cache_loc: `[T]`, the cache slot that each token's key and value go to.
        req_to_token: `[rows, max_context_len]` int32, the slot of each token of each request.
        req_pool_indices: `[B]`, each request's row of `req_to_token`.
        seq_lens: `[B]`, tokens of each request including those of this pass.
        extend_seq_lens: `[B]`, tokens of each request in this pass; they add up to T.
        extend_start_loc: `[B]`, the index within T of each request's first token.
        max_extend_len: The largest of `extend_seq_lens`.
        logits_indices: `[L]`, the indices within T whose logits are wanted, rising.
        kv_pool: The cache.
    """

    forward_mode: ForwardMode
    input_ids: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    extend_seq_lens: Tensor
    extend_start_loc: Tensor
    max_extend_len: int
    logits_indices: Tensor
    kv_pool: TokenToKVPool
