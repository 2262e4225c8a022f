from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.chain import ChainState
from kvindex.memory import MemoryIndex
from kvindex.redis_index import IndexGone, Operation, RedisIndex, ShardedIndex, key_prefix
from kvindex.redis_line import Line, RedisRefused
from kvindex.redis_scripts import COMMANDS
from kvindex.redis_target import RedisTarget
from tests.kvindex.index_suite import CHAINS, SHARED, WORKERS, IndexSuite, MakeIndex, depths
from tests.redis_server import RedisServer, cluster, redis_server

LEASE_S = 60.0
pools = (f"pool-{number}" for number in count())


def random_chain(length: int, seed: int) -> list[int]:
    return ChainState.start(seed, 8).extend(random.Random(seed).randbytes(8 * length)).hashes


@asynccontextmanager
async def line_to(server: RedisServer, username: str | None = None, key: str = "") -> AsyncIterator[Line]:
    up = asyncio.Event()
    target = RedisTarget(server.url, username=username, password="secret" if username else None)
    line = Line(target, key.encode(), deadline_s=10.0, on_up=up.set)
    await line.start()
    await up.wait()
    try:
        yield line
    finally:
        await line.close()


@pytest.fixture
async def line(server: RedisServer) -> AsyncIterator[Line]:
    async with line_to(server) as connected:
        yield connected


async def joined(line: Line, owner: str, pool: str = "test", capacity_blocks: int = 20_000) -> RedisIndex:
    index = RedisIndex(line, pool, owner, capacity_blocks=capacity_blocks)
    await index.join(LEASE_S)
    return index


async def entries(line: Line, pool: str = "test") -> int:
    """Blocks in the index, of any epoch."""
    buckets = await line.call("KEYS", f"{{wr:{pool}}}:1:b*")
    return sum(await line.pipeline([("HLEN", bucket) for bucket in buckets], 10.0))


async def sweep_all(index: RedisIndex | ShardedIndex) -> None:
    while await index.sweep():
        pass


class Synchronous:
    """A synchronous KVIndex on a RedisIndex or ShardedIndex, for the suite. Counts blocks by looking into the buckets."""

    def __init__(self, runner: asyncio.Runner, index: RedisIndex | ShardedIndex, line: Line, pool: str) -> None:
        self.run = runner.run
        self.index = index
        self._line = line
        self._pool = pool

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        return self.run(self.index.match(hashes))

    def store(self, worker: str, hashes: Iterable[int]) -> None:
        self.run(self.index.write([("store", worker, list(hashes))]))

    def remove(self, worker: str, hashes: Iterable[int]) -> None:
        self.run(self.index.write([("remove", worker, list(hashes))]))

    def clear(self, worker: str) -> None:
        self.run(self.index.write([("clear", worker, [])]))

    def __len__(self) -> int:
        return self.run(entries(self._line, self._pool))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as started:
        yield started


@pytest.fixture(scope="module")
def shared_server(runner: asyncio.Runner) -> Iterator[RedisServer]:
    context = redis_server()
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def shared_line(runner: asyncio.Runner, shared_server: RedisServer) -> Iterator[Line]:
    context = line_to(shared_server)
    yield runner.run(context.__aenter__())
    runner.run(context.__aexit__(None, None, None))


class TestRedisIndex(IndexSuite):
    @pytest.fixture
    def make_index(self, runner: asyncio.Runner, shared_line: Line) -> MakeIndex:
        def make() -> Synchronous:
            pool = next(pools)
            index = runner.run(joined(shared_line, "gateway", pool))
            return Synchronous(runner, index, shared_line, pool)

        return make

    def settle(self, index: Synchronous) -> None:  # type: ignore[override]
        index.run(sweep_all(index.index))


class TestShardedIndex(IndexSuite):
    @pytest.fixture
    def make_index(self, runner: asyncio.Runner, shared_line: Line) -> MakeIndex:
        def make() -> Synchronous:
            pool = next(pools)
            shards = [RedisIndex(shared_line, pool, "gateway", capacity_blocks=10_000, shard=shard) for shard in range(3)]
            index = ShardedIndex(shards)
            runner.run(index.join(LEASE_S))
            return Synchronous(runner, index, shared_line, pool)

        return make

    def settle(self, index: Synchronous) -> None:  # type: ignore[override]
        index.run(sweep_all(index.index))

    # A block whose holders are in several shards has an entry in each; the comparison with memory indexes covers the matches.
    test_prefix_closed_holders_are_matched_exactly = None  # type: ignore[assignment]


