"""What must hold of the scheduler's state between passes, whatever happened in them."""

from srt.managers.schedule_batch import Req
from srt.managers.scheduler import Scheduler
from srt.mem_cache.radix_cache import RadixCache, TreeNode, _is_evictable_leaf


def check_consistent(scheduler: Scheduler, *, idle: bool = False) -> None:
    """Every slot and row has exactly one owner, locks are those of running requests, and sizes are
    sums.

    Args:
        scheduler: Between passes.
        idle: All requests have ended.

    Raises:
        AssertionError: Something else holds.
    """
    kv = scheduler.kv
    running = [*scheduler._prefilling, *scheduler._decoding]
    assert scheduler._is_consistent
    assert not scheduler._committed
    assert not scheduler._exclusive.is_held
    listed = [*scheduler._waiting, *running]
    assert len(listed) == len(set(listed)), "a request is in two lists"
    assert set(listed) == set(scheduler._running)
    assert all(req.finish_reason is None for req in listed)
    for req in scheduler._waiting:
        assert req.req_pool_idx is None
        assert req.last_node is None
        assert req.kv_len == req.tree_len == req.allocated_len == 0
    if idle:
        assert not listed
        assert not scheduler.has_work
        assert kv.available_size == kv.size

    rows = [req.req_pool_idx for req in running]
    assert sorted([*kv._rows._free, *(row for row in rows if row is not None)]) == list(
        range(1, kv._rows.size + 1)
    ), "rows"

    allocator = kv._allocator
    free = allocator._stack[: allocator._count].tolist()
    assert allocator._is_free.nonzero()[0].tolist() == sorted(free)
    tree = {} if kv._tree is None else _check_tree(kv._tree, running)
    own: list[int] = []
    for req in running:
        assert 0 <= req.tree_len <= req.kv_len <= req.allocated_len <= req.num_slots
        slots = kv._rows.table[req.req_pool_idx]
        own += slots[req.tree_len : req.allocated_len].tolist()
        if kv._tree is None:
            assert req.tree_len == 0
            continue
        assert req.last_node is not None
        keys, values = tree[id(req.last_node)]
        assert keys == req.token_ids[: req.tree_len].tolist()
        assert values == slots[: req.tree_len].tolist()
    of_tree = [] if kv._tree is None else _slots(kv._tree.root)
    assert sorted([*free, *own, *of_tree]) == list(range(1, kv.size + 1)), "slots"


def _slots(node: TreeNode) -> list[int]:
    return node.value.tolist() + [s for child in node.children.values() for s in _slots(child)]


def _check_tree(tree: RadixCache, running: list[Req]) -> dict[int, tuple[list[int], list[int]]]:
    """Tokens and slots of the path to each node, by its id."""
    paths: dict[int, tuple[list[int], list[int]]] = {id(tree.root): ([], [])}
    locks = dict.fromkeys(paths, 0)
    for req in running:
        node = req.last_node
        while node is not None and node.parent is not None:
            locks[id(node)] = locks.get(id(node), 0) + 1
            node = node.parent
    queued = {id(node) for access, _, node in tree._heap if access == node.last_access}
    evictable = protected = 0
    nodes = [tree.root]
    while nodes:
        node = nodes.pop()
        keys, values = paths[id(node)]
        for first, child in node.children.items():
            assert child.parent is node
            assert len(child.key) == len(child.value) > 0
            assert child.key[0] == first
            assert child.lock_ref == locks.get(id(child), 0), "locks"
            if child.lock_ref:
                protected += len(child.key)
            else:
                evictable += len(child.key)
            if _is_evictable_leaf(child):
                assert id(child) in queued, "a leaf that would never be evicted"
            paths[id(child)] = (keys + child.key.tolist(), values + child.value.tolist())
            nodes.append(child)
    assert (tree.evictable_size, tree.protected_size) == (evictable, protected)
    return paths
