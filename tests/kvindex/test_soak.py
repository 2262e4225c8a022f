"""What only shows in the long run: nothing grows without end, nothing is left when all are gone, and rare meetings of events."""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import AsyncExitStack

import pytest
from redis import Redis

from benchmarks.soak import soak
from kvindex import shared_index
from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex, ShardedIndex, key_prefix
from kvindex.redis_line import Line, RedisUnavailable
from kvindex.redis_target import RedisTarget
from kvindex.shared_index import SharedIndex
from tests.redis_server import RedisServer, redis_server, until

PREFIX = key_prefix("test")
rng = random.Random(7)
CHAIN = [rng.getrandbits(64) for _ in range(40)]


class Gateway:
    """As much of a gateway as has to do with the shared index, over one server for each shard."""

    def __init__(self, name: str, *servers: RedisServer) -> None:
        self.lines: list[Line] = []
        shards = []
        for shard, server in enumerate(servers):
            line = Line(RedisTarget(server.url), deadline_s=1.0)
            bulk = Line(RedisTarget(server.url), deadline_s=1.0, on_up=lambda: self.index.resync())
            self.lines += [bulk, line]
            only = len(servers) == 1
            shards.append(RedisIndex(line, "test", name, capacity_blocks=20_000, shard=None if only else shard, bulk=bulk))
        self.remote = shards[0] if len(shards) == 1 else ShardedIndex(shards)
        self.index = SharedIndex(MemoryIndex(), self.remote, self.lines[0], lease_s=0.6)

    async def start(self) -> None:
        await self.index.start()
        for line in self.lines:
            await line.start()
        await until(lambda: self.index.synced and all(line.up for line in self.lines), "the first upload")

    async def close(self) -> None:
        await self.index.close()
        for line in self.lines:
            await line.close()


@pytest.mark.slow
async def test_a_small_soak() -> None:
    result = await soak(100_000, lifetime_s=1.0)
    assert result["faults"] == []
    assert result["commands"]["set"] > 100_000


async def test_the_last_gateway_of_a_pool_leaves_nothing_behind() -> None:
    async with redis_server() as server:
        one, two = Gateway("one", server), Gateway("two", server)
        await one.start()
        await two.start()
        for number, gateway in enumerate((one, two)):
            gateway.index.store(f"worker {number}", [rng.getrandbits(64) for _ in range(20_000)])
            gateway.index.store("worker of both", CHAIN)
            await gateway.index.flush()
        await one.close()
        assert int(str(server.admin("SCARD", PREFIX + "g"))) == 1
        await two.close()
        # free slots, and the index's figures; what says that owners were just looked at ends by itself
        await until(lambda: sorted(server.admin("KEYS", "*")) == [PREFIX + "f", PREFIX + "m"], "nothing else")  # type: ignore[call-overload]
        assert server.admin("LLEN", PREFIX + "f") == 4


async def test_a_sweep_of_which_the_first_part_failed_is_begun_again() -> None:
    async with redis_server() as server:
        gateway = Gateway("one", server)
        await gateway.start()
        slots = struct.pack(">H", 999)
        with Redis(port=server.port) as client:
            client.hset(PREFIX + "w", "slots", slots)  # as after a script that met a key on its way to another node of a cluster
            await until(lambda: not client.exists(PREFIX + "w"), "the sweep")
            assert client.lrange(PREFIX + "f", 0, -1) == [slots]
        await gateway.close()


async def test_joining_anew_while_a_match_fetches_the_slot_table() -> None:
    async with redis_server() as server:
        one, two = Gateway("one", server), Gateway("two", server)
        await one.start()
        await two.start()
        two.index.store("worker", CHAIN)
        await two.index.flush()
        assert await one.index.lookup(CHAIN) == {"worker": 40}
        two.index.store("another", CHAIN[:7])  # takes a slot: the next match has to learn of it
        await two.index.flush()
        line = one.lines[1]
        call = line.call

        async def slow_call(*command: bytes | str | int | float) -> object:
            reply = await call(*command)
            if command[0] == "LRANGE":
                await one.remote.join(60)
            return reply

        line.call = slow_call  # type: ignore[method-assign]
        assert await one.index.lookup(CHAIN) == {"worker": 40, "another": 7}
        await one.close()
        await two.close()


async def test_what_a_full_redis_refused_is_made_good_when_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_index, "REFILL_S", 0.05)
    async with redis_server() as server:
        one, two = Gateway("one", server), Gateway("two", server)
        await one.start()
        await two.start()
        server.admin("CONFIG", "SET", "maxmemory", "1")
        one.index.store("worker", CHAIN[:20])
        await one.index.flush()
        assert one.index.refused_blocks == 20
        server.admin("CONFIG", "SET", "maxmemory", "0")
        while await two.index.lookup(CHAIN) != {"worker": 40}:
            one.index.store("worker", CHAIN[20:])  # of no use without its beginning
            await asyncio.sleep(0.01)
        assert one.index.resyncs == 2
        one.index.store("worker", CHAIN)
        await one.index.flush()
        assert one.index.resyncs == 2  # once
        await one.close()
        await two.close()


@pytest.mark.slow
async def test_a_shard_that_is_lost_takes_no_other_with_it() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(redis_server()) for _ in range(2)]
        one, two = Gateway("one", *servers), Gateway("two", *servers)
        await one.start()
        await two.start()
        holders = [f"worker {number}" for number in range(8)]
        for holder in holders:
            one.index.store(holder, CHAIN)
        await one.index.flush()
        assert await two.index.lookup(CHAIN) == dict.fromkeys(holders, 40)

        servers[1].kill()
        await until(lambda: not one.index.synced and not two.index.synced, "the loss to be noticed")
        for holder in holders:
            one.index.remove(holder, CHAIN[30:])
        living: dict[str, int] = {}
        while 30 not in living.values():
            living = await two.index.lookup(CHAIN) or {}
        assert 0 < len(living) < 8
        await asyncio.sleep(1.5)  # longer than the lease
        assert await two.index.lookup(CHAIN) == living

        servers[0].kill()  # none is left
        await until(lambda: not one.lines[0].up, "that to be noticed")
        assert await two.index.lookup(CHAIN) is None
        for holder in holders:
            one.index.store(holder, CHAIN[:35])
        with pytest.raises(RedisUnavailable):
            await one.index.flush()
        for server in servers:
            await server.restart()
        await until(lambda: one.index.synced and two.index.synced and all(line.up for line in two.lines), "the upload")
        await one.index.flush()
        assert await two.index.lookup(CHAIN) == dict.fromkeys(holders, 35)
        await one.close()
        await two.close()