actions = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "clear", "drop", "sweep"]),
        st.integers(0, 2),
        st.sampled_from(WORKERS),
        st.sampled_from(CHAINS),
        depths,
    ),
    max_size=40,
)


@pytest.mark.parametrize("shards", [0, 3])
@settings(max_examples=60, deadline=None, suppress_health_check=SHARED)
@given(steps=actions)
def test_several_owners_match_as_memory_indexes_merged(
    runner: asyncio.Runner, shared_line: Line, shards: int, steps: list[tuple[str, int, str, list[int], int]]
) -> None:
    pool = next(pools)

    def index_of(owner: str) -> RedisIndex | ShardedIndex:
        if not shards:
            return RedisIndex(shared_line, pool, owner, capacity_blocks=10_000)
        return ShardedIndex([RedisIndex(shared_line, pool, owner, capacity_blocks=10_000, shard=shard) for shard in range(shards)])

    async def compare() -> None:
        remotes = [index_of(f"g{number}") for number in range(3)]
        locals_ = [MemoryIndex() for _ in remotes]
        for remote in remotes:
            await remote.join(LEASE_S)
        for action, owner, worker, chain, depth in steps:
            remote, local = remotes[owner], locals_[owner]
            if action == "store":
                await remote.write([("store", worker, chain[:depth])])
                local.store(worker, chain[:depth])
            elif action == "remove":  # all that have the block as an ancestor, as an engine does
                gone = sorted({block for other in CHAINS for block in other[depth:] if other[: depth + 1] == chain[: depth + 1]})
                await remote.write([("remove", worker, gone)])
                local.remove(worker, gone)
            elif action == "clear":
                await remote.write([("clear", worker, [])])
                local.clear(worker)
            elif action == "drop":
                await remote.join(LEASE_S)
                locals_[owner] = MemoryIndex()
            else:
                await remote.sweep()
            for queried in (chain, CHAINS[-1]):
                expected: dict[str, int] = {}
                for local in locals_:
                    for holder, found in local.match(queried).items():
                        expected[holder] = max(found, expected.get(holder, 0))
                asking = remotes[(owner + 1) % 3]
                assert await asking.match(queried) == expected

    runner.run(compare())


async def test_owners_see_each_other_and_may_leave_themselves_out(line: Line) -> None:
    one, two = await joined(line, "g1"), await joined(line, "g2")
    chain = CHAINS[0]
    await one.write([("store", "w", chain[:30]), ("store", "only one", chain[:3])])
    await two.write([("store", "w", chain[:20])])
    assert await two.match(chain) == {"w": 30, "only one": 3}
    assert await two.match(chain, include_own=False) == {"w": 30, "only one": 3}
    assert await one.match(chain, include_own=False) == {"w": 20}


async def test_a_clear_is_seen_by_all_with_their_next_match(line: Line) -> None:
    writer, reader = await joined(line, "g1"), await joined(line, "g2")
    chain = CHAINS[0]
    for _ in range(3):
        await writer.write([("store", "a", chain), ("store", "b", chain[:4])])
        assert await reader.match(chain) == {"a": 40, "b": 4}
        await writer.write([("clear", "a", [])])
        assert await reader.match(chain) == {"b": 4}
        await sweep_all(writer)


async def test_many_changes_of_the_slot_table_between_two_matches(line: Line) -> None:
    writer, reader = await joined(line, "g1"), await joined(line, "g2")
    chain = CHAINS[0]
    await writer.write([("store", "a", chain)])
    assert await reader.match(chain) == {"a": 40}
    for changes in (3, 100, 700):
        await writer.write([("store", f"{changes}-{number}", chain[:5]) for number in range(changes)])
        found = await asyncio.gather(*(reader.match(chain) for _ in range(5)))
        assert all(len(depths) == changes + 1 for depths in found)
        await writer.write([("clear", f"{changes}-{number}", []) for number in range(changes)])
        assert await reader.match(chain) == {"a": 40}


