"""Whether what gateways keep in Redis stays bounded, and whether anything is left when all are gone.

Time is compressed: a session's record lives for a second instead of a quarter of an hour, leases, response ids and what routing memory
believes are shortened alike, and gateways, workers and agents come and go every few seconds instead of every few weeks. Gateways run
without HTTP and without placing requests; what a request makes them send to Redis goes through the same classes as ever, with sessions
drawn at random (ten turns in the mean):

    each request              the session's record, SET with a TTL; a change of load, PUBLISHed with others' within 2 ms
    each new session          a ticket, HINCRBY
    one request in 10         a response id, SET with a TTL
    one request in 100        a lookup: GET of a session's record, and a match
    sessions, one in 10       8 new blocks stored a turn, and as many removed by routing memory when a worker is full
    each second               of every gateway: leases of the workers' events, of the index and of registered workers; the full load

So a request's worth is one for counters, leases and sessions, and a tenth of one for the index. One gateway in two ends without
goodbye and is replaced; workers restart, which gives their slot in the index up; agents of workers die.

At the end all gateways die without goodbye but one, which comes last, tidies up and leaves.

Run from the project's folder: python -m benchmarks.soak
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
import secrets
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import uvloop
from redis import Redis

import gateway.sharing
from gateway.config import IndexConfig
from gateway.sharing import Sharing
from gateway.worker_entries import LIST, MOST_BYTES, MOST_WORKERS, REGISTER, RUN_BYTES, entry_key, set_key
from kvindex.memory import MemoryIndex
from kvindex.redis_index import key_prefix
from kvindex.redis_line import RedisRefused, RedisUnavailable
from kvindex.routing_memory import RoutingMemory
from routing.router import Router, RouteRequest
from routing.sessions import SessionRecord
from tests.redis_server import RedisServer, redis_server
from workers.profile import WorkerProfile

POOL = "soak"
PREFIX = key_prefix(POOL)
TICKETS = PREFIX + "T"
# of the schema, with or without blocks: the index's figures and its free slots, counters, the pool's policy
CONSTANT = {PREFIX + name for name in "mfTP"}

SESSION_TTL_S = 1  # for 900
RESPONSE_TTL_S = 4.0  # for 3600
MEMORY_TTL_S = 4.0  # for 3600
LEASE_S = 1.0  # for 3
BEAT_S = 0.3  # for 1

WORKERS = 8
WORKER_BLOCKS = 4_000
BLOCK_TOKENS = 128
LANES = 2  # gateways of a process at any time
BATCH = 500  # requests between two waits for Redis
SESSIONS = 2_000  # of a gateway at any time
TURNS = 10
SYSTEM_BLOCKS = 16
TURN_BLOCKS = 8
MOST_BLOCKS = 400  # of a session
RESPONSES = 10
LOOKUPS = 100
INDEXED = 10  # one session in so many has its blocks in the index
RESTART = 0.002  # of a worker, a batch
SAMPLE_S = 2.0


@dataclass(slots=True)
class Session:
    """An agent's session: as much of a decision and its request as `Sharing.placed` looks at."""

    session_id: bytes
    worker: str
    gateway: str
    hashes: list[int] | None  # None: not indexed
    turns: int = 0

    @property
    def request(self) -> Session:
        return self

    def session_record(self) -> SessionRecord:
        return SessionRecord(self.worker, self.gateway, self.turns, 1000.0 * self.turns, 0.0)


