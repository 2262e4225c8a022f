from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.memory import MemoryIndex
from kvindex.routing_memory import EXPIRE_BLOCKS, RoutingMemory, _WorkerMemory


def blocks(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


def memory_of(capacity: int, worker: str = "w") -> tuple[RoutingMemory, MemoryIndex]:
    index = MemoryIndex()
    memory = RoutingMemory(index)
    memory.set_capacity(worker, capacity)
    return memory, index


def test_nothing_is_kept_of_a_worker_that_left() -> None:
    memory, index = memory_of(1000)
    chain = blocks(30)
    memory.record("w", "s", chain, now=1)
    memory.remove("w")
    memory.remove("w")
    assert index.match(chain) == {} and memory.used_blocks("w") == 0 and not memory.holds("w", "s")
    with pytest.raises(KeyError):
        memory.record("w", "s", chain, now=2)
    memory.set_capacity("w", 10)
    memory.record("w", "s", chain, now=3)
    assert index.match(chain) == {"w": 10}


def test_a_growing_session_is_matched_to_its_worker() -> None:
    memory, index = memory_of(1000)
    chain = blocks(300)
    for turn in range(1, 11):
        memory.record("w", "s", chain[: 30 * turn], now=turn)
        assert index.match(chain) == {"w": 30 * turn}
        assert memory.used_blocks("w") == 30 * turn


def test_a_shared_system_prompt_counts_once_and_stays_while_one_session_needs_it() -> None:
    memory, index = memory_of(100)
    system = blocks(40, 1)
    first, second = system + blocks(30, 2), system + blocks(30, 3)
    memory.record("w", "first", first, now=1)
    memory.record("w", "second", second, now=2)
    assert memory.used_blocks("w") == 100
    other = blocks(30, 4)
    memory.record("w", "other", other, now=3)
    assert index.match(first) == {"w": 40}
    assert index.match(second) == {"w": 70}
    assert index.match(other) == {"w": 30}


def test_eviction_takes_the_least_recently_used_session_tail_first() -> None:
    memory, index = memory_of(100)
    a, b, c = blocks(50, 1), blocks(50, 2), blocks(20, 3)
    memory.record("w", "a", a, now=1)
    memory.record("w", "b", b, now=2)
    memory.record("w", "a", a, now=3)
    memory.record("w", "c", c, now=4)
    assert index.match(a) == {"w": 50}
    assert index.match(b) == {"w": 30}
    memory.record("w", "b", b, now=5)
    assert index.match(b) == {"w": 50}
    assert index.match(a) == {"w": 30}


def test_what_compaction_leaves_behind_is_evicted_before_the_session() -> None:
    memory, index = memory_of(100)
    system = blocks(10, 1)
    before, after = system + blocks(70, 2), system + blocks(20, 3)
    memory.record("w", "s", before, now=1)
    memory.record("w", "s", after, now=2)
    assert memory.used_blocks("w") == 100
    after += blocks(30, 4)
    memory.record("w", "s", after, now=3)
    assert index.match(after) == {"w": 60}
    assert index.match(before) == {"w": 50}


def test_a_chain_beyond_the_capacity_keeps_its_beginning() -> None:
    memory, index = memory_of(50)
    memory.record("w", "small", blocks(20, 1), now=1)
    chain = blocks(80, 2)
    memory.record("w", "s", chain, now=2)
    memory.record("w", "s", chain, now=3)
    assert index.match(chain) == {"w": 50}
    assert memory.used_blocks("w") == 50


def test_expiry_is_bounded_by_call_and_spares_what_is_used() -> None:
    index = MemoryIndex()
    memory = RoutingMemory(index, ttl_s=10)
    memory.set_capacity("w", 10 * EXPIRE_BLOCKS)
    old, used = blocks(EXPIRE_BLOCKS + 100, 1), blocks(50, 2)
    memory.record("w", "old", old, now=0)
    memory.record("w", "used", used, now=0)
    memory.record("w", "used", used, now=8)
    assert memory.expire(now=9) == 0
    assert memory.expire(now=12) == EXPIRE_BLOCKS
    assert index.match(old) == {"w": 100}
    assert memory.expire(now=12) == 100
    assert memory.expire(now=12) == 0
    assert index.match(old) == {}
    assert index.match(used) == {"w": 50}
    assert memory.expire(now=18) == 50
    assert len(index) == 0


def test_feedback_lowers_the_capacity_a_little_but_keeps_the_request() -> None:
    memory, index = memory_of(1000)
    other, chain = blocks(600, 1), blocks(400, 2)
    memory.record("w", "other", other, now=1)
    memory.record("w", "s", chain, now=2)
    memory.trim("w", "s", 400)
    assert memory.capacity_blocks("w") == 1000
    memory.trim("w", "s", 100)
    assert memory.capacity_blocks("w") == 980
    assert index.match(other) == {"w": 580}
    for _ in range(200):
        memory.trim("w", "s", 0)
    assert memory.capacity_blocks("w") == 400
    assert index.match(chain) == {"w": 400}
    assert index.match(other) == {}
    memory.trim("w", "unheard of", 0)
    memory.trim("nobody", "s", 0)
    memory.set_capacity("w", 1000)
    assert memory.capacity_blocks("w") == 1000


def test_forgetting_a_worker_leaves_the_others_alone() -> None:
    memory, index = memory_of(100)
    memory.set_capacity("v", 100)
    chain = blocks(50)
    memory.record("w", "s", chain, now=1)
    memory.record("v", "s", chain[:20], now=2)
    memory.trim("w", "s", 0)
    memory.forget("w")
    assert memory.used_blocks("w") == 0
    assert memory.capacity_blocks("w") == 100
    assert index.match(chain) == {"v": 20}
    memory.record("w", "s", chain, now=3)
    assert index.match(chain) == {"v": 20, "w": 50}


def test_a_worker_without_capacity_is_an_error() -> None:
    memory = RoutingMemory(MemoryIndex())
    with pytest.raises(KeyError):
        memory.record("unknown", "s", blocks(3), now=0)
    assert memory.used_blocks("unknown") == 0
    memory.set_capacity("w", 0)
    memory.record("w", "s", blocks(3), now=0)
    assert memory.used_blocks("w") == 0


def test_paths_stay_short_when_forks_come_and_go() -> None:
    """A client that rewrites the end of its prompt every turn forks every turn."""
    memory, _ = memory_of(500)
    chain = blocks(400, 1)
    for turn in range(1, 391):
        memory.record("w", "s", chain[:turn] + blocks(8, 1000 + turn), now=turn)
    path, strand = 0, memory._workers["w"].sessions["s"]
    while strand:
        path, strand = path + 1, strand.parent
    assert path < 40
    check_tree(memory._workers["w"])


def check_tree(tree: _WorkerMemory) -> set[int]:
    """The tree's own invariants; returns its blocks."""
    strands = list(tree._lru)
    position = {strand: number for number, strand in enumerate(strands)}
    children = dict.fromkeys(strands, 0)
    held: list[int] = []
    for strand in strands:
        assert strand.blocks
        assert tree._by_first[strand.blocks[0]] is strand
        held += strand.blocks
        if strand.parent:
            children[strand.parent] += 1
            assert strand.parent.end == strand.start
            assert position[strand.parent] > position[strand]
            assert strand.parent.used_at >= strand.used_at
        else:
            assert strand.start == 0
    assert all(strand.children == count for strand, count in children.items())
    assert len(tree._by_first) == len(strands)
    assert len(held) == len(set(held)) == tree.used
    assert all(strand.session == session and strand in position for session, strand in tree.sessions.items())
    return set(held)


# Chains of a small alphabet share beginnings often. A block's hash is its whole prefix, as a number.
symbols = st.lists(st.integers(0, 2), min_size=1, max_size=12)
records = st.tuples(st.just("record"), st.sampled_from("wv"), st.sampled_from("abcd"), symbols)
others = st.tuples(
    st.sampled_from(["trim", "expire", "forget", "capacity"]),
    st.sampled_from("wv"),
    st.sampled_from("abcd"),
    st.lists(st.integers(0, 2), max_size=12),
)


def prefix_hashes(path: list[int]) -> list[int]:
    result, value = [], 1
    for symbol in path:
        value = value * 3 + symbol
        result.append(value)
    return result


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(records, records, records, others), max_size=50), st.integers(1, 40))
def test_memory_and_index_agree_whatever_happens(steps: list[tuple[str, str, str, list[int]]], capacity: int) -> None:
    index = MemoryIndex()
    memory = RoutingMemory(index, ttl_s=20)
    parents: dict[int, int] = {}
    hashes_seen: set[int] = set()
    for worker in "wv":
        memory.set_capacity(worker, capacity)
    for now, (action, worker, session, path) in enumerate(steps):
        hashes = prefix_hashes(path)
        hashes_seen.update(hashes)
        parents.update(zip(hashes[1:], hashes, strict=False))
        if action == "record":
            memory.record(worker, session, hashes, float(now))
            kept = min(len(hashes), memory.capacity_blocks(worker))
            assert index.match(hashes).get(worker, 0) == kept
        elif action == "trim":
            memory.trim(worker, session, len(hashes))
        elif action == "expire":
            memory.expire(float(now))
        elif action == "forget":
            memory.forget(worker)
            assert memory.used_blocks(worker) == 0
        else:
            memory.set_capacity(worker, max(1, capacity - len(hashes)))
        for name in "wv":
            held = check_tree(memory._workers[name])
            assert memory.used_blocks(name) == len(held) <= memory.capacity_blocks(name)
            assert all(parents.get(block) in held or block not in parents for block in held)
            assert {block for block in hashes_seen if name in index.match([block])} == held
    memory.expire(float(len(steps) + 20))
    for name in "wv":
        assert memory.used_blocks(name) == 0
        tree = memory._workers[name]
        assert not tree._lru and not tree._by_first and not tree.sessions
    assert all(index.match([block]) == {} for block in hashes_seen)