async def test_an_answer_older_than_the_slot_table_credits_no_later_holder(line: Line) -> None:
    writer, reader = await joined(line, "g1"), await joined(line, "g2")
    chain = CHAINS[0]
    await writer.write([("store", "old", chain)])
    await reader.match(chain)
    version = reader._version
    await writer.write([("clear", "old", [])])
    await sweep_all(writer)
    await writer.write([("store", "new", chain[:1])])  # takes the same slot
    assert await reader.match(chain) == {"new": 1}
    assert await reader._holders_at(version, True) == {}


async def test_slots_are_free_again_only_after_the_sweep(line: Line) -> None:
    index = await joined(line, "g1")
    chain = random_chain(3000, 1)
    await index.write([("store", "a", chain), ("store", "b", chain[:100])])
    await index.write([("clear", "a", [])])
    await index.write([("store", "c", chain[:1])])
    assert await index.match(chain) == {"b": 100, "c": 1}
    assert await index.sweep(5) > 0
    await index.write([("store", "d", chain[:2]), ("clear", "d", []), ("store", "a", chain[:7])])
    assert await index.match(chain) == {"a": 7, "b": 100, "c": 1}
    await sweep_all(index)
    await index.write([("store", "e", chain[:3])])
    assert await index.match(chain) == {"a": 7, "b": 100, "c": 1, "e": 3}
    assert int(await line.call("HGET", key_prefix("test") + "m", "next")) == 5


async def test_restarts_reuse_slots(line: Line) -> None:
    index = await joined(line, "g1", capacity_blocks=100)
    for _ in range(50):
        await index.write([("store", "a", CHAINS[0])])
        await index.write([("clear", "a", [])])
        await sweep_all(index)
    assert int(await line.call("HGET", key_prefix("test") + "m", "next")) == 1


async def used_memory(line: Line) -> int:
    info = await line.call("INFO", "memory")
    return next(int(row.split(b":")[1]) for row in info.splitlines() if row.startswith(b"used_memory:"))


async def test_at_capacity_buckets_are_listpacks_and_clearing_leaves_nothing(line: Line) -> None:
    index = await joined(line, "g1", capacity_blocks=48 * 1024)
    keys_before = await line.call("DBSIZE")
    left = []
    for _ in range(3):
        before = await used_memory(line)
        for number in range(8):
            chain = random_chain(6 * 1024, number)
            await index.write([("store", f"w{number}", chain), ("store", f"w{number + 1}", chain[:3000])])
        buckets = await line.call("KEYS", key_prefix("test") + "b*")
        encodings = await line.pipeline([("OBJECT", "ENCODING", bucket) for bucket in buckets], 10.0)
        assert set(encodings) == {b"listpack"}
        assert (await used_memory(line) - before) / (48 * 1024) < 40

        await index.write([("clear", f"w{number}", []) for number in range(9)])
        await sweep_all(index)
        assert not await line.call("KEYS", key_prefix("test") + "b*")
        assert await line.call("DBSIZE") - keys_before <= 2  # the lists of free slots and of changes
        left.append(await used_memory(line))
    assert left[-1] - left[0] < 50_000


async def test_many_prompts_that_part_at_one_place_are_swept_bit_by_bit(line: Line) -> None:
    index = await joined(line, "g1", capacity_blocks=48 * 256)
    trunk = ChainState.start(3, 8).extend(bytes(80))
    prompts = [trunk.extend(number.to_bytes(8, "little")).hashes for number in range(3000)]
    await index.write([("store", f"w{number % 2}", prompt) for number, prompt in enumerate(prompts)])
    sizes = await line.pipeline([("HLEN", bucket) for bucket in await line.call("KEYS", key_prefix("test") + "b*")], 10.0)
    assert max(sizes) > 2500
    await index.write([("clear", "w0", [])])
    calls = 1
    while await index.sweep(8):
        calls += 1
    assert calls > (512 + 3000 / 128) / 8 - 1  # not all of the large one in one call
    assert await entries(line) == 10 + 1500
    assert await index.match(prompts[1]) == {"w1": 11}
    assert await index.match(prompts[0]) == {"w1": 10}


