"""What Redis has to do for a pool of 10, 100 and 1,000 workers, reckoned from measured figures: docs/scale.md.

    python benchmarks/index.py --backend redis --json index.json
    python benchmarks/scale.py index.json

The first measures the index. This one measures, on a redis-server of its own and in less than a minute, what that leaves out (shared
prefixes, further holders, removals, sessions, load messages), and prints the figures and the table. `--json` keeps the figures,
`--figures` reads them instead of measuring again. Every assumption is an option.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from index import random_chain
from index_redis import Server, cpu_s, info

from gateway.sharing import LEASE_S, TELL_ALL_S, TELL_S
from gateway.worker_entries import LIST, MOST_BYTES, MOST_WORKERS, REGISTER, Beat, Entry, Seal, entry_key, packed, set_key
from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex, key_prefix
from kvindex.redis_line import Line, Subscriber
from kvindex.redis_target import RedisTarget
from kvindex.routing_memory import RoutingMemory
from routing.fleet import Worker
from routing.others import Others
from routing.router import Router
from routing.sessions import SessionRecord
from workers.profile import WorkerProfile

SYSTEM_BLOCKS = 32  # of a prompt that all sessions share
CHAIN = 512  # blocks of a session
SLOTS = (8, 80, 800, 8_000)
RECEIVERS = (2, 20)
WORKERS = (10, 100, 1_000)


@dataclass
class Pool:
    """The traffic that is assumed."""

    requests_s: float  # a worker
    context: int  # tokens of a prompt
    hit_rate: float
    output: int  # tokens, each a chunk of the stream
    kv_tokens: int  # a worker's cache
    block_tokens: int
    lookups: float  # share of requests that need one
    spread: float  # gateways that a session's turns come through
    gateway_request_us: float  # CPU of a gateway
    gateway_chunk_us: float
    gateway_use: float  # share of a gateway's core that is to be used
    session_ttl_s: float
    turns: int  # of a session
    shards: int


def changes_of(requests_s: float) -> float:
    """Messages a second in which one gateway tells of changes: three a request (placed, first token, end), and those of 2 ms together."""
    changes = 3 * requests_s
    return changes / (1 + changes * TELL_S)


def reckon(pool: Pool, workers: int, measured: dict[str, Any]) -> dict[str, float]:
    """One column of the table. CPU is cores of Redis' main thread, all shards together; traffic is bytes/s to and from Redis."""
    requests = workers * pool.requests_s
    gateway_s = (pool.gateway_request_us + pool.output * pool.gateway_chunk_us) / 1e6
    gateways = max(2, math.ceil(requests * gateway_s / pool.gateway_use))
    spread = min(pool.spread, gateways)
    blocks = pool.context / pool.block_tokens
    new = ((1 - pool.hit_rate) * pool.context + pool.output) / pool.block_tokens
    slots = workers * gateways + workers  # routing memory of each gateway, KV events of each worker
    per_shard = slots / pool.shards
    match_us = pool.shards * (measured["match_us"] + per_shard * measured["match_slot_us"])
    lookups = requests * pool.lookups
    copies = spread + 1
    store_us = measured["store_us"] + (copies - 1) * measured["store_again_us"]
    writes = requests * new
    changes_s, fulls_s = gateways * changes_of(requests / gateways), gateways / TELL_ALL_S
    claims = requests / gateways * LEASE_S  # what is told again in each full message
    full = measured["full_bytes"] + workers * measured["worker_bytes"] + claims * measured["claim_bytes"]
    published = changes_s * measured["change_bytes"] + fulls_s * full
    messages = changes_s + fulls_s
    sessions = requests * pool.session_ttl_s / pool.turns
    cached = workers * pool.kv_tokens / pool.block_tokens
    return {
        "requests/s": requests,
        "gateway processes": gateways,
        "slots of the busiest shard": per_shard,
        "cores: matches": lookups * match_us / 1e6,
        "cores: blocks stored and removed": writes * (store_us + copies * measured["remove_us"]) / 1e6,
        "cores: sessions": requests * (measured["session_set_us"] + pool.lookups * measured["session_get_us"]) / 1e6,
        "cores: load messages": messages * (measured["publish_us"] + gateways * measured["deliver_us"]) / 1e6
        + published * gateways * measured["deliver_byte_us"] / 1e6,
        "cores: registry of workers": gateways * workers * measured["list_us"] / 1e6,
        "MB: index": cached * (measured["block_bytes"] + (copies - 1) * measured["holder_bytes"]) / 1e6,
        "MB: sessions": sessions * measured["session_bytes"] / 1e6,
        "MB/s: matches": lookups * pool.shards * (8 * blocks + 100 + 2 * per_shard) / 1e6,
        "MB/s: blocks": writes * copies * 2 * 8 / 1e6,
        "MB/s: load messages": published * (1 + gateways) / 1e6,
        "MB/s: registry of workers": gateways * workers * measured["entry_bytes"] / 1e6,
        "gateway ms/s: reading load messages": published * measured["heard_byte_us"] / 1e3,
        "gateway ms: reading a match": slots * measured["read_slot_us"] / 1e3,
    }


