"""`index.py --backend redis`: what a shared index costs, against the same in this process and against one command a block.

The one-command-a-block index is built as llm-d's: a hash a block with a field a pod, found by one pipeline of HKEYS for the whole chain;
a sorted set a block that maps the engine's hash; cleared by a scan of all keys. It gets the same fast client. It holds a tenth of the
blocks, to spare memory. All times are wall seconds seen by this client, which waits for each answer; Redis CPU is its main thread's.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from hiredis import pack_command
from index import random_chain

from kvindex.memory import MemoryIndex
from kvindex.redis_index import Operation, RedisIndex, packed
from kvindex.redis_line import Line
from kvindex.redis_scripts import MATCH
from kvindex.redis_target import RedisTarget

LENGTHS = (1_000, 6_250)
HOLDERS = 8
CHAIN = 6_250
PIPELINE = 500  # blocks the one-command-a-block index stores at once
PATIENCE_S = 60.0


class Backend(Protocol):
    name: str

    async def store(self, holder: str, hashes: Sequence[int]) -> None: ...
    async def match(self, hashes: Sequence[int]) -> dict[str, int]: ...
    async def clear(self, holder: str) -> None: ...


class Memory:
    name = "memory"

    def __init__(self) -> None:
        self._index = MemoryIndex()

    async def store(self, holder: str, hashes: Sequence[int]) -> None:
        self._index.store(holder, hashes)

    async def match(self, hashes: Sequence[int]) -> dict[str, int]:
        return self._index.match(hashes)

    async def clear(self, holder: str) -> None:
        self._index.clear(holder)


class Shared:
    name = "redis"

    def __init__(self, index: RedisIndex) -> None:
        self._index = index

    async def store(self, holder: str, hashes: Sequence[int]) -> None:
        operation: Operation = ("store", holder, hashes)
        await self._index.write([operation])

    async def match(self, hashes: Sequence[int]) -> dict[str, int]:
        return await self._index.match(hashes)

    async def clear(self, holder: str) -> None:
        await self._index.write([("clear", holder, ())])


class CommandABlock:
    name = "command a block"

    def __init__(self, line: Line) -> None:
        self._line = line

    async def store(self, holder: str, hashes: Sequence[int]) -> None:
        field = _pod_entry(holder)
        for at in range(0, len(hashes), PIPELINE):
            commands: list[tuple[str | int, ...]] = []
            for block in hashes[at : at + PIPELINE]:
                commands += [("ZADD", f"engine:{block}", 0, str(block)), ("HSET", str(block), field, "")]
            await self._line.pipeline(commands, PATIENCE_S)

    async def match(self, hashes: Sequence[int]) -> dict[str, int]:
        replies = await self._line.pipeline([("HKEYS", str(block)) for block in hashes], PATIENCE_S)
        depths: dict[str, int] = {}
        alive: set[str] | None = None
        for depth, fields in enumerate(replies):
            holders = {json.loads(field)["PodIdentifier"] for field in fields}
            alive = holders if alive is None else alive & holders
            if not alive:
                break
            depths.update(dict.fromkeys(alive, depth + 1))
        return depths

    async def clear(self, holder: str) -> None:
        field = _pod_entry(holder)
        cursor = b"0"
        while True:
            cursor, keys = await self._line.call("SCAN", cursor, "MATCH", "*", "COUNT", 1024)
            blocks = [key for key in keys if not key.startswith(b"engine:")]
            await self._line.pipeline([("HDEL", key, field) for key in blocks], PATIENCE_S)
            if cursor == b"0":
                return


def _pod_entry(holder: str) -> str:
    return json.dumps({"PodIdentifier": holder, "DeviceTier": "gpu"}, separators=(",", ":"))


class Server:
    """A redis-server of its own on a free port, without persistence."""

    def __init__(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise SystemExit("needs redis-server or valkey-server on the PATH")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        self._target = RedisTarget(f"redis://127.0.0.1:{port}/0")

    async def line(self) -> Line:
        up = asyncio.Event()
        line = Line(self._target, deadline_s=PATIENCE_S, on_up=up.set, max_pending_bytes=1 << 30)
        await line.start()
        await asyncio.wait_for(up.wait(), 20)
        return line

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


async def info(line: Line, section: str) -> dict[str, str]:
    text = (await line.call("INFO", section)).decode()
    return dict(row.split(":", 1) for row in text.splitlines() if ":" in row)


async def cpu_s(line: Line) -> float:
    values = await info(line, "cpu")
    return float(values["used_cpu_user_main_thread"]) + float(values["used_cpu_sys_main_thread"])


async def timed(operation: Callable[[], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    await operation()
    return time.perf_counter() - begin


async def measure(backend: Backend, line: Line, blocks: int, rounds: int, seed: int) -> dict[str, Any]:
    """Fill with `blocks` blocks of eight holders, match chains over eight holders, clear one. `line` is for looking at the server."""
    rng = random.Random(seed)
    chains = [random_chain(rng, CHAIN) for _ in range(max(1, blocks // CHAIN))]
    stored = len(chains) * CHAIN
    memory = int((await info(line, "memory"))["used_memory"])
    cpu, begin = await cpu_s(line), time.perf_counter()
    for number, chain in enumerate(chains):
        await backend.store(f"worker-{number % HOLDERS}", chain)
    seconds = time.perf_counter() - begin
    result: dict[str, Any] = {"name": backend.name, "blocks": stored, "stores_per_s": round(stored / seconds)}
    in_redis = backend.name != "memory"
    if in_redis:
        result["redis_us_per_stored_block"] = round((await cpu_s(line) - cpu) / stored * 1e6, 2)
        await asyncio.sleep(1.0)  # the server frees buffers of connections now and then
        result["bytes_per_block"] = round((int((await info(line, "memory"))["used_memory"]) - memory) / stored, 1)
    expected: dict[int, dict[str, int]] = {}
    for length in LENGTHS:
        hashes = random_chain(rng, length)
        expected[length] = {f"worker-{holder}": rng.randint(1, length) if holder else length for holder in range(HOLDERS)}
        for holder, depth in expected[length].items():
            await backend.store(holder, hashes[:depth])
        assert await backend.match(hashes) == expected[length]
        cpu = await cpu_s(line)
        seconds_each = sorted([await timed(lambda hashes=hashes: backend.match(hashes)) for _ in range(rounds)])  # type: ignore[misc]
        result[f"match_{length}_p50_us"] = round(statistics.median(seconds_each) * 1e6, 1)
        result[f"match_{length}_p99_us"] = round(seconds_each[int(rounds * 0.99)] * 1e6, 1)
        if in_redis:
            result[f"match_{length}_redis_us"] = round((await cpu_s(line) - cpu) / rounds * 1e6, 1)
            result[f"match_{length}_sent_bytes"] = _sent_bytes(backend, hashes)

    async def clear_and_see() -> None:
        await backend.clear("worker-0")
        while "worker-0" in await backend.match(hashes):
            pass

    result["clear_visible_ms"] = round(await timed(clear_and_see) * 1e3, 2)
    return result


def _sent_bytes(backend: Backend, hashes: Sequence[int]) -> int:
    commands: list[tuple[Any, ...]] = [("HKEYS", str(block)) for block in hashes]
    if not isinstance(backend, CommandABlock):
        commands = [MATCH.command(["{wr:benchmark}:1:m"], [packed(hashes)])]
    return sum(len(pack_command(command)) for command in commands)


async def _compare(blocks: int, rounds: int, seed: int) -> dict[str, Any]:
    rows = []
    for name in ("memory", "redis", "command a block"):
        server = Server()
        line = None
        try:
            line = await server.line()
            if name == "memory":
                rows.append(await measure(Memory(), line, blocks, rounds, seed))
            elif name == "redis":
                index = RedisIndex(line, "benchmark", "gateway", capacity_blocks=blocks)
                await index.join(3600)
                rows.append(await measure(Shared(index), line, blocks, rounds, seed))
            else:
                rows.append(await measure(CommandABlock(line), line, blocks // 10, max(10, rounds // 10), seed))
        finally:
            if line:
                await line.close()
            server.stop()
    return {"backend": "redis", "holders": HOLDERS, "rounds": rounds, "rows": rows}


def compare(blocks: int, rounds: int, seed: int) -> dict[str, Any]:
    return asyncio.run(_compare(blocks, rounds, seed))


def table(result: dict[str, Any]) -> str:
    wanted = [
        ("blocks in the index", "blocks"), ("stored blocks a second", "stores_per_s"),
        ("Redis CPU us a stored block", "redis_us_per_stored_block"), ("bytes a block (Redis used_memory)", "bytes_per_block"),
    ]  # fmt: skip
    for length in LENGTHS:
        wanted += [
            (f"match {length:,} blocks, p50 us", f"match_{length}_p50_us"), ("  p99 us", f"match_{length}_p99_us"),
            ("  Redis CPU us", f"match_{length}_redis_us"), ("  bytes sent", f"match_{length}_sent_bytes"),
        ]  # fmt: skip
    wanted.append(("clear visible after ms", "clear_visible_ms"))
    rows = result["rows"]
    lines = [f"{result['holders']} holders of different depths; one client, which waits for each answer"]
    lines.append(f"{'':<36}" + "".join(f"{row['name']:>18}" for row in rows))
    for text, key in wanted:
        lines.append(f"{text:<36}" + "".join(f"{row[key]:>18,}" if key in row else f"{'-':>18}" for row in rows))
    return "\n".join(lines)