class SoakGateway:
    """One gateway's life, as Redis sees it."""

    def __init__(self, url: str, rng: random.Random, systems: list[list[int]], lease_s: float = LEASE_S) -> None:
        gateway.sharing.LEASE_S = lease_s
        gateway.sharing.RESPONSE_TTL_S = RESPONSE_TTL_S
        # the deadline is a patient one: it is not what is measured here
        config = IndexConfig(backend="redis", redis={"url": url, "pool": POOL, "deadline_ms": 5000}, session_ttl_s=SESSION_TTL_S)  # type: ignore[arg-type]
        self.sharing = Sharing(config, MemoryIndex())
        self.memory = RoutingMemory(self.sharing.index, ttl_s=MEMORY_TTL_S)
        self.router = Router(self.sharing.index, self.memory, block_units=BLOCK_TOKENS * 4)
        self.sharing.attach(self.router)
        profile = WorkerProfile(kv_capacity_tokens=WORKER_BLOCKS * BLOCK_TOKENS)
        self.workers = [f"10.0.0.{number}:8000" for number in range(WORKERS)]
        for worker in self.workers:
            self.router.add_worker(worker, ["m"], profile)
        self.done = 0
        self._rng = rng
        self._systems = systems
        self._sessions: list[Session] = []
        self._agents = [secrets.token_hex(4) for _ in range(WORKERS)]
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.sharing.connect()
        await self.sharing.start(2 * LANES * WORKERS * WORKER_BLOCKS)
        self._heart = asyncio.create_task(self._beat())

    async def leave(self) -> None:
        await self._stop_beating()
        await self.sharing.stop()

    async def die(self) -> None:
        """Without goodbye: its connections end, and nothing is said before."""
        await self._stop_beating()
        for line in self.sharing._lines:
            await line.close()
        await self.sharing.stop()

    async def _stop_beating(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait([self._heart])

    async def serve(self, requests: int, lifetime_s: float, counter: Synchronized[int]) -> int:
        """Until so many are served or the time is over; returns the number."""
        end = time.monotonic() + lifetime_s
        while self.done < requests and time.monotonic() < end:
            batch = min(BATCH, requests - self.done)
            for number in range(batch):
                self._request(self.done + number)
            for _ in range(batch // LOOKUPS):
                await self._look_up()
            self.done += batch
            if self._rng.random() < RESTART:
                self.memory.forget(self._rng.choice(self.workers))
            self.memory.expire(time.monotonic())
            try:
                await self.sharing.index.flush()
            except RedisUnavailable:
                await asyncio.sleep(0.1)
            with counter.get_lock():
                counter.value += batch
        return self.done

    def _request(self, number: int) -> None:
        rng, sharing = self._rng, self.sharing
        sessions = self._sessions
        at = int(rng.random() * SESSIONS)
        if at >= len(sessions):
            session = self._new_session()
            sessions.append(session)
        else:
            session = sessions[at]
            if rng.random() * TURNS < 1:
                session = sessions[at] = self._new_session()
        session.turns += 1
        self.router.touched.add(self.router.workers[session.worker])
        sharing.placed(session)  # type: ignore[arg-type]
        if session.hashes is not None and len(session.hashes) < MOST_BLOCKS:
            session.hashes += [rng.getrandbits(64) for _ in range(TURN_BLOCKS)]
            self.memory.record(session.worker, session.session_id, session.hashes, time.monotonic())
        if number % RESPONSES == 0:
            sharing.answered(f"resp_{rng.getrandbits(128):x}", session.worker)

    def _new_session(self) -> Session:
        rng = self._rng
        self.sharing.index.behind("HINCRBY", TICKETS, "placed", 1)
        hashes = list(rng.choice(self._systems)) if rng.random() * INDEXED < 1 else None
        return Session(rng.randbytes(16), rng.choice(self.workers), self.sharing.gateway_id, hashes)

    async def _look_up(self) -> None:
        session = self._rng.choice(self._sessions)
        request = RouteRequest("m", session.hashes or self._systems[0], 10_000, session.session_id)
        await self.sharing.ask(request)

    async def _beat(self) -> None:
        """Follow workers' events; register workers, as their agents do, and read the registry."""
        prefix = PREFIX
        while True:
            await self.sharing.follow(self.workers)
            if self._rng.random() < 0.2:  # an agent dies, and another worker begins
                self._agents[self._rng.randrange(WORKERS)] = secrets.token_hex(4)
            try:
                for agent in self._agents:
                    entry = b"r" * RUN_BYTES + b"an entry of usual length " * 20
                    keys = [set_key(prefix), entry_key(prefix, agent)]
                    await self.sharing._line.run(REGISTER, keys, [agent, entry, round(LEASE_S * 1000), MOST_WORKERS])
                await self.sharing._line.run(LIST, [set_key(prefix)], [MOST_WORKERS, MOST_BYTES])
            except (RedisUnavailable, RedisRefused):
                pass
            await asyncio.sleep(BEAT_S)


# ---- the processes


async def _lane(url: str, seed: str, requests: int, lifetime_s: float, counter: Synchronized[int]) -> None:
    rng = random.Random(seed)
    shared = random.Random("systems")
    systems = [[shared.getrandbits(64) for _ in range(SYSTEM_BLOCKS)] for _ in range(8)]
    left = requests
    while left:
        gateway = SoakGateway(url, rng, systems)
        await gateway.start()
        left -= await gateway.serve(left, lifetime_s * rng.uniform(0.5, 1.5), counter)
        if left and rng.random() < 0.5:
            await gateway.leave()
        else:
            await gateway.die()


def _process(url: str, number: int, requests: int, lifetime_s: float, counter: Synchronized[int], secret: str) -> None:
    os.environ["WARMROUTE_POOL_SECRET"] = secret
    logging.getLogger("warmroute.others").setLevel(logging.ERROR)  # that gateways die is known

    async def lanes() -> None:
        share = requests // LANES
        shares = [share] * (LANES - 1) + [requests - share * (LANES - 1)]
        await asyncio.gather(*(_lane(url, f"{number} {lane}", share, lifetime_s, counter) for lane, share in enumerate(shares)))

    uvloop.run(lanes())


@dataclass
class Watch:
    """What Redis holds over time."""

    redis: RedisServer
    samples: list[dict[str, float]] = field(default_factory=list)

    def info(self, section: str) -> dict[str, str]:
        text = str(self.redis.admin("INFO", section))
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def look(self, at: float, requests: int) -> dict[str, float]:
        meta = self.redis.admin("HMGET", PREFIX + "m", "next", "version")
        assert isinstance(meta, list)
        sample = {
            "at_s": round(at, 1), "requests": requests, "used_memory": int(self.info("memory")["used_memory"]),
            "keys": int(str(self.redis.admin("DBSIZE"))), "slots_live": int(str(self.redis.admin("HLEN", PREFIX + "s"))),
            "slots_used": int(meta[0] or 0), "slots_free": int(str(self.redis.admin("LLEN", PREFIX + "f"))),
            "clients": int(self.info("clients")["connected_clients"]) - 1,
        }  # fmt: skip
        self.samples.append(sample)
        return sample

    def keys(self) -> list[str]:
        """All that is left and not constant."""
        with Redis(port=self.redis.port) as client:
            return [str(key)[2:-1] for key in client.scan_iter(count=1000) if key.decode("latin-1") not in CONSTANT]


def _row(sample: dict[str, float], total: int) -> str:
    left_s = sample["at_s"] * (total / sample["requests"] - 1) if sample["requests"] else 0.0
    memory = f"{sample['used_memory'] / 2**20:.2f}"
    return (
        f"{sample['at_s']:>8.0f}{sample['requests']:>13,}{memory:>9}{sample['keys']:>9,}{sample['slots_live']:>7}{sample['slots_used']:>7}"
        f"{sample['slots_free']:>7}{sample['clients']:>9}{left_s:>8.0f}"
    )


async def soak(requests: int, processes: int = 2, lifetime_s: float = 6.0, print_s: float = 15.0) -> dict[str, Any]:
    """The figures, with `faults`: what was not bounded, and what is left. `lifetime_s`: of a gateway, in the mean."""
    secret = os.environ["WARMROUTE_POOL_SECRET"] = secrets.token_hex(16)
    async with redis_server() as redis:
        watch = Watch(redis)
        first = watch.look(0.0, 0)
        context = multiprocessing.get_context("spawn")
        counter: Synchronized[int] = context.Value("q", 0)
        shares = [requests // processes] * (processes - 1) + [requests - requests // processes * (processes - 1)]
        children = [
            context.Process(target=_process, args=(redis.url, number, share, lifetime_s, counter, secret), daemon=True)
            for number, share in enumerate(shares)
        ]
        print(f"{'s':>8}{'requests':>13}{'MiB':>9}{'keys':>9}{'slots':>7}{'ever':>7}{'free':>7}{'clients':>9}{'ETA s':>8}", file=sys.stderr)
        begin = printed = time.monotonic()
        for child in children:
            child.start()
        try:
            while any(child.is_alive() for child in children):
                await asyncio.sleep(min(SAMPLE_S, lifetime_s / 2))
                if any(child.exitcode for child in children):
                    raise SystemExit("a process of gateways failed")
                now = time.monotonic()
                sample = watch.look(now - begin, counter.value)
                if now - printed >= print_s:
                    printed = now
                    print(_row(sample, requests), file=sys.stderr, flush=True)
        finally:
            for child in children:
                if child.is_alive():
                    child.terminate()
                child.join()
        seconds = time.monotonic() - begin
        commands = {
            name.removeprefix("cmdstat_"): int(text.split("calls=", 1)[1].split(",", 1)[0])
            for name, text in watch.info("commandstats").items()
        }
        cpu = watch.info("cpu")
        await _tidy_up(redis)
        left = await _after_all_ttls(watch)
        last = watch.look(time.monotonic() - begin, counter.value)
        result = {
            "requests": counter.value, "seconds": round(seconds, 1), "requests_per_s": round(counter.value / seconds),
            "redis_cpu_s": round(float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]), 1),
            "commands": {name: calls for name, calls in sorted(commands.items(), key=lambda item: -item[1]) if calls >= requests / 10_000},
            "peak_memory": max(sample["used_memory"] for sample in watch.samples), "peak_keys": max(s["keys"] for s in watch.samples),
            "peak_slots": max(sample["slots_used"] for sample in watch.samples), "left_keys": left[:20], "left_count": len(left),
            "left_bytes": last["used_memory"] - first["used_memory"], "samples": watch.samples,
        }  # fmt: skip
        result["faults"] = _faults(result, requests)
        return result


async def _tidy_up(redis: RedisServer) -> None:
    """The pool's last gateway: it finds that the others are gone, and leaves when it has swept."""
    gateway = SoakGateway(redis.url, random.Random(0), [[1]])
    await gateway.sharing.connect()
    await gateway.sharing.start(2 * LANES * WORKERS * WORKER_BLOCKS)
    gateway.sharing.index.store(gateway.workers[0], list(range(10_000)))  # it has something to leave, too
    give_up = time.monotonic() + 60
    while redis.admin("SCARD", PREFIX + "g") != 1 or redis.admin("EXISTS", PREFIX + "d", PREFIX + "w"):
        if time.monotonic() > give_up:
            break  # what is left will tell
        await asyncio.sleep(0.1)
    await gateway.sharing._line.run(LIST, [set_key(PREFIX)], [MOST_WORKERS, MOST_BYTES])
    await asyncio.sleep(2 * LEASE_S)  # agents' leases
    await gateway.sharing._line.run(LIST, [set_key(PREFIX)], [MOST_WORKERS, MOST_BYTES])
    await gateway.leave()


async def _after_all_ttls(watch: Watch) -> list[str]:
    """What is left once the longest TTL has ended; expired keys count until Redis has found them, as in its memory."""
    give_up = time.monotonic() + 2 * RESPONSE_TTL_S
    while (left := watch.keys()) and time.monotonic() < give_up:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    await asyncio.sleep(2.0)  # it shrinks its tables and connections' buffers now and then
    return left


def _faults(result: dict[str, Any], requests: int) -> list[str]:
    faults = []
    if result["requests"] != requests:
        faults.append(f"only {result['requests']:,} requests were served")
    if result["left_count"]:
        faults.append(f"{result['left_count']} keys are left: {', '.join(result['left_keys'][:5])} ...")
    if result["left_bytes"] > 2 << 20:
        faults.append(f"{result['left_bytes']:,} bytes are left")
    filled = [sample for sample in result["samples"] if sample["clients"] and sample["at_s"] > 2 * RESPONSE_TTL_S]
    third = len(filled) // 3
    if third * SAMPLE_S < 2 * RESPONSE_TTL_S:
        return faults  # too short to tell
    early, late = filled[:third], filled[-third:]
    for name, slack in (("used_memory", 4 << 20), ("keys", 2000), ("slots_used", 100)):
        before, after = (max(sample[name] for sample in part) for part in (early, late))
        if after > 1.5 * before + slack:
            faults.append(f"{name} grew from {before:,} at most in the first third to {after:,} in the last")
    return faults


def show(result: dict[str, Any]) -> None:
    print(f"{result['requests']:,} requests' worth in {result['seconds']:,.0f} s: {result['requests_per_s']:,} a second")
    print(f"Redis CPU {result['redis_cpu_s']:,.0f} s; commands a request:")
    for name, calls in result["commands"].items():
        print(f"  {name:12}{calls / result['requests']:>9.4f}")
    print(f"at most {result['peak_memory'] / 2**20:.1f} MiB, {result['peak_keys']:,} keys, {result['peak_slots']:,} slots")
    print(f"in the end {result['left_count']} keys but the constant ones, {result['left_bytes']:,} bytes more than at the start")
    print("\n".join(result["faults"]) or "bounded, and nothing is left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000_000, help="default %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="of gateways (default %(default)s)")
    parser.add_argument("--lifetime-s", type=float, default=6.0, help="of a gateway, in the mean (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args()
    result = asyncio.run(soak(options.requests, options.processes, options.lifetime_s))
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if result["faults"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
