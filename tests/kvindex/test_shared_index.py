from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex, key_prefix
from kvindex.redis_line import Line, RedisUnavailable
from kvindex.redis_target import RedisTarget
from kvindex.shared_index import UPLOAD_BLOCKS, SharedIndex
from tests.kvindex.index_suite import CHAINS
from tests.redis_server import RedisServer, redis_server, until

PREFIX = key_prefix("test")
CHAIN = CHAINS[0]


def random_chain(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(length)]


class Gateway:
    """As much of a gateway as has to do with the shared index."""

    def __init__(self, server: RedisServer, name: str, lease_s: float = 60.0) -> None:
        self.local = MemoryIndex()
        self.line = Line(RedisTarget(server.url), deadline_s=1.0)
        self.bulk = Line(RedisTarget(server.url), deadline_s=1.0, on_up=lambda: self.index.resync())
        remote = RedisIndex(self.line, "test", name, capacity_blocks=20_000, bulk=self.bulk)
        self.index = SharedIndex(self.local, remote, self.bulk, lease_s=lease_s)

    async def start(self) -> None:
        await self.index.start()
        await self.line.start()
        await self.bulk.start()
        await until(lambda: self.line.up, "the line")
        await until(lambda: self.index.synced, "the first upload")

    async def die(self) -> None:
        """Without taking leave."""
        await self.bulk.close()
        await self.line.close()
        await self.index.close()

    async def close(self) -> None:
        await self.index.close()
        await self.bulk.close()
        await self.line.close()


@asynccontextmanager
async def gateways(server: RedisServer, *names: str, lease_s: float = 60.0) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        started = [Gateway(server, name, lease_s) for name in names]
        for gateway in started:
            stack.push_async_callback(gateway.close)
            await gateway.start()
        yield started


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as running:
        yield running