def cores(column: dict[str, float]) -> float:
    return sum(value for name, value in column.items() if name.startswith("cores: "))


def most_workers(pool: Pool, measured: dict[str, Any], use: float) -> int:
    """For which the busiest core of Redis is used to this share."""
    workers = 1
    while cores(reckon(pool, workers + 1, measured)) / pool.shards <= use:
        workers += 1
    return workers


# ---- what is measured here


class Cost:
    """CPU of Redis' main thread and of this process, and wall time, of something done `times` times; microseconds each."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def of(self, times: int, operation: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
        redis, own = await cpu_s(self._line), time.process_time()
        await operation()
        own, redis = time.process_time() - own, await cpu_s(self._line) - redis
        return redis / times * 1e6, own / times * 1e6


def slope(points: list[tuple[float, float]]) -> float:
    """Between the first and the last point."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    return (y1 - y0) / (x1 - x0)


async def measure_writes(line: Line, blocks: int) -> dict[str, float]:
    """First holders, further holders, removals."""
    rng = random.Random(1)
    chains = [random_chain(rng, 1_000) for _ in range(blocks // 1_000)]
    index = RedisIndex(line, "writes", "gateway", capacity_blocks=blocks)
    await index.join(3600)
    cost, used = Cost(line), []

    async def store(round_: int) -> None:
        for number, chain in enumerate(chains):
            await index.write([("store", f"worker-{(number + round_) % 8}", chain)])

    async def remove() -> None:
        for number, chain in enumerate(chains):
            await index.write([("remove", f"worker-{(number + 1) % 8}", chain)])

    memory = int((await info(line, "memory"))["used_memory_dataset"])
    again = []
    for round_ in range(4):
        us, _ = await cost.of(blocks, lambda round_=round_: store(round_))  # type: ignore[misc]
        again.append(us)
        await asyncio.sleep(1.0)
        used.append((int((await info(line, "memory"))["used_memory_dataset"]) - memory) / blocks)
    removed, _ = await cost.of(blocks, remove)
    await index.leave()
    return {"store_again_us": sum(again[1:]) / 3, "remove_us": removed, "holder_bytes": (used[3] - used[0]) / 3}


async def measure_matches(line: Line, rounds: int = 100) -> dict[str, Any]:
    """One holder of all but the last turn; the others hold the system prompt."""
    rng = random.Random(2)
    cost, redis, own = Cost(line), [], []
    for slots in SLOTS:
        index = RedisIndex(line, f"matches-{slots}", "gateway", capacity_blocks=100_000)
        await index.join(3600)
        chain = random_chain(rng, CHAIN)
        await index.write([("store", "worker-0", chain[:-8])])
        await index.write([("store", f"worker-{number}", chain[:SYSTEM_BLOCKS]) for number in range(1, slots)])
        assert len(await index.match(chain)) == slots

        async def match(index: RedisIndex = index, chain: list[int] = chain) -> None:
            for _ in range(rounds):
                await index.match(chain)

        redis_us, own_us = await cost.of(rounds, match)
        redis.append((float(slots), redis_us))
        own.append((float(slots), own_us))
    return {
        "matches": [{"slots": slots, "redis_us": us, "client_us": client} for (slots, us), (_, client) in zip(redis, own, strict=True)],
        "match_slot_us": slope(redis), "read_slot_us": slope(own),
    }  # fmt: skip


async def measure_sessions(line: Line, sessions: int = 50_000) -> dict[str, float]:
    record = SessionRecord("gpu-rack-12.internal:8000", "0123456789ab", 20, 60_000.0, 0.5).encode()
    names = [key_prefix("default").encode() + b"S" + random.Random(n).randbytes(16) for n in range(sessions)]

    async def each(command: Callable[[bytes], tuple[Any, ...]]) -> None:
        for at in range(0, sessions, 100):  # about what goes out with one flush
            await line.pipeline([command(name) for name in names[at : at + 100]])

    cost = Cost(line)
    memory = int((await info(line, "memory"))["used_memory"])
    set_us, _ = await cost.of(sessions, lambda: each(lambda name: ("SET", name, record, "EX", 900)))
    await asyncio.sleep(1.0)
    used = int((await info(line, "memory"))["used_memory"]) - memory
    get_us, _ = await cost.of(sessions, lambda: each(lambda name: ("GET", name)))
    return {"session_set_us": set_us, "session_get_us": get_us, "session_bytes": used / sessions}


async def measure_registry(line: Line, workers: int = 1_000, rounds: int = 20) -> dict[str, float]:
    """Reading the entries of all registered workers, as every gateway does each second."""
    prefix, seal = key_prefix("registry"), Seal("0123456789abcdef", "registry")
    profile = WorkerProfile(model="Qwen/Qwen3-32B", accelerator="h100", tp=2, kv_capacity_tokens=1_500_000, max_num_seqs=256)
    for number in range(workers):
        name = f"gpu-{number:04}.internal:8000"
        entry = packed(Entry(id=name, url=f"http://{name}", models=["Qwen/Qwen3-32B"], profile=profile, block_tokens=128))
        signed = seal.sign(b"0123456789abcdef", entry, Beat(at=time.time(), running=12, waiting=1, kv_use=0.71, events="live"))
        await line.run(REGISTER, [set_key(prefix), entry_key(prefix, name)], [name, signed, 3_600_000, MOST_WORKERS])
    size = 0

    async def read() -> None:
        nonlocal size
        for _ in range(rounds):
            size = sum(map(len, await line.run(LIST, [set_key(prefix)], [MOST_WORKERS, MOST_BYTES])))

    us, _ = await Cost(line).of(rounds * workers, read)
    return {"list_us": us, "entry_bytes": size / workers}


def router_with(workers: int, claims: int = 0) -> Router:
    """A gateway's, every worker with some load."""
    index = MemoryIndex()
    router = Router(index, RoutingMemory(index))
    for number in range(workers):
        worker = Worker(f"gpu-{number:04}.internal:8000", decoding=8, active_tokens=480_123.0, live_sessions=12, working_set=712_345.678)
        worker.computed = 9_123_456.5 + number
        router.workers[worker.id] = worker
    router.sessions.new_claims.extend((random.Random(number).randbytes(16), 20) for number in range(claims))
    return router


def measure_messages() -> dict[str, float]:
    """Bytes of load messages, and what reading one costs a gateway."""

    def full_of(workers: int, claims: int = 0) -> dict[str, Any]:
        message = Others(router_with(workers, claims), "0123456789ab").message(1.0, True)
        assert message is not None
        return message

    few, many = (len(orjson.dumps(full_of(workers))) for workers in (10, 1_000))
    worker_bytes = (many - few) / 990
    claim_bytes = (len(orjson.dumps(full_of(10, 100))) - few) / 100

    router = router_with(10, claims=1)
    router.touched.add(next(iter(router.workers.values())))
    change = Others(router, "0123456789ab").message(1.0, False)

    full, rounds = full_of(100, 20), 500
    listener = Others(router_with(100), "ba9876543210")
    copies = [orjson.dumps({**full, "seq": number}) for number in range(rounds)]
    begin = time.process_time()
    for data in copies:
        listener.heard(orjson.loads(data), 1.0)
    heard = time.process_time() - begin
    assert not listener.malformed and len(listener) == 1
    return {
        "full_bytes": few - 10 * worker_bytes, "worker_bytes": worker_bytes, "claim_bytes": claim_bytes,
        "change_bytes": float(len(orjson.dumps(change))), "heard_byte_us": heard / sum(map(len, copies)) * 1e6,
    }  # fmt: skip


async def measure_channel(line: Line, target: RedisTarget, times: int = 4_000) -> dict[str, float]:
    """PUBLISH to several receivers, small and large."""
    cost, points = Cost(line), {}
    for receivers in RECEIVERS:
        for size in (256, 16_384):
            heard = 0
            done = asyncio.Event()

            def on_message(data: bytes, expected: int = receivers * times, done: asyncio.Event = done) -> None:
                nonlocal heard
                heard += 1
                if heard == expected:
                    done.set()

            ups = [asyncio.Event() for _ in range(receivers)]
            subscribers = [Subscriber(target, f"load-{receivers}-{size}", on_message, on_up=up.set, silence_s=60) for up in ups]
            for subscriber in subscribers:
                await subscriber.start()
            await asyncio.gather(*(up.wait() for up in ups))

            async def publish(channel: str = f"load-{receivers}-{size}", data: bytes = b"x" * size) -> None:
                for _ in range(times):
                    await line.call("PUBLISH", channel, data)

            us, _ = await cost.of(times, publish)
            await asyncio.wait_for(done.wait(), 60)
            points[receivers, size] = us
            for subscriber in subscribers:
                await subscriber.close()
    few, many = RECEIVERS
    deliver = (points[many, 256] - points[few, 256]) / (many - few)
    return {
        "publish_us": points[few, 256] - few * deliver, "deliver_us": deliver,
        "deliver_byte_us": max(0.0, ((points[many, 16_384] - points[few, 16_384]) / (many - few) - deliver) / (16_384 - 256)),
    }  # fmt: skip


async def measure(blocks: int) -> dict[str, Any]:
    server = Server()
    line = None
    try:
        line = await server.line()
        writes, matches = await measure_writes(line, blocks), await measure_matches(line)
        others = await measure_sessions(line) | await measure_registry(line) | await measure_channel(line, server._target)
        return measure_messages() | writes | others | matches
    finally:
        if line:
            await line.close()
        server.stop()


# ---- the table


def with_index(measured: dict[str, Any], index: dict[str, Any]) -> dict[str, Any]:
    """What `index.py --backend redis` has measured, beside."""
    row = next(row for row in index["rows"] if row["name"] == "redis")
    base = measured["matches"][0]
    return measured | {
        "store_us": row["redis_us_per_stored_block"], "block_bytes": row["bytes_per_block"],
        # 8 holders of eight depths: more searching than agents' sessions cause
        "match_us": max(base["redis_us"], row["match_1000_redis_us"]) - base["slots"] * measured["match_slot_us"],
    }  # fmt: skip


def table(columns: dict[int, dict[str, float]]) -> str:
    names = next(iter(columns.values()))
    lines = [f"| {'workers':<36} |" + "".join(f" {workers:>9,} |" for workers in columns), "|---|" + "---:|" * len(columns)]
    for name in names:
        lines.append(f"| {name:<36} |" + "".join(f" {_number(column[name]):>9} |" for column in columns.values()))
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="the JSON of index.py --backend redis")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="what was measured before, instead of measuring")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there")
    parser.add_argument("--blocks", type=int, default=200_000, help="for the cost of writes (default %(default)s)")
    defaults = Pool(1.0, 64_000, 0.95, 300, 1_500_000, 128, 1.0, 3, 453, 46, 0.5, 900, 20, 1)
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(default %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="columns of the table")
    options = parser.parse_args()
    pool = Pool(**{name: getattr(options, name) for name in vars(defaults)})
    measured = json.loads(options.figures.read_text()) if options.figures else asyncio.run(measure(options.blocks))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    measured = with_index(measured, json.loads(options.index.read_text()))
    for name, value in measured.items():
        if isinstance(value, float):
            print(f"{name:<16} {_number(value):>10}")
    for match in measured["matches"]:
        times = f"{match['redis_us']:,.0f} us of Redis, {match['client_us']:,.0f} us of the gateway"
        print(f"a match of {CHAIN} blocks, {match['slots']:,.0f} slots: {times}")
    columns = {workers: reckon(pool, workers, measured) for workers in options.workers}
    for column in columns.values():
        column["cores: all"] = cores(column)
    print()
    print(table(columns))
    print(f"\none core of Redis a shard ({pool.shards}), half used: {most_workers(pool, measured, 0.5):,} workers")


if __name__ == "__main__":
    main()
