"""Gateways that share by a Redis in every kind of trouble: requests go on, it is said once, and all is whole again by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import orjson
import pytest
from redis import Redis
from redis.crc import key_slot

from gateway.dialects import CHAT
from kvindex import redis_line, shared_index
from kvindex.chain import use_pool_secret
from kvindex.redis_index import key_prefix
from kvindex.redis_target import NotLocated, RedisTarget
from kvindex.shared_index import SharedIndex
from loadgen.local import Program
from routing.router import Decision, RouteRequest
from tests.gateway.test_sharing import SECRET, ask, chat, quick, sharing, together, written
from tests.redis_server import RedisCluster, RedisServer, SentinelPair, cluster, redis_server, sentinel_pair
from tests.stack import Client, ScriptedWorker, Stack, config, running, until

PREFIX = key_prefix("default")
PATIENT_MS = 2000  # a deadline that a working server on a busy machine keeps


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WARMROUTE_POOL_SECRET", SECRET)
    yield
    use_pool_secret("")


@asynccontextmanager
async def gateways_over(index: dict[str, Any], workers: int = 2, gateways: int = 2) -> AsyncIterator[list[Stack]]:
    """Gateways with these settings of the index, once they share."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(ScriptedWorker(quick)) for _ in range(workers)]
        settings = config(*(worker.url for worker in started), index={"backend": "redis", "redis": index})
        running_gateways = [await stack.enter_async_context(running(settings)) for _ in range(gateways)]
        await together(*running_gateways)
        yield running_gateways


class Load:
    """Sessions whose turns go to the gateways in turn, in closed loop. Leaving the context ends it; a failed request fails the test."""

    def __init__(self, *gateways: Stack, sessions: int = 4) -> None:
        self.turns = 0
        self._gateways = gateways
        self._sessions = sessions
        self._ended = False

    async def __aenter__(self) -> Load:
        self._lanes = [asyncio.ensure_future(self._session(number)) for number in range(self._sessions)]
        await self.more()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = True
        await asyncio.gather(*self._lanes)

    async def more(self, turns: int = 20) -> None:
        """Return once so many more turns were answered."""
        goal = self.turns + turns

        def there() -> bool:
            for lane in self._lanes:
                if lane.done():
                    lane.result()
            return self.turns >= goal

        await until(there, f"{turns} more turns")

    async def _session(self, number: int) -> None:
        said: list[str] = []
        turn = 0
        while not self._ended:
            name = f"session {number} of {id(self)}"
            await ask(self._gateways[(number + turn) % len(self._gateways)], chat(name, *said), name)
            said = [*said[:60], f"answer {turn} " * 20, f"question {turn} " * 20]
            self.turns += 1
            turn += 1
            await asyncio.sleep(0.002)


async def placed(gateway: Stack, request: dict[str, Any]) -> tuple[str, Sequence[int]]:
    """The worker that answered, and the prompt's blocks."""
    hashes: list[Sequence[int]] = []
    decide = gateway.router.decide

    def listen(request: RouteRequest, *args: Any) -> Decision:
        hashes.append(request.hashes)
        return decide(request, *args)

    gateway.router.decide = listen  # type: ignore[method-assign,assignment]
    try:
        return await ask(gateway, request), hashes[-1]
    finally:
        gateway.router.decide = decide  # type: ignore[method-assign]


async def know_of_each_other(first: Stack, second: Stack, task: str) -> None:
    """What either of them stores the other finds."""
    for one, other in ((first, second), (second, first)):
        worker, hashes = await placed(one, chat(f"{task} of {id(one)}", "an answer " * 400, "more"))
        await written(one)
        assert len(hashes) > 10
        await until_known(sharing(other).index, worker, hashes)


async def until_known(index: SharedIndex, worker: str, hashes: Sequence[int]) -> None:
    """Wait for it: a line learns that its server is another one now only by asking."""
    async with asyncio.timeout(20):
        while (await index.lookup(hashes) or {}).get(worker) != len(hashes):
            await asyncio.sleep(0.05)


