from __future__ import annotations

import random

import pytest

from kvindex.index import KVIndex
from kvindex.memory import SWEEP_BLOCKS, MemoryIndex
from tests.kvindex.index_suite import CHAINS, IndexSuite, MakeIndex


class TestMemoryIndex(IndexSuite):
    @pytest.fixture
    def make_index(self) -> MakeIndex:
        return MemoryIndex

    def settle(self, index: KVIndex) -> None:
        for _ in range(4):
            index.store("settling", [1])


def random_chain(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(length)]


def test_cleared_blocks_are_swept_by_later_stores() -> None:
    index = MemoryIndex()
    mine, others = random_chain(10 * SWEEP_BLOCKS, 1), random_chain(3 * SWEEP_BLOCKS, 2)
    index.store("a", mine)
    index.store("b", others)
    index.store("b", mine[:100])
    index.clear("a")
    for _ in range(20):
        # While the sweep is under way every answer is right, and so is what is stored and removed in between.
        assert index.match(mine) == {"b": 100}
        assert index.match(others) == {"b": len(others)}
        index.store("b", others[:1])
    assert len(index) == len(others) + 100


def test_changes_during_a_sweep_are_kept() -> None:
    index = MemoryIndex()
    chain = random_chain(10 * SWEEP_BLOCKS, 3)
    index.store("a", chain)
    index.store("b", chain)
    index.store("c", chain)
    index.clear("a")
    index.store("d", chain[:7])  # begins the sweep
    assert index.match(chain) == {"b": len(chain), "c": len(chain), "d": 7}
    index.remove("b", chain[5:])
    index.clear("c")
    index.store("a", chain[:9])
    expected = {"a": 9, "b": 5, "d": 7}
    for _ in range(40):
        assert index.match(chain) == expected
        index.store("d", chain[:1])
    assert index.match(chain) == expected
    assert len(index) == 9


def test_restarts_reuse_slots() -> None:
    """A worker that restarts for months must not make the sets of holders grow."""
    index = MemoryIndex()
    for _ in range(500):
        index.store("a", CHAINS[0])
        index.clear("a")
    index.store("a", CHAINS[0])
    assert max(lacking.bit_length() for lacking in index._blocks.values()) <= 4
    assert index.match(CHAINS[0]) == {"a": len(CHAINS[0])}


def test_equal_sets_of_holders_share_one_object() -> None:
    index = MemoryIndex()
    chain = random_chain(1000, 4)
    for number in range(40):
        index.store(f"worker-{number}", chain)
    assert len({id(lacking) for lacking in index._blocks.values()}) == 1