async def test_owner_without_lease_is_dropped_and_told(line: Line) -> None:
    alive, dead = await joined(line, "alive"), await joined(line, "dead")
    chain = CHAINS[0]
    await alive.write([("store", "a", chain[:3])])
    await dead.write([("store", "a", chain), ("store", "b", chain)])
    await line.call("DEL", key_prefix("test") + "o:dead")  # as its end does
    assert await alive.match(chain) == {"a": 40, "b": 40}
    assert await alive.drop_dead_owners() == 1
    assert await alive.match(chain) == {"a": 3}
    with pytest.raises(IndexGone):
        await dead.write([("store", "a", chain)])
    with pytest.raises(IndexGone):
        await dead.renew(LEASE_S)
    await dead.join(LEASE_S)
    await dead.write([("store", "b", chain[:9])])
    assert await alive.match(chain) == {"a": 3, "b": 9}
    assert await alive.drop_dead_owners() == 0


async def test_leaving_drops_the_own_namespace_only(line: Line) -> None:
    one, two = await joined(line, "g1"), await joined(line, "g2")
    await one.write([("store", "a", CHAINS[0])])
    await two.write([("store", "a", CHAINS[0][:6])])
    await one.leave()
    assert await two.match(CHAINS[0]) == {"a": 6}


async def test_lost_data_is_told(server: RedisServer, line: Line) -> None:
    index, other = await joined(line, "g1"), await joined(line, "g2")
    await index.write([("store", "a", CHAINS[0])])
    await other.match(CHAINS[0])
    server.admin("FLUSHALL")
    with pytest.raises(IndexGone):
        await index.match(CHAINS[0])
    with pytest.raises(IndexGone):
        await index.write([("store", "a", CHAINS[0])])
    await other.join(LEASE_S)
    await other.write([("store", "b", CHAINS[0][:5])])  # its slot's number was that of "a"
    with pytest.raises(IndexGone):
        await index.renew(LEASE_S)
    assert await index.match(CHAINS[0]) == {"b": 5}


async def test_a_fleet_four_times_as_large_begins_anew(line: Line) -> None:
    small = await joined(line, "g1", capacity_blocks=48 * 256)
    await small.write([("store", "a", random_chain(2000, 1))])
    assert (await joined(line, "g2", capacity_blocks=2 * 48 * 256))._line is line  # twice is not enough
    await small.renew(LEASE_S)
    large = await joined(line, "g3", capacity_blocks=48 * 1024)
    with pytest.raises(IndexGone):
        await small.renew(LEASE_S)
    await small.join(LEASE_S)
    huge = await joined(line, "g4", capacity_blocks=48 << 17)  # more than two bytes number
    with pytest.raises(IndexGone):
        await large.write([("store", "b", CHAINS[0])])
    await large.join(LEASE_S)
    await small.join(LEASE_S)
    await small.write([("store", "a", CHAINS[0][:5]), ("store", "b", CHAINS[0])])
    await small.write([("clear", "b", [])])
    assert await large.match(CHAINS[0]) == {"a": 5}
    while await huge.sweep(4096):
        pass
    assert await entries(line) == 5  # nothing is left of the earlier buckets


async def test_the_server_forgets_the_scripts(server: RedisServer, line: Line) -> None:
    index = await joined(line, "g1")
    for depth in (5, 9):
        server.admin("SCRIPT", "FLUSH")
        await index.write([("store", "a", random_chain(5000, depth)), ("store", "a", CHAINS[0][:depth])])
        server.admin("SCRIPT", "FLUSH")
        assert await index.match(CHAINS[0]) == {"a": depth}


