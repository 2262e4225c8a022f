"""What a trouble of the shared Redis, or the loss of a gateway, costs the requests under way.

Three gateways that share by Redis serve agent sessions whose turns go to any of them; in the middle of the load Redis is frozen, is
killed and comes back empty, fails over to its replica by Sentinel, or a gateway is killed. Each trouble is measured against the time
before it, in the same run: errors, TTFT, the share of prompt tokens that were cached, and how long until all is whole again.

Run from the project's folder: python -m benchmarks.outage

A turn that meets the killed gateway is sent to another one by its client, as SDKs do; it is counted as sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvloop

from benchmarks.gateways import percentile
from loadgen.client import StreamClient
from loadgen.local import Program
from loadgen.prompts import block_text, seed_of
from tests.redis_server import redis_server, sentinel_pair

WORKERS = 4
GATEWAYS = 3
SPEED = 40.0  # of the simulated engines: turns are short, so that what the gateways add shows
KV_CAPACITY = 1_500_000  # a worker, tokens: nothing is evicted
SESSIONS = 24
SYSTEM_TOKENS = 6_000
TURN_TOKENS = 400
OUTPUT_TOKENS = 40
GAP_S = (0.05, 0.4)
MOST_TOKENS = 40_000  # a session that has grown to this is followed by a new one
LEASE_LIMIT_S = 5.0
WHOLE_LIMIT_S = 10.0


@dataclass
class Turn:
    at: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    later: bool  # not its session's first
    error: str | None = None


@dataclass
class Load:
    """Sessions in closed loop, each turn through a gateway drawn at random."""

    clients: list[StreamClient]
    rng: random.Random
    turns: list[Turn] = field(default_factory=list)
    sent_again: int = 0
    ended: bool = False
    killed: int | None = None  # the gateway that was
    dead: set[int] = field(default_factory=set)  # gateways that clients no longer ask

    async def session(self, number: int) -> None:
        await asyncio.sleep(self.rng.random())
        while not self.ended:
            name = secrets.token_hex(6)
            messages = [{"role": "system", "content": block_text(number % 4, SYSTEM_TOKENS, seed_of("system", 0))}]
            tokens, turn = SYSTEM_TOKENS, 0
            while tokens < MOST_TOKENS and not self.ended:
                messages.append({"role": "user", "content": block_text(turn, TURN_TOKENS, seed_of(name, turn))})
                await self._ask(name, messages, later=turn > 0)
                messages.append({"role": "assistant", "content": block_text(turn, OUTPUT_TOKENS, seed_of(name, "said", turn))})
                tokens += TURN_TOKENS + OUTPUT_TOKENS
                turn += 1
                await asyncio.sleep(self.rng.uniform(*GAP_S))

    async def _ask(self, session: str, messages: list[dict[str, str]], later: bool) -> None:
        fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        body = orjson.dumps({"model": "sim", "messages": messages, **fields})
        started = time.perf_counter()
        while True:
            living = [n for n in range(len(self.clients)) if n not in self.dead]
            chosen = self.rng.choice(living)
            answer = await self.clients[chosen].post("/v1/chat/completions", body, session)
            if answer.error is None or chosen != self.killed:
                break
            self.dead.add(chosen)
            self.sent_again += 1
        self.turns.append(
            Turn(started, answer.first_at - started, answer.prompt_tokens or 0, answer.cached_tokens or 0, later, answer.error)
        )

    def figures(self, begin: float, end: float) -> dict[str, Any]:
        """Of the turns that began in this time."""
        turns = [turn for turn in self.turns if begin <= turn.at < end]
        good = [turn for turn in turns if turn.error is None]
        later = [turn for turn in good if turn.later]
        ttfts = [turn.ttft_s for turn in good]
        prompt = sum(turn.prompt_tokens for turn in later)
        return {
            "turns": len(turns), "errors": len(turns) - len(good), "ttft_p50_ms": round(percentile(ttfts, 50) * 1e3, 1),
            "ttft_p99_ms": round(percentile(ttfts, 99) * 1e3, 1),
            "hit_rate": round(sum(turn.cached_tokens for turn in later) / prompt, 4) if prompt else 0.0,
        }  # fmt: skip


class Pool:
    """The programs under test."""

    def __init__(self, scratch: Path, stack: AsyncExitStack, redis: dict[str, str]) -> None:
        self.gateways: list[Program] = []

        def start(name: str, *options: str, env: dict[str, str] | None = None) -> Program:
            program = Program(name, [sys.executable, "-m", "gateway.cli", *options], scratch / f"{name}.log", env)
            stack.callback(program.stop)
            return program

        engine = ["--speed", str(SPEED), "--kv-capacity", str(KV_CAPACITY)]
        workers = start("workers", "worker", "sim", "--port", "0", "--count", str(WORKERS), *engine)
        urls = ",".join(workers.wait_for(r"simulated \S+ on (http://\S+)", WORKERS))
        env = {"WARMROUTE_INDEX__BACKEND": "redis", "WARMROUTE_POOL_SECRET": secrets.token_hex(16), **redis}
        self.gateways = [start(f"gateway-{n}", "serve", "--port", "0", "--workers", urls, env=env) for n in range(GATEWAYS)]
        self.urls = [gateway.wait_for(r"listening on (http://\S+)")[0] for gateway in self.gateways]

    async def metric(self, name: str, number: int) -> float:
        """The sum of a metric's samples at one gateway."""
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:  # loading certificates would hold up the load
            text = (await client.get(f"{self.urls[number]}/metrics", timeout=5.0)).text
        return sum(float(value) for value in re.findall(rf"^warmroute_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    async def whole(self, living: list[int]) -> bool:
        """All gateways use Redis, which has all they know, and hear of each other."""
        for number in living:
            if await self.metric("redis_degraded", number) or not await self.metric("shared_index_synced", number):
                return False
            if await self.metric("gateways", number) != len(living):
                return False
        return True

    async def until_whole(self, living: list[int], limit_s: float = 60.0) -> float:
        """Seconds until it is."""
        started = time.perf_counter()
        while not await self.whole(living):
            if time.perf_counter() - started > limit_s:
                raise SystemExit(f"the pool was not whole again within {limit_s:g} s")
            await asyncio.sleep(0.25)  # a scrape costs a gateway some 10 ms
        return time.perf_counter() - started


Trouble = Callable[[Pool, Load], Awaitable[float]]  # makes it, and returns the seconds until all was whole again


async def run(title: str, pool: Pool, trouble: Trouble, before_s: float, after_s: float) -> dict[str, Any]:
    """Load, then trouble in its middle."""
    await pool.until_whole(list(range(GATEWAYS)))
    clients = [StreamClient(url, timeout_s=60.0) for url in pool.urls]
    load = Load(clients, random.Random(1))
    lanes = [asyncio.create_task(load.session(number)) for number in range(SESSIONS)]
    await asyncio.sleep(5.0)  # first turns
    begin = time.perf_counter()
    await asyncio.sleep(before_s)
    middle = time.perf_counter()
    whole_s = await trouble(pool, load)
    over = time.perf_counter()
    await asyncio.sleep(after_s)
    end = time.perf_counter()
    load.ended = True
    await asyncio.gather(*lanes)
    for client in clients:
        client.close()
    return {
        "trouble": title, "before": load.figures(begin, middle), "during": load.figures(middle, over), "after": load.figures(over, end),
        "whole_after_s": round(whole_s, 2), "sent_again": load.sent_again,
    }  # fmt: skip


async def measure(freeze_s: float, before_s: float, after_s: float, only: list[str]) -> list[dict[str, Any]]:
    results = []
    living = list(range(GATEWAYS))
    for name in only:
        print(name, file=sys.stderr, flush=True)
        async with AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))
            if name == "failover":
                pair = await stack.enter_async_context(sentinel_pair())
                nodes = json.dumps(pair.nodes)
                settings = {"WARMROUTE_INDEX__REDIS__SENTINEL_MASTER": pair.MASTER, "WARMROUTE_INDEX__REDIS__NODES": nodes}
                pool = Pool(scratch, stack, settings)

                async def trouble(pool: Pool, load: Load) -> float:
                    pair.master.kill()  # noqa: B023
                    await asyncio.sleep(1.0)
                    return 1.0 + await pool.until_whole(living)

            else:
                redis = await stack.enter_async_context(redis_server())
                pool = Pool(scratch, stack, {"WARMROUTE_INDEX__REDIS__URL": redis.url})

                async def trouble(pool: Pool, load: Load) -> float:
                    if name == "freeze":  # noqa: B023
                        redis.stop()  # noqa: B023
                        await asyncio.sleep(freeze_s)
                        redis.cont()  # noqa: B023
                        return await pool.until_whole(living)
                    if name == "restart":  # noqa: B023
                        redis.kill()  # noqa: B023
                        await asyncio.sleep(2.0)
                        await redis.restart()  # noqa: B023
                        return await pool.until_whole(living)
                    load.killed = 0
                    pool.gateways[0].send_signal(signal.SIGKILL)
                    return await pool.until_whole(living[1:])

            results.append(await run(name, pool, trouble, before_s, after_s))
    return results