async def metric(gateway: Stack, name: str) -> float:
    text = (await gateway.client.get("/metrics")).text
    return sum(float(value) for value in re.findall(rf"^warmroute_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def idle(*gateways: Stack) -> bool:
    """No load is counted anywhere, of any gateway."""
    return not any(worker.in_flight or worker.others_in_flight for gateway in gateways for worker in gateway.router.workers.values())


def nothing_pending(gateway: Stack) -> bool:
    return not any(line._pending or line._pending_bytes for line in sharing(gateway)._lines)


# --- the server forgets, refuses, is full ---


@pytest.mark.replaces
async def test_script_flush_under_load_goes_unnoticed(redis: RedisServer) -> None:
    async with gateways_over({"url": redis.url, "deadline_ms": PATIENT_MS}) as (first, second):
        async with Load(first, second) as load:
            for _ in range(20):
                redis.admin("SCRIPT", "FLUSH")
                await load.more(5)
        for gateway in (first, second):
            part = sharing(gateway)
            assert part.lookups_failed == 0 and not part.degraded and part.index.resyncs == 1
        await know_of_each_other(first, second, "after it")


@pytest.mark.replaces
async def test_a_full_redis_takes_no_blocks_and_still_answers(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_index, "REFILL_S", 0.1)
    async with gateways_over({"url": redis.url, "deadline_ms": PATIENT_MS}, workers=4) as (first, second):
        worker, hashes = await placed(first, chat("before", "an answer " * 400, "more"))
        await written(first)
        redis.admin("CONFIG", "SET", "maxmemory", "1")
        async with Load(first, second) as load:
            await load.more(60)
            assert (await sharing(second).index.lookup(hashes) or {})[worker] == len(hashes)
        await written(first, second)
        assert await metric(first, "shared_index_refused_blocks") > 0
        assert await metric(first, "redis_degraded") == 0
        assert await metric(first, "shared_index_synced") == 1
        await until(lambda: idle(first, second), "no load left over")
        redis.admin("CONFIG", "SET", "maxmemory", "0")
        async with Load(first, second) as load:  # it has room again, which writes find out
            parts = [sharing(gateway).index for gateway in (first, second)]
            await until(lambda: all(part.resyncs > 1 and part.synced for part in parts), "what was refused")
            await load.more()
        await know_of_each_other(first, second, "after it")


def make_user(redis: RedisServer, *rights: str) -> None:
    redis.admin("ACL", "SETUSER", "gateway", "reset", "on", ">the-password", "~{wr:*", "&{wr:*", *rights)


@pytest.mark.replaces
async def test_a_user_who_may_not_script_and_then_not_even_eval(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "the-password")
    make_user(redis, "+@all", "-script", "-@dangerous")
    index = {"url": f"redis://gateway@127.0.0.1:{redis.port}/0", "password_env": "REDIS_PASSWORD", "deadline_ms": PATIENT_MS}
    async with gateways_over(index) as (first, second):
        await know_of_each_other(first, second, "without SCRIPT")
        redis.admin("SCRIPT", "FLUSH")
        await know_of_each_other(first, second, "after SCRIPT FLUSH")
        with caplog.at_level(logging.INFO):
            make_user(redis, "+@all", "-@scripting")
            async with Load(first, second) as load:
                await load.more(100)
                await until(lambda: not sharing(first).index.synced and not sharing(second).index.synced, "the refusal")
                await load.more(100)
        said = [record.getMessage() for record in caplog.records if "NOPERM" in record.getMessage() or "permission" in record.getMessage()]
        assert 1 <= len(said) <= 2, said  # each gateway once
        assert await metric(first, "shared_index_synced") == 0
        assert await metric(first, "shared_lookups_failed") > 0
        make_user(redis, "+@all", "-script")
        await together(first, second)
        await know_of_each_other(first, second, "after it was allowed again")


@pytest.mark.slow
async def test_a_wrong_password_is_said_once_and_put_right_without_a_restart(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "the-password")
    redis.admin("ACL", "SETUSER", "gateway", "reset", "on", ">another-password", "~*", "&*", "+@all")

    def connections() -> int:
        return int(re.search(r"total_connections_received:(\d+)", str(redis.admin("INFO", "stats")))[1])  # type: ignore[index]

    index = {"url": f"redis://gateway@127.0.0.1:{redis.port}/0", "password_env": "REDIS_PASSWORD"}
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(ScriptedWorker(quick))
        with caplog.at_level(logging.DEBUG):
            gateway = await stack.enter_async_context(running(config(worker.url, index={"backend": "redis", "redis": index})))
            for number in range(20):
                assert await ask(gateway, chat(f"task {number}")) == worker.id
            before = connections()
            await asyncio.sleep(1.0)
            assert connections() - before < 15  # three connections, each tried about once a second
        said = [record.getMessage() for record in caplog.records if "going on without" in record.getMessage()]
        assert len(said) == 3 and all("WRONGPASS" in line for line in said), said
        assert "the-password" not in caplog.text
        redis.admin("ACL", "SETUSER", "gateway", ">the-password")
        await together(gateway)


# --- the server goes and comes ---


@pytest.mark.slow
async def test_a_sentinel_failover_under_load() -> None:
    async with sentinel_pair() as pair:
        index = {"url": "redis://unused:1/0", "nodes": pair.nodes, "sentinel_master": SentinelPair.MASTER}
        async with gateways_over(index) as (first, second):
            await know_of_each_other(first, second, "before")
            async with Load(first, second) as load:
                pair.master.kill()
                await until(lambda: pair.master_port() == pair.replica.port, "the failover")
                await load.more()
                await together(first, second)
                await load.more()
            await know_of_each_other(first, second, "after")
            await until(lambda: idle(first, second), "no load left over")


@pytest.mark.slow
async def test_two_restarts_with_an_empty_dataset_within_a_moment(redis: RedisServer) -> None:
    async with gateways_over({"url": redis.url}) as (first, second):
        worker, hashes = await placed(first, chat("before", "an answer " * 400, "more"))
        async with Load(first, second) as load:
            await redis.restart()
            await asyncio.sleep(0.3)  # time to begin coming back
            await redis.restart()
            await load.more()
            await together(first, second)
        await written(first, second)
        assert (await sharing(second).index.lookup(hashes) or {})[worker] == len(hashes)
        await know_of_each_other(first, second, "after")
        await until(lambda: idle(first, second), "no load left over")


@pytest.mark.slow
async def test_a_hundred_lost_connections_leave_nothing_behind(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_line, "RETRY_S", (0.001, 0.01))
    async with gateways_over({"url": redis.url, "deadline_ms": PATIENT_MS}) as (first, second):
        async with Load(first, second) as load:
            await load.more()

            def tasks() -> set[str]:
                return {task.get_name() for task in asyncio.all_tasks() if not task.get_name().startswith("Task-")}

            before = tasks()
            with caplog.at_level(logging.WARNING):
                for _ in range(100):
                    ups = [line for gateway in (first, second) for line in sharing(gateway)._lines]
                    await until(lambda ups=ups: all(line.up for line in ups), "the lines")  # type: ignore[misc]
                    redis.admin("CLIENT", "KILL", "TYPE", "normal")
                    redis.admin("CLIENT", "KILL", "TYPE", "pubsub")
                    await load.more(1)
            await together(first, second)
        assert tasks() == before
        assert len([record for record in caplog.records if "going on without" in record.getMessage()]) < 60  # one in 10 s of each
        await until(lambda: nothing_pending(first) and nothing_pending(second) and idle(first, second), "nothing left over")

        def clients() -> int:
            return len(str(redis.admin("CLIENT", "LIST")).splitlines()) - 1

        await until(lambda: clients() == 6, "two lines and a subscriber of each")
        await know_of_each_other(first, second, "after")


# --- a slow server: between the gateways and Redis ---


class SlowRedis:
    """A TCP proxy that delays every reply by `delay_s()`; the order stays."""

    def __init__(self, redis: RedisServer) -> None:
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.port = 0
        self._redis = redis
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SlowRedis:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._redis.port)
        loop = asyncio.get_running_loop()
        delayed: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def requests() -> None:
            while data := await reader.read(1 << 16):
                to_writer.write(data)
            to_writer.close()
            writer.close()

        async def replies() -> None:
            while data := await to_reader.read(1 << 16):
                delayed.put_nowait((loop.time() + self.delay_s(), data))
            writer.close()

        async def late() -> None:
            while True:
                due, data = await delayed.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(data)

        for work in (requests(), replies(), late()):
            task = asyncio.ensure_future(_quietly(work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except (OSError, RuntimeError):  # either side's connection was closed
        pass


@pytest.mark.slow
async def test_a_redis_whose_replies_come_at_about_the_deadline_is_no_more_than_slow(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(1)
    async with SlowRedis(redis) as slow, gateways_over({"url": slow.url}) as (first, second):
        slow.delay_s = lambda: rng.uniform(0.03, 0.08)
        with caplog.at_level(logging.WARNING):
            async with Load(first, second) as load:
                await load.more(300)
        told = [record.getMessage() for record in caplog.records if record.name.startswith("warmroute")]
        assert len(told) <= 12, told
        slow.delay_s = lambda: 0.0
        await together(first, second)
        await until(lambda: nothing_pending(first) and nothing_pending(second) and idle(first, second), "nothing left over")
        await know_of_each_other(first, second, "after")


async def test_no_request_waits_longer_than_a_deadline(redis: RedisServer) -> None:
    hour = 3600.0
    async with SlowRedis(redis) as slow, gateways_over({"url": slow.url, "deadline_ms": 100}) as (first, second):
        slow.delay_s = lambda: hour
        for number in range(10):  # each would wait for good
            await ask((first, second)[number % 2], chat(f"task {number}"))
        waited = sharing(first).lookup_s + sharing(second).lookup_s
        lookups = sharing(first).lookups + sharing(second).lookups
        assert lookups and waited / lookups < 5.0  # the deadline, and what a busy machine adds


@pytest.mark.slow
async def test_a_thousand_clients_who_leave_during_the_lookup_leave_nothing_behind(redis: RedisServer) -> None:
    async with SlowRedis(redis) as slow, gateways_over({"url": slow.url, "deadline_ms": PATIENT_MS}) as (first, second):
        await ask(first, chat("before"))
        await until(lambda: nothing_pending(first) and nothing_pending(second), "nothing pending")
        tasks = len(asyncio.all_tasks())
        part = sharing(first)
        for _ in range(10):
            slow.delay_s = lambda: 0.2
            asked = part.lookups
            pending: list[Client] = []
            for number in range(100):
                client = await first.connect()
                client.send(CHAT.path, chat(f"leaves {number}"))
                pending.append(client)
            slow.delay_s = lambda: 0.0
            for client in pending:
                client.abort()
            await until(lambda asked=asked: part.lookups >= asked + 50, "the lookups")  # type: ignore[misc]
        await until(lambda: nothing_pending(first) and idle(first, second), "nothing left over")
        await first.until_idle()
        await until(lambda: len(asyncio.all_tasks()) <= tasks, f"{tasks} tasks, not {len(asyncio.all_tasks())}")
        assert not part.degraded
        await know_of_each_other(first, second, "after")


# --- a gateway that hangs ---


@pytest.mark.slow
async def test_a_gateway_frozen_for_longer_than_its_lease_joins_again_by_itself(redis: RedisServer, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:

        def start(name: str, *options: str) -> Program:
            env = {
                "WARMROUTE_INDEX__BACKEND": "redis", "WARMROUTE_POOL_SECRET": SECRET, "WARMROUTE_INDEX__REDIS__URL": redis.url,
                "WARMROUTE_INDEX__REDIS__DEADLINE_MS": str(PATIENT_MS),
            }  # fmt: skip
            program = Program(name, [sys.executable, "-m", "gateway.cli", *options], tmp_path / f"{name}.log", env)
            stack.callback(program.stop)
            return program

        workers = start("workers", "worker", "sim", "--port", "0", "--count", "2", "--speed", "50")
        urls = ",".join(await asyncio.to_thread(workers.wait_for, r"simulated \S+ on (http://\S+)", 2))
        programs = [start(f"gateway-{number}", "serve", "--port", "0", "--workers", urls) for number in range(2)]
        clients = []
        for program in programs:
            (url,) = await asyncio.to_thread(program.wait_for, r"listening on (http://\S+)")
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=False)))

        async def value(number: int, name: str) -> float:
            text = (await clients[number].get("/metrics")).text
            return float(re.search(rf"^warmroute_{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

        async def whole() -> None:
            async with asyncio.timeout(20):
                while not all([await value(n, "shared_index_synced") == 1 and await value(n, "gateways") == 2 for n in (0, 1)]):
                    await asyncio.sleep(0.1)

        async def ask_process(number: int, request: dict[str, Any]) -> str:
            response = await clients[number].post(CHAT.path, content=orjson.dumps({**request, "model": "sim"}))
            assert response.status_code == 200, response.text
            return response.headers["x-warmroute-worker"]

        await whole()
        await ask_process(0, chat("before", "an answer " * 400, "more"))
        uploads = await value(0, "shared_index_uploads")
        programs[0].send_signal(signal.SIGSTOP)
        await until(lambda: redis.admin("SCARD", PREFIX + "g") == 1, "its namespace to be dropped")
        async with asyncio.timeout(20):
            while await value(1, "gateways") != 1:
                await asyncio.sleep(0.1)
        await ask_process(1, chat("meanwhile"))
        programs[0].send_signal(signal.SIGCONT)
        await whole()
        assert redis.admin("SCARD", PREFIX + "g") == 2
        assert await value(0, "shared_index_uploads") > uploads
        assert await ask_process(0, chat("after"))


# --- a cluster ---

WITHOUT_FULL_COVERAGE = ("--cluster-require-full-coverage", "no")


def in_cluster(nodes: RedisCluster, pool_name: str, shards: int) -> dict[str, Any]:
    url = nodes.nodes[0].url
    return {"url": url, "nodes": nodes.addresses, "cluster": True, "pool": pool_name, "shards": shards, "deadline_ms": 500}


def migrate(nodes: RedisCluster, key: bytes) -> None:
    """Move the key's slot with its keys to another node, as a resharding does: a few keys at a time, so that it takes a while."""
    slot, source = key_slot(key), nodes.owner(key)
    target = next(node for node in nodes.nodes if node is not source)
    ids = {node: str(node.admin("CLUSTER", "MYID")) for node in (source, target)}
    target.admin("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.admin("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    with Redis(port=source.port) as client:  # keys are bytes
        while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 5):
            client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            time.sleep(0.01)  # nothing to wait for: it makes the move last, so that requests come in its middle
    for node in (target, source, *nodes.nodes):
        node.admin("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
async def test_the_pools_slots_move_to_other_nodes_under_load(shards: int) -> None:
    async with cluster(3) as nodes, gateways_over(in_cluster(nodes, "moving", shards), workers=4) as (first, second):
        await know_of_each_other(first, second, "before")
        async with Load(first, second) as load:
            await load.more()
            prefixes = {key_prefix("moving")} | {key_prefix("moving", shard) for shard in range(shards) if shards > 1}
            for prefix in prefixes:
                key = prefix.encode()
                source = nodes.owner(key)
                await asyncio.to_thread(migrate, nodes, key)
                await load.more()
                assert nodes.owner(key) is not source
            await together(first, second)
            await load.more()
        await know_of_each_other(first, second, "after")
        await until(lambda: idle(first, second), "no load left over")


@pytest.mark.slow
async def test_a_lost_node_takes_its_shard_with_it_and_no_other() -> None:
    async with cluster(3, *WITHOUT_FULL_COVERAGE) as nodes:
        # The last shard goes with its node, which is the first one that is asked and has slot 0; all else of the pool is elsewhere.
        lost = nodes.nodes[0]
        for number in range(1000):
            name = f"p{number}"
            owners = [nodes.owner(key.encode()) for key in (key_prefix(name), *(key_prefix(name, shard) for shard in range(3)))]
            if owners[3] is lost and lost not in owners[:3]:
                break
        async with gateways_over(in_cluster(nodes, name, 3), workers=6) as (first, second):
            index = sharing(second).index
            lost.kill()
            async with Load(first, second) as load:
                await load.more()
                await asyncio.sleep(5.0)  # longer than a lease: what is not renewed is gone
                await load.more()
            assert not sharing(second).degraded
            for gateway in (first, second):
                await until(lambda part=sharing(gateway): len(part.others) == 1, "the other's load")  # type: ignore[misc]
            for number in range(12):
                worker, hashes = await placed(first, chat(f"task {number}", "an answer " * 400, "more"))
                if crc32(worker.encode()) % 3 != 2:
                    await until_known(index, worker, hashes)
            await until(lambda: idle(first, second), "no load left over")
            assert await metric(first, "shared_index_synced") == 0


async def test_discovery_that_is_given_up_leaves_no_connection() -> None:
    async with redis_server("--cluster-enabled", "yes") as node:
        target = RedisTarget(node.url, cluster=True)
        rng = random.Random(2)
        for _ in range(200):
            asked = asyncio.ensure_future(target.locate(b"key"))
            await asyncio.sleep(rng.random() * 0.004)
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, NotLocated):  # it has no slots
                await asked
        await until(lambda: len(str(node.admin("CLIENT", "LIST")).splitlines()) == 1, "no connection but the one that asks")
