"""The behaviour every KVIndex backend must have. A backend's test module subclasses `IndexSuite` and names its fixture.

    class TestMyIndex(IndexSuite):
        @pytest.fixture
        def make_index(self) -> Callable[[], KVIndex]: ...

`make_index` returns an empty index at every call. `settle` is called before the size is compared: a backend that sweeps in the
background or bit by bit does its sweeping there.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvindex.chain import ChainState
from kvindex.index import KVIndex

WORKERS = ["w0", "w1", "w2", "w3"]
MakeIndex = Callable[[], KVIndex]

# The fixture only makes indexes, so it may be shared by the examples of one property; and several backends share the suite.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
property_test = settings(max_examples=150, deadline=None, suppress_health_check=SHARED)


def chains(count: int = 4, length: int = 40) -> list[list[int]]:
    """Chains that share beginnings: chain k leaves chain k - 1 halfway, as forked conversations do."""
    rng = random.Random(7)
    prompts = [rng.randbytes(8 * length)]
    while len(prompts) < count:
        keep = 8 * rng.randrange(length // 4, length)
        prompts.append(prompts[-1][:keep] + rng.randbytes(8 * length - keep))
    return [ChainState.start(7, 8).extend(prompt).hashes for prompt in prompts]


CHAINS = chains()


class NaiveIndex:
    """The specification: a set of blocks per worker, walked block by block."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}

    def match(self, hashes: list[int]) -> dict[str, int]:
        depths = {}
        for worker, held in self.held.items():
            depth = 0
            while depth < len(hashes) and hashes[depth] in held:
                depth += 1
            if depth:
                depths[worker] = depth
        return depths

    def store(self, worker: str, hashes: list[int]) -> None:
        self.held.setdefault(worker, set()).update(hashes)

    def remove(self, worker: str, hashes: list[int]) -> None:
        self.held.get(worker, set()).difference_update(hashes)

    def remove_from(self, worker: str, chain: list[int], depth: int) -> list[int]:
        """The blocks that go when the worker drops the chain from `depth` on: all that have the block at `depth` as an ancestor."""
        gone = {block for other in CHAINS for block in other[depth:] if other[: depth + 1] == chain[: depth + 1]}
        return sorted(gone)

    def __len__(self) -> int:
        return len(set().union(*self.held.values()))


depths = st.integers(0, len(CHAINS[0]))
steps = st.lists(
    st.tuples(st.sampled_from(["store", "store", "store", "remove", "clear"]), st.sampled_from(WORKERS), st.sampled_from(CHAINS), depths),
    max_size=60,
)


class IndexSuite:
    @pytest.fixture
    def make_index(self) -> MakeIndex:
        raise NotImplementedError

    def settle(self, index: KVIndex) -> None:
        """Let the index finish its sweeping; one block of a worker of its own may be left behind."""

    def test_empty(self, make_index: MakeIndex) -> None:
        index = make_index()
        assert index.match(CHAINS[0]) == {}
        assert index.match([]) == {}
        assert len(index) == 0

    def test_depth_is_counted_in_leading_blocks(self, make_index: MakeIndex) -> None:
        index = make_index()
        chain = CHAINS[0]
        index.store("all", chain)
        index.store("half", chain[:20])
        index.store("one", chain[:1])
        assert index.match(chain) == {"all": 40, "half": 20, "one": 1}
        assert index.match(chain[:10]) == {"all": 10, "half": 10, "one": 1}
        assert index.match(chain[:1]) == {"all": 1, "half": 1, "one": 1}

    def test_extreme_hashes(self, make_index: MakeIndex) -> None:
        index = make_index()
        chain = [0, 2**64 - 1, 2**63, 1]
        index.store("w", chain)
        assert index.match(chain) == {"w": 4}

    def test_storing_twice_and_removing_what_is_not_there(self, make_index: MakeIndex) -> None:
        index = make_index()
        chain = CHAINS[0]
        index.remove("stranger", chain)
        index.clear("stranger")
        index.store("a", chain)
        index.store("a", chain)
        index.remove("b", chain)
        assert index.match(chain) == {"a": 40}
        index.remove("a", chain)
        index.remove("a", chain)
        assert index.match(chain) == {}
        assert len(index) == 0

    def test_any_iterable_of_hashes(self, make_index: MakeIndex) -> None:
        index = make_index()
        index.store("a", iter(CHAINS[0]))
        index.remove("a", (block for block in CHAINS[0][30:]))
        assert index.match(CHAINS[0]) == {"a": 30}

    def test_worker_without_the_first_block_gets_nothing(self, make_index: MakeIndex) -> None:
        index = make_index()
        index.store("a", CHAINS[0][1:])
        assert index.match(CHAINS[0]) == {}

    def test_many_workers(self, make_index: MakeIndex) -> None:
        index = make_index()
        chain = CHAINS[0]
        expected = {f"worker-{number}": 1 + number % len(chain) for number in range(200)}
        for worker, depth in expected.items():
            index.store(worker, chain[:depth])
        assert index.match(chain) == expected

    def test_cleared_worker_is_gone_at_once_and_starts_empty(self, make_index: MakeIndex) -> None:
        index = make_index()
        chain = CHAINS[0]
        index.store("a", chain)
        index.store("b", chain[:5])
        index.clear("a")
        assert index.match(chain) == {"b": 5}
        index.store("a", chain[:3])
        assert index.match(chain) == {"a": 3, "b": 5}
        index.store("newcomer", CHAINS[1][:1])
        assert index.match(chain)["newcomer"] == 1

    @property_test
    @given(steps=steps)
    def test_prefix_closed_holders_are_matched_exactly(self, make_index: MakeIndex, steps: list[tuple[str, str, list[int], int]]) -> None:
        index, naive = make_index(), NaiveIndex()
        for action, worker, chain, depth in steps:
            if action == "store":
                index.store(worker, chain[:depth])
                naive.store(worker, chain[:depth])
            elif action == "remove":
                gone = naive.remove_from(worker, chain, depth) if depth < len(chain) else []
                index.remove(worker, gone)
                naive.remove(worker, gone)
            else:
                index.clear(worker)
                naive.held.pop(worker, None)
            for queried in CHAINS:
                assert index.match(queried) == naive.match(queried)
        self.settle(index)
        assert len(index) - len(naive) in (0, 1)

    @property_test
    @given(
        held=st.dictionaries(st.sampled_from(WORKERS), st.sets(st.integers(0, 29)), max_size=4),
        removed=st.dictionaries(st.sampled_from(WORKERS), st.sets(st.integers(0, 29)), max_size=4),
    )
    def test_holes_never_credit_a_block_that_is_not_held(
        self, make_index: MakeIndex, held: dict[str, set[int]], removed: dict[str, set[int]]
    ) -> None:
        index, chain = make_index(), CHAINS[0][:30]
        for worker, positions in held.items():
            index.store(worker, [chain[position] for position in sorted(positions)])
        for worker, positions in removed.items():
            index.remove(worker, [chain[position] for position in sorted(positions)])
        left = {worker: positions - removed.get(worker, set()) for worker, positions in held.items()}
        found = index.match(chain)
        assert set(found) == {worker for worker, positions in left.items() if 0 in positions}
        for worker, depth in found.items():
            assert depth - 1 in left[worker]