async def test_a_full_server_still_answers_and_forgets(server: RedisServer, line: Line) -> None:
    index = await joined(line, "g1")
    await index.write([("store", "a", CHAINS[0]), ("store", "b", CHAINS[0][:20])])
    server.admin("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(RedisRefused):
        await line.call("SET", "x", "y")
    await index.write([("store", "c", CHAINS[0]), ("remove", "a", CHAINS[0][10:]), ("clear", "b", []), ("store", "c", CHAINS[0][:5])])
    assert await index.match(CHAINS[0]) == {"a": 10}
    assert index.refused_blocks == 45
    await index.renew(LEASE_S)
    await sweep_all(index)
    server.admin("CONFIG", "SET", "maxmemory", "0")
    await index.write([("store", "c", CHAINS[0])])
    assert await index.match(CHAINS[0]) == {"a": 10, "c": 40}


async def test_without_a_free_slot_nothing_is_stored(line: Line) -> None:
    index = await joined(line, "g1")
    await line.call("HSET", key_prefix("test") + "m", "next", 65535)
    await index.write([("store", "last", CHAINS[0]), ("store", "late", CHAINS[0])])
    assert await index.match(CHAINS[0]) == {"last": 40}
    assert index.refused_blocks == 40
    await index.write([("clear", "last", [])])
    await sweep_all(index)
    await index.write([("store", "late", CHAINS[0])])
    assert await index.match(CHAINS[0]) == {"late": 40}


async def test_operations_of_any_size_are_done_in_order(line: Line) -> None:
    index = await joined(line, "g1")
    chain = random_chain(5000, 3)
    operations: list[Operation] = [("store", "a", chain), ("clear", "a", []), ("store", "a", chain[:1500]), ("remove", "a", chain[700:])]
    await index.write([*operations, ("store", "a", chain[700:701]), ("store", "empty", [])])
    assert await index.match(chain) == {"a": 701}
    await index.write([])


async def test_a_user_with_the_least_rights(server: RedisServer) -> None:
    server.admin("ACL", "SETUSER", "warmroute", "on", ">secret", "resetkeys", "~{wr:*", "-@all", *(f"+{name}" for name in COMMANDS))
    async with line_to(server, "warmroute") as line:
        index, other = await joined(line, "g1"), await joined(line, "g2")
        await other.join(LEASE_S)
        operations: list[Operation] = [("store", "a", CHAINS[0]), ("store", "b", CHAINS[0][:30]), ("remove", "b", CHAINS[0][20:])]
        await index.write([*operations, ("store", "c", CHAINS[0]), ("clear", "c", [])])
        for _ in range(2):
            assert await other.match(CHAINS[0]) == {"a": 40, "b": 20}
            await sweep_all(index)
            await index.write([("store", "c", CHAINS[0][:1]), ("clear", "c", [])])
        await (await joined(line, "g3", capacity_blocks=48 << 10)).leave()
        await index.join(LEASE_S)
        await index.renew(LEASE_S)
        await index.drop_dead_owners()
        await sweep_all(index)


@pytest.mark.slow
async def test_shards_of_a_cluster() -> None:
    async with cluster(3) as nodes, AsyncExitStack() as stack:
        shards, others = [], []
        for shard in range(6):
            line = await stack.enter_async_context(line_to(nodes.owner(key_prefix("test", shard).encode()), key=key_prefix("test", shard)))
            shards.append(RedisIndex(line, "test", "g1", capacity_blocks=10_000, shard=shard))
            others.append(RedisIndex(line, "test", "g2", capacity_blocks=10_000, shard=shard))
        index, reader = ShardedIndex(shards), ShardedIndex(others)
        await index.join(LEASE_S)
        await reader.join(LEASE_S)
        expected = {f"worker-{number}": 1 + number for number in range(40)}
        await index.write([("store", holder, CHAINS[0][:depth]) for holder, depth in expected.items()])
        assert await reader.match(CHAINS[0]) == expected
        await index.write([("clear", "worker-7", [])])
        del expected["worker-7"]
        assert await reader.match(CHAINS[0]) == expected
        await sweep_all(index)
        await index.renew(LEASE_S)
        assert await reader.drop_dead_owners() == 0
        await index.leave()
        assert await reader.match(CHAINS[0]) == {}


async def test_pools_do_not_mix(line: Line) -> None:
    one, other = await joined(line, "g", "one"), await joined(line, "g", "other")
    await one.write([("store", "a", CHAINS[0])])
    assert await other.match(CHAINS[0]) == {}