async def test_one_gateway_learns_what_another_stores(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2") as (one, two):
        one.index.store("a", iter(CHAIN))
        one.index.store("b", CHAIN[:20])
        one.index.remove("b", CHAIN[10:])
        assert one.index.match(CHAIN) == {"a": 40, "b": 10}  # at once
        assert len(one.index) == 40
        await one.index.flush()
        assert await two.index.lookup(CHAIN) == {"a": 40, "b": 10}
        assert two.index.match(CHAIN) == {}
        assert await one.index.lookup(CHAIN) == {}  # it knows that itself

        one.index.clear("a")
        one.index.store("a", CHAIN[:2])
        await one.index.flush()
        assert await two.index.lookup(CHAIN) == {"a": 2, "b": 10}
        assert one.index.written_blocks == 40 + 20 + 30 + 2


async def test_changes_reach_redis_by_themselves(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2") as (one, two):
        one.index.store("a", CHAIN)
        while await two.index.lookup(CHAIN) != {"a": 40}:
            await asyncio.sleep(0.001)
        one.index.clear("a")
        while await two.index.lookup(CHAIN) != {}:
            await asyncio.sleep(0.001)


async def test_what_was_stored_before_the_start_is_uploaded(server: RedisServer) -> None:
    async with gateways(server, "reader") as (reader,):
        late = Gateway(server, "late")
        chain = random_chain(3 * UPLOAD_BLOCKS + 5, 1)
        late.index.store("a", chain)
        late.index.store("b", chain[: UPLOAD_BLOCKS + 1])
        late.index.store("gone", chain)
        late.index.clear("gone")
        await late.start()
        assert await reader.index.lookup(chain) == {"a": len(chain), "b": UPLOAD_BLOCKS + 1}
        await late.close()
        assert await reader.index.lookup(chain) == {}  # it took leave


async def test_changes_during_an_upload_are_not_lost(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2") as (one, two):
        rng = random.Random(5)
        chains = [random_chain(6000, seed) for seed in range(8)]
        depths = [3000] * 8
        for number, chain in enumerate(chains):
            one.index.store(f"w{number}", chain[: depths[number]])
        for _ in range(3):
            one.index.resync()
            while not one.index.synced:
                number, step = rng.randrange(8), rng.randrange(50)
                worker, chain, depth = f"w{number}", chains[number], depths[number]
                if rng.randrange(50) == 0:
                    one.index.clear(worker)
                    one.index.store(worker, chain[:step])
                    depths[number] = step
                elif rng.randrange(2):
                    one.index.remove(worker, chain[max(0, depth - step) : depth])
                    depths[number] = max(0, depth - step)
                else:
                    one.index.store(worker, chain[depth : depth + step])
                    depths[number] = min(6000, depth + step)
                await asyncio.sleep(0)
            await one.index.flush()
            for number, chain in enumerate(chains):
                expected = {f"w{number}": depths[number]} if depths[number] else {}
                assert one.index.match(chain) == expected
                assert await two.index.lookup(chain) == expected
        assert one.index.failed_writes == 0


async def test_redis_that_lost_its_data_is_whole_again(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2") as (one, two):
        one.index.store("a", CHAIN)
        two.index.store("b", CHAIN[:7])
        await asyncio.gather(one.index.flush(), two.index.flush())
        server.admin("FLUSHALL")
        assert await one.index.lookup(CHAIN) is None  # it notices, and uploads
        assert await two.index.lookup(CHAIN) in (None, {}, {"a": 40})
        await one.index.flush()
        two.index.store("b", CHAIN[:8])
        await until(lambda: one.index.synced and two.index.synced and two.index.resyncs > 1, "the upload")
        await two.index.flush()
        assert await one.index.lookup(CHAIN) == {"b": 8}
        assert await two.index.lookup(CHAIN) == {"a": 40}


async def test_restart_of_redis(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2") as (one, two):
        one.index.store("a", CHAIN)
        one.index.store("b", CHAIN)
        await one.index.flush()
        server.kill()
        await until(lambda: not any(gateway.bulk.up or gateway.line.up for gateway in (one, two)), "the lines to be down")
        assert await two.index.lookup(CHAIN) is None
        one.index.remove("a", CHAIN[5:])
        one.index.clear("b")
        one.index.store("c", CHAIN[:3])
        one.index.behind("SET", PREFIX + "lost", "1")
        with pytest.raises(RedisUnavailable):
            await one.index.flush()
        assert not one.index.synced
        assert one.index.match(CHAIN) == {"a": 5, "c": 3}
        await server.restart()
        await until(lambda: one.index.synced and two.index.synced and two.line.up, "the upload")
        assert await two.index.lookup(CHAIN) == {"a": 5, "c": 3}
        assert server.admin("EXISTS", PREFIX + "lost") == 0


async def test_while_redis_is_away_nothing_is_kept_for_it(server: RedisServer) -> None:
    async with gateways(server, "g1") as (gateway,):
        server.kill()
        await until(lambda: not gateway.bulk.up, "the line to be down")
        gateway.index.store("a", CHAIN)
        with pytest.raises(RedisUnavailable):
            await gateway.index.flush()
        for number in range(2000):
            gateway.index.store("a", random_chain(10, number))
            gateway.index.behind("SET", "x", "y")
        assert gateway.index._journal.blocks == 0
        assert gateway.index._commands == []


async def test_the_namespace_of_a_dead_gateway_is_dropped(server: RedisServer) -> None:
    async with gateways(server, "dead", "alive", lease_s=0.4) as (dead, alive):
        dead.index.store("a", CHAIN)
        alive.index.store("b", CHAIN[:4])
        await asyncio.gather(dead.index.flush(), alive.index.flush())
        assert await alive.index.lookup(CHAIN) == {"a": 40}
        await dead.die()
        while await alive.index.lookup(CHAIN) != {}:
            await asyncio.sleep(0.02)
        # and its blocks are swept
        await until(lambda: int(server.admin("HLEN", PREFIX + "s")) == 1 and not server.admin("EXISTS", PREFIX + "w"), "the sweep")  # type: ignore[call-overload]
        assert alive.index.synced


async def test_a_gateway_that_was_dropped_comes_back(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2", lease_s=0.4) as (one, two):
        one.index.store("a", CHAIN)
        await one.index.flush()
        server.admin("DEL", PREFIX + "o:g1")
        server.admin("SREM", PREFIX + "g", "g1")
        await until(lambda: one.index.resyncs > 1 and one.index.synced, "the upload")
        assert await two.index.lookup(CHAIN) == {"a": 40}


async def test_commands_behind(server: RedisServer) -> None:
    async with gateways(server, "g1") as (gateway,):
        gateway.index.behind("SET", PREFIX + "session", b"home", "EX", 100)
        gateway.index.behind("NO SUCH COMMAND")
        gateway.index.store("a", CHAIN)
        await gateway.index.flush()
        assert server.admin("GET", PREFIX + "session") == "home"
        assert gateway.index.synced


async def test_a_full_redis_is_no_failure(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2") as (one, two):
        one.index.store("a", CHAIN)
        await one.index.flush()
        server.admin("CONFIG", "SET", "maxmemory", "1")
        one.index.store("b", CHAIN)
        one.index.remove("a", CHAIN[10:])
        await one.index.flush()
        assert await two.index.lookup(CHAIN) == {"a": 10}
        assert one.index.refused_blocks == 40
        assert one.index.synced


async def test_a_frozen_redis_holds_nobody_up(server: RedisServer) -> None:
    async with gateways(server, "g1", "g2") as (one, two):
        one.index.store("a", CHAIN)
        await one.index.flush()
        server.stop()
        try:
            one.index.store("a", CHAIN)
            one.index.clear("a")
            one.index.store("b", CHAIN[:9])
            assert one.index.match(CHAIN) == {"b": 9}
            assert await two.index.lookup(CHAIN) is None
            await until(lambda: not one.index.synced, "the freeze to be noticed")
        finally:
            server.cont()
        await until(lambda: one.index.synced and two.index.synced and two.line.up, "the upload")
        await one.index.flush()
        assert await two.index.lookup(CHAIN) == {"b": 9}
