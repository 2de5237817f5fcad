"""Prefixes whose keys and values are still in the cache, as a radix tree over token ids
(RadixAttention: Zheng et al., 2024).

The tree owns the slots of all tokens in it. A running request locks the path of the prefix that it
uses; what no request locks can be evicted, the least recently used leaf first, from its end.

Every operation makes what it needs before it changes the tree. What is interrupted in the middle of
a change all the same (a second Ctrl-C) leaves a tree of no use; `KVManager.reset` begins a new one.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from srt.mem_cache.allocator import NO_SLOTS, SlotArray

TokenArray = npt.NDArray[np.int32]


@dataclass(eq=False)
class TreeNode:
    """A stretch of tokens that all requests below it share.

    Attributes:
        key: Its tokens; empty at the root only.
        value: The slot of each token.
        parent: None at the root, and once the node is evicted.
        children: By the first token of their keys.
        lock_ref: Locks held by requests whose prefix ends here or below.
        last_access: When a match or an insertion last went through it, as a count of those.
    """

    key: TokenArray
    value: SlotArray
    parent: "TreeNode | None"
    children: dict[int, "TreeNode"] = field(default_factory=dict)
    lock_ref: int = 0
    last_access: int = 0


class RadixCache:
    """The tree. Times of its operations grow with the length of a key, not with the tree.

    Attributes:
        root: The empty prefix.
        evictable_size: Tokens that nothing locks.
        protected_size: Tokens that a request locks.
    """

    def __init__(self) -> None:
        self.root = TreeNode(np.empty(0, dtype=np.int32), NO_SLOTS, None)
        self.evictable_size = 0
        self.protected_size = 0
        self._clock = 0
        # (last_access, serial, node) of leaves that could be evicted when they were pushed.
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._serial = 0

    def match_prefix(self, key: TokenArray) -> tuple[SlotArray, TreeNode]:
        """The longest prefix of `key` in the tree.

        Returns:
            Its slots, and the node where it ends. A node is split where it ends inside of one.
        """
        self._clock += 1
        node, values, done = self.root, [], 0
        while done < len(key):
            child = node.children.get(int(key[done]))
            if child is None:
                break
            length = common_length(child.key, key[done:])
            if length < len(child.key):
                child = self._split(child, length)
            self._touch(child)
            values.append(child.value)
            node, done = child, done + length
        return (np.concatenate(values) if values else NO_SLOTS), node

    def insert(self, key: TokenArray, value: SlotArray) -> tuple[int, TreeNode]:
        """Adds a prefix with the slots of its tokens.

        Returns:
            How many leading tokens the tree had already, and the node where the key ends. The tree
            keeps its own slots for those and owns the slots given for the rest.
        """
        slots, node = self.match_prefix(key)
        existing = len(slots)
        if existing < len(key):
            leaf = TreeNode(
                key[existing:].copy(), value[existing:].copy(), node, last_access=self._clock
            )
            node.children[int(key[existing])] = leaf
            self.evictable_size += len(leaf.key)
            self._offer(leaf)
            node = leaf
        return existing, node

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Protects `node` and all above it from eviction."""
        while node.parent is not None:
            if node.lock_ref == 0:
                self.evictable_size -= len(node.key)
                self.protected_size += len(node.key)
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node: TreeNode) -> None:
        """Undoes one `inc_lock_ref` of the same node.

        Raises:
            ValueError: It is not locked.
        """
        while node.parent is not None:
            if node.lock_ref == 0:
                raise ValueError("a node of the radix tree is unlocked more often than locked")
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_size += len(node.key)
                self.protected_size -= len(node.key)
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> SlotArray:
        """Drops `count` tokens, or all that can be if these are fewer.

        Returns:
            Their slots, which the caller owns now.
        """
        freed = np.empty(min(count, self.evictable_size), dtype=np.int32)
        done = 0
        while done < len(freed):
            last_access, _, node = heapq.heappop(self._heap)
            if not _is_evictable_leaf(node) or last_access != node.last_access:
                continue
            length = min(len(node.key), len(freed) - done)
            keep = len(node.key) - length
            freed[done : done + length] = node.value[keep:]
            done += length
            self.evictable_size -= length
            if keep:
                # Not copies, for which there might be no memory when others are gone already.
                node.key, node.value = node.key[:keep], node.value[:keep]
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.key[0])]
            node.parent = None
            self._offer(parent)
        return freed

    def reset(self) -> SlotArray:
        """Drops everything that nothing locks; returns its slots."""
        return self.evict(self.evictable_size)

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        """Cuts a node after `length` tokens; returns the new upper part."""
        assert node.parent is not None
        upper = TreeNode(
            node.key[:length].copy(),
            node.value[:length].copy(),
            node.parent,
            {int(node.key[length]): node},
            node.lock_ref,
            node.last_access,
        )
        key, value = node.key[length:].copy(), node.value[length:].copy()
        node.parent.children[int(node.key[0])] = upper
        node.key, node.value, node.parent = key, value, upper
        return upper

    def _touch(self, node: TreeNode) -> None:
        node.last_access = self._clock
        self._offer(node)

    def _offer(self, node: TreeNode) -> None:
        """Queues a node for eviction if it can be evicted; entries that are out of date are skipped
        when they come up, and dropped here once they are most of the queue.
        """
        if not _is_evictable_leaf(node):
            return
        self._serial += 1
        heapq.heappush(self._heap, (node.last_access, self._serial, node))
        if len(self._heap) > 64 and len(self._heap) > 4 * max(1, self.evictable_size):
            current = {
                id(entry[2]): entry
                for entry in self._heap
                if _is_evictable_leaf(entry[2]) and entry[0] == entry[2].last_access
            }
            self._heap = list(current.values())
            heapq.heapify(self._heap)


def _is_evictable_leaf(node: TreeNode) -> bool:
    return node.parent is not None and not node.children and node.lock_ref == 0


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Leading tokens that are the same."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length
