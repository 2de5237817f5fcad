"""The slot allocator, the request table and the radix tree of prefixes, against models that are
obviously right.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.mem_cache.radix_cache import RadixCache, TokenArray, TreeNode
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="per-commit")

# Few different tokens, so that prefixes are shared often.
KEYS = st.lists(st.integers(0, 2), min_size=0, max_size=8).map(tuple)
Key = tuple[int, ...]


def array(key: Key) -> TokenArray:
    return np.array(key, dtype=np.int32)


class RadixCacheMachine(RuleBasedStateMachine):
    """The tree against a dictionary from each cached prefix to the slot of its last token."""

    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache()
        self.model: dict[Key, int] = {}
        self.locked: list[Key] = []
        self.used: dict[Key, int] = {}  # when a prefix was last used
        self.clock = 0
        self.next_slot = 1

    def use(self, key: Key) -> None:
        self.clock += 1
        for length in range(1, len(key) + 1):
            self.used[key[:length]] = self.clock

    def longest(self, key: Key) -> int:
        return next(n for n in range(len(key), -1, -1) if n == 0 or key[:n] in self.model)

    def match(self, key: Key) -> TreeNode:
        slots, node = self.cache.match_prefix(array(key))
        length = self.longest(key)
        assert slots.tolist() == [self.model[key[: i + 1]] for i in range(length)]
        self.use(key[:length])
        return node

    @rule(key=KEYS)
    def lookup(self, key: Key) -> None:
        self.match(key)

    @rule(key=KEYS)
    def insert(self, key: Key) -> None:
        slots = np.arange(self.next_slot, self.next_slot + len(key), dtype=np.int32)
        self.next_slot += len(key)
        existing, _ = self.cache.insert(array(key), slots)
        assert existing == self.longest(key)
        for i in range(existing, len(key)):
            self.model[key[: i + 1]] = int(slots[i])
        self.use(key)

    @rule(target=locks, key=KEYS)
    def lock(self, key: Key) -> tuple[Key, TreeNode]:
        node = self.match(key)
        self.cache.inc_lock_ref(node)
        self.locked.append(key[: self.longest(key)])
        return self.locked[-1], node

    @rule(lock=consumes(locks))
    def unlock(self, lock: tuple[Key, TreeNode]) -> None:
        key, node = lock
        self.cache.dec_lock_ref(node)
        self.locked.remove(key)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        evictable = set(self.model) - self.protected()
        freed = self.cache.evict(count).tolist()
        assert len(freed) == len(set(freed)) == min(count, len(evictable))
        gone = {key for key, slot in self.model.items() if slot in set(freed)}
        assert gone <= evictable
        assert len(gone) == len(freed)
        for key in gone:
            del self.model[key]
        # What is left is closed under prefixes, and no leaf that could have gone was used before
        # one that went.
        assert all(key[:-1] in self.model for key in self.model if len(key) > 1)
        if gone:
            parents = {key[:-1] for key in self.model}
            leaves = [k for k in set(self.model) & evictable if k not in parents]
            last = max(self.used[key] for key in gone)
            assert all(self.used[leaf] >= last for leaf in leaves)

    def protected(self) -> set[Key]:
        return {key[:n] for key in self.locked for n in range(1, len(key) + 1)}

    @invariant()
    def sizes_agree(self) -> None:
        protected = len(self.protected())
        assert self.cache.protected_size == protected
        assert self.cache.evictable_size == len(self.model) - protected


TestRadixCacheMachine = RadixCacheMachine.TestCase
TestRadixCacheMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a set of free slots."""

    SIZE = 12
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(self.SIZE)
        self.free_slots = set(range(1, self.SIZE + 1))

    @rule(target=held, count=st.integers(0, SIZE + 1))
    def alloc(self, count: int) -> list[int]:
        slots = self.allocator.alloc(count)
        if count > len(self.free_slots):
            assert slots is None
            return []
        assert slots is not None
        assert len(set(slots.tolist())) == count
        assert set(slots.tolist()) <= self.free_slots
        self.free_slots -= set(slots.tolist())
        return slots.tolist()

    @rule(slots=consumes(held), split=st.integers(0, SIZE))
    def free(self, slots: list[int], split: int) -> None:
        self.allocator.free(np.array(slots[:split], dtype=np.int32))
        self.allocator.free(np.array(slots[split:], dtype=np.int32))
        self.free_slots |= set(slots)

    @invariant()
    def sizes_agree(self) -> None:
        assert self.allocator.available_size == len(self.free_slots)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


def test_a_fresh_allocator_counts_up() -> None:
    allocator = TokenToKVPoolAllocator(8)
    slots = [allocator.alloc(3), allocator.alloc(2)]
    assert [s.tolist() for s in slots if s is not None] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("slots", [[5], [1, 5], [1, 1], [0], [9], [-1]])
def test_slots_that_are_not_in_use_are_refused(slots: list[int]) -> None:
    allocator = TokenToKVPoolAllocator(8)
    allocator.alloc(3)
    with pytest.raises(ValueError, match=r"not all in use|given back twice"):
        allocator.free(np.array(slots, dtype=np.int32))
    assert allocator.available_size == 5


def test_eviction_takes_the_least_recently_used_from_its_end() -> None:
    cache = RadixCache()
    cache.insert(array((1, 2, 3, 4)), array((11, 12, 13, 14)))
    cache.insert(array((1, 2, 7)), array((0, 0, 17)))
    cache.match_prefix(array((1, 2, 3)))  # the tail (4) is now older than (3), and than nothing
    assert cache.evict(2).tolist() == [14, 17]
    assert cache.evict(1).tolist() == [13]
    assert cache.match_prefix(array((1, 2, 3, 4)))[0].tolist() == [11, 12]
    assert cache.evict(9).tolist() in ([12, 11], [11, 12])
    assert cache.evict(1).size == 0


def test_a_node_is_not_unlocked_more_often_than_locked() -> None:
    cache = RadixCache()
    _, node = cache.insert(array((1, 2)), array((3, 4)))
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    with pytest.raises(ValueError, match="more often"):
        cache.dec_lock_ref(node)


def test_many_matches_do_not_grow_the_eviction_queue() -> None:
    cache = RadixCache()
    cache.insert(array((1, 2)), array((3, 4)))
    for _ in range(1000):
        cache.match_prefix(array((1, 2)))
    assert len(cache._heap) <= 65
    assert cache.evict(2).tolist() == [3, 4]


def test_request_rows() -> None:
    pool = ReqToTokenPool(2, 5)
    assert pool.req_to_token.shape == (3, 5)
    rows = [pool.alloc(), pool.alloc()]
    assert rows == [1, 2]
    assert pool.alloc() is None
    pool.table[1, :3] = (7, 8, 9)
    assert pool.req_to_token[1].tolist() == [7, 8, 9, 0, 0]
    pool.free(2)
    assert (pool.available_size, pool.alloc()) == (1, 2)
    for row in (0, 3):
        with pytest.raises(ValueError, match=f"row {row} is not in use"):
            pool.free(row)
