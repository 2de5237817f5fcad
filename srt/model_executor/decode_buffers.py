"""The batches of decode passes, in memory that is reused: a step writes a few numbers into arrays
whose tensors exist already.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from srt.mem_cache.allocator import PADDING_SLOT
from srt.mem_cache.memory_pool import TokenToKVPool
from srt.mem_cache.req_to_token_pool import PADDING_REQUEST, ReqToTokenPool


class DecodeBuffers:
    """Decode batches of up to `max_batch_size` requests.

    Args:
        max_batch_size: Most rows.
        req_to_token_pool: The table that rows refer to.
        kv_pool: The cache.
    """

    def __init__(
        self, max_batch_size: int, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool
    ) -> None:
        self._pool = req_to_token_pool
        self._kv_pool = kv_pool

        def array() -> npt.NDArray[np.int64]:
            return np.zeros(max_batch_size, dtype=np.int64)

        # An array for each field: code that is compiled for inputs that are one tensor would be
        # compiled again for those that are not.
        self._input_ids, self._positions, self._locations = array(), array(), array()
        self._rows, self._seq_lens = array(), array()
        self._batches: dict[int, ForwardBatch] = {}

    def fill(
        self,
        token_ids: Sequence[int],
        req_pool_indices: Sequence[int],
        seq_lens: Sequence[int],
        size: int,
    ) -> ForwardBatch:
        """A batch of `size` rows, valid until the next call: the requests given, then padding.

        Args:
            token_ids: The token of each request.
            req_pool_indices: Its row of the request table, where the token's slot is written.
            seq_lens: Its length, the token included.
            size: At least the number of requests.
        """
        count = len(token_ids)
        self._input_ids[:count] = token_ids
        self._rows[:count] = req_pool_indices
        self._seq_lens[:count] = seq_lens
        positions = self._positions[:count]
        np.subtract(self._seq_lens[:count], 1, out=positions)
        self._locations[:count] = self._pool.table[self._rows[:count], positions]
        if size > count:
            self._input_ids[count:size] = 0
            self._positions[count:size] = 0
            self._rows[count:size] = PADDING_REQUEST
            self._seq_lens[count:size] = 1
            self._locations[count:size] = PADDING_SLOT
        batch = self._batches.get(size)
        if batch is None:
            batch = self._batches[size] = self._make(size)
        return batch

    def _make(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=torch.from_numpy(self._input_ids[:size]),
            positions=torch.from_numpy(self._positions[:size]),
            out_cache_loc=torch.from_numpy(self._locations[:size]),
            req_to_token=self._pool.req_to_token,
            req_pool_indices=torch.from_numpy(self._rows[:size]),
            seq_lens=torch.from_numpy(self._seq_lens[:size]),
            extend_seq_lens=torch.ones(size, dtype=torch.int64),
            extend_start_loc=torch.arange(size),
            max_extend_len=1,
            logits_indices=torch.arange(size),
            kv_pool=self._kv_pool,
        )