def show(results: list[dict[str, Any]]) -> None:
    print(f"{'':10}{'':9}{'turns':>7}{'errors':>8}{'TTFT p50':>10}{'p99 ms':>9}{'hit rate':>10}{'whole after':>13}{'sent again':>12}")
    for result in results:
        for part in ("before", "during", "after"):
            figures = result[part]
            end = f"{result['whole_after_s']:>11.2f} s{result['sent_again']:>12}" if part == "during" else ""
            name = result["trouble"] if part == "before" else ""
            print(
                f"{name:10}{part:9}{figures['turns']:>7}{figures['errors']:>8}{figures['ttft_p50_ms']:>10.1f}{figures['ttft_p99_ms']:>9.1f}"
                f"{figures['hit_rate']:>10.1%}{end}"
            )


def faults(results: list[dict[str, Any]]) -> list[str]:
    """What breaks a promise."""
    found = []
    for result in results:
        name, before, during = result["trouble"], result["before"], result["during"]
        if during["errors"] or result["after"]["errors"]:
            found.append(f"{name}: requests failed")
        if during["ttft_p99_ms"] > before["ttft_p99_ms"] + 60:
            found.append(f"{name}: TTFT p99 rose by {during['ttft_p99_ms'] - before['ttft_p99_ms']:.0f} ms")
        if during["hit_rate"] < 0.9 * before["hit_rate"]:
            found.append(f"{name}: the hit rate fell from {before['hit_rate']:.1%} to {during['hit_rate']:.1%}")
        limit = LEASE_LIMIT_S if name == "gateway" else WHOLE_LIMIT_S
        if result["whole_after_s"] > limit:
            found.append(f"{name}: whole again only after {result['whole_after_s']:g} s")
    return found


def main() -> None:
    troubles = ["freeze", "restart", "failover", "gateway"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--freeze-s", type=float, default=20.0, help="how long Redis is frozen (default %(default)s)")
    parser.add_argument("--before-s", type=float, default=15.0, help="load before the trouble (default %(default)s)")
    parser.add_argument("--after-s", type=float, default=5.0, help="load after it (default %(default)s)")
    parser.add_argument("--only", default=",".join(troubles), help="of %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args()
    results = uvloop.run(measure(options.freeze_s, options.before_s, options.after_s, options.only.split(",")))
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if found := faults(results):
        print("\n".join(found))
        sys.exit(1)


if __name__ == "__main__":
    main()
