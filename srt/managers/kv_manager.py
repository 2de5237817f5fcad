"""Which cache slots and table row each request has, and which slots the prefix tree keeps."""

import time
from collections.abc import Iterable

from srt.managers.schedule_batch import Req
from srt.mem_cache.allocator import NO_SLOTS, SlotArray
from srt.mem_cache.radix_cache import RadixCache, common_length
from srt.model_executor.model_runner import ModelRunner

# Slots evicted beyond those needed at once, so that a full cache is not swept for every token.
_EVICT_AHEAD = 64


class KVManager:
    """The slots of running requests.

    Of a running request's slots the first `tree_len` belong to the prefix tree, where the request
    locks them; the others are its own.

    All of it could be computed again. So what fails or is interrupted in the middle of a change
    needs no undo: :meth:`reset` begins with an empty cache.

    Args:
        runner: Whose cache it is.
        enable_radix_cache: Keep what ended requests leave for those with the same prefix.
    """

    def __init__(self, runner: ModelRunner, enable_radix_cache: bool) -> None:
        self._allocator = runner.allocator
        self._rows = runner.req_to_token_pool
        self._enable_radix_cache = enable_radix_cache
        self._tree = RadixCache() if enable_radix_cache else None

    def reset(self, reqs: Iterable[Req]) -> None:
        """Begins again with an empty cache: takes back all slots and rows, in whatever state they
        are, and all that these requests have, which are all that have something.
        """
        self._allocator.reset()
        self._rows.reset()
        self._tree = RadixCache() if self._enable_radix_cache else None
        for req in reqs:
            _forget_cache(req)

    @property
    def size(self) -> int:
        """Slots in total."""
        return self._allocator.size

    @property
    def available_size(self) -> int:
        """Slots that a new request can get: free ones and those of prefixes that nothing uses."""
        return self._allocator.available_size + self.cached_size

    @property
    def cached_size(self) -> int:
        """Slots of prefixes that nothing uses now."""
        return 0 if self._tree is None else self._tree.evictable_size

    @property
    def has_row(self) -> bool:
        """Whether another request can run."""
        return self._rows.available_size > 0

    def match(self, req: Req) -> int:
        """Tokens of a request that the tree has, the last one of all left out: its logits are
        needed.
        """
        if self._tree is None or self._skips_tree(req):
            return 0
        return len(self._tree.match_prefix(req.token_ids[:-1])[0])

    def common_prefix(self, req: Req, other: Req) -> int:
        """Leading tokens of `req`, the last left out, that it could share with `other`."""
        if self._tree is None or self._skips_tree(req):
            return 0
        return common_length(req.token_ids[:-1], other.token_ids)

    def admit(self, req: Req, reserve: int) -> bool:
        """Gives a request a row and slots for all its tokens; changes nothing and returns False if
        they are not there with `reserve` slots to spare.
        """
        prefix, node = NO_SLOTS, None
        if self._tree is not None:
            key = req.token_ids[: 0 if self._skips_tree(req) else -1]
            prefix, node = self._tree.match_prefix(key)
            self._tree.inc_lock_ref(node)
        matched = len(prefix)
        needed = req.seq_len - matched
        slots = None
        try:
            if self.available_size >= needed + reserve:
                slots = self._alloc(needed)
        finally:
            if slots is None and self._tree is not None and node is not None:
                self._tree.dec_lock_ref(node)
        if slots is None:
            return False
        row = self._rows.alloc()
        assert row is not None, "the caller has asked has_row"
        self._rows.table[row, :matched] = prefix
        self._rows.table[row, matched : matched + needed] = slots
        req.req_pool_idx, req.last_node = row, node
        req.kv_len = req.tree_len = matched
        req.allocated_len = matched + needed
        if req.started_at == 0:
            req.cached_tokens = min(matched, len(req.prompt_ids))
            req.started_at = time.perf_counter()
        return True

    def can_grow(self, reqs: list[Req]) -> bool:
        """Whether each request can get a slot for its next token."""
        return self.available_size >= len(_to_grow(reqs))

    def grow(self, reqs: list[Req]) -> None:
        """Gives each request a slot for its next token, if a pass that came to nothing has not; the
        caller has asked `can_grow`.
        """
        growing = _to_grow(reqs)
        slots = self._alloc(len(growing))
        for req, slot in zip(growing, slots.tolist(), strict=True):
            self._rows.table[req.req_pool_idx, req.kv_len] = slot
            req.allocated_len = req.kv_len + 1

    def share(self, req: Req) -> None:
        """Lets the tree have what a running request has computed, for others with its prefix."""
        if self._tree is None:
            return
        row = self._rows.table[req.req_pool_idx]
        key = req.token_ids[: req.kv_len]
        own = row[req.tree_len : req.kv_len].copy()
        existing, node = self._tree.insert(key, row[: req.kv_len])
        assert req.last_node is not None
        old, old_len = req.last_node, req.tree_len
        self._tree.inc_lock_ref(node)
        self._tree.dec_lock_ref(old)
        req.last_node, req.tree_len = node, req.kv_len
        if existing > old_len:
            # Another request has computed the same meanwhile: use its slots.
            row[: req.kv_len] = self._tree.match_prefix(key)[0]
            self._allocator.free(own[: existing - old_len])

    def release(self, req: Req) -> None:
        """Takes row and slots of a request that ends or is retracted; the tree keeps what was
        computed.
        """
        row = self._rows.table[req.req_pool_idx]
        own = row[req.tree_len if self._tree is None else req.kv_len : req.allocated_len].copy()
        if self._tree is not None:
            self.share(req)
            assert req.last_node is not None
            self._tree.dec_lock_ref(req.last_node)
        self._allocator.free(own)
        assert req.req_pool_idx is not None
        self._rows.free(req.req_pool_idx)
        _forget_cache(req)

    def _skips_tree(self, req: Req) -> bool:
        return req.params.return_prompt_logprob and not req.output_ids

    def _alloc(self, count: int) -> SlotArray:
        missing = count - self._allocator.available_size
        if missing > 0:
            assert self._tree is not None
            self._allocator.free(self._tree.evict(missing + _EVICT_AHEAD))
        slots = self._allocator.alloc(count)
        assert slots is not None, "the caller has asked for what is available"
        return slots


def _to_grow(reqs: list[Req]) -> list[Req]:
    return [req for req in reqs if req.allocated_len == req.kv_len]


def _forget_cache(req: Req) -> None:
    req.req_pool_idx = req.last_node = None
    req.kv_len = req.tree_len = req.allocated_len = 0
