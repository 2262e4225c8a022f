"""Several gateways before the same workers: what sharing by Redis is worth, and what one gateway alone would have done.

The agentic trace is replayed through one gateway, through three that share an index by Redis, and through three that share nothing,
every request going to one of them at random; then bursts of cold requests with one shared prefix, which tempt gateways that see the
same state to pick the same worker. First 20 in a row: the sessions of each are still awake for the gateways when the next comes, and
soon fill the workers' caches as far as these can tell. Then each on its own: before it, the gateways forget what they have sent.
All programs are started by their command lines: a redis-server, four simulated workers and the gateways, each mode with new ones.
A seed gives every mode the same load; figures are medians over the seeds.

Imbalance is the busiest worker's requests over the mean of all workers, of a replay as a whole and of each burst.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import secrets
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvloop

from loadgen.client import Answer, StreamClient
from loadgen.local import Program
from loadgen.prompts import block_text, seed_of
from loadgen.replay import ReplayOptions, replay
from loadgen.report import seconds

WORKERS = 4
TRACE = Path(__file__).parent.parent / "traces" / "agentic.jsonl"
# As in the demo: less than half of what the live sessions hold together, so where they live matters.
KV_CAPACITY = 400_000
SPEED = 6.0
LIVE_SESSIONS = 40
TIME_SCALE = 0.05
RAMP_S = 5.0

BURST_PREFIX_TOKENS = 8_000
BURST_OWN_TOKENS = 500
BURST_OUTPUT_TOKENS = 16
IN_A_ROW = 20


@dataclass(frozen=True)
class Mode:
    name: str
    gateways: int
    shares: bool


MODES = {
    "one": Mode("one gateway", 1, False),
    "shared": Mode("{n} sharing by Redis", 3, True),
    "alone": Mode("{n} sharing nothing", 3, False),
}


@contextmanager
def running(mode: Mode, redis: str) -> Iterator[list[str]]:
    """The URLs of this mode's gateways, before new workers."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))

        def start(name: str, *options: str, env: dict[str, str] | None = None) -> Program:
            program = Program(name, [sys.executable, "-m", "gateway.cli", *options], scratch / f"{name}.log", env)
            stack.callback(program.stop)
            return program

        engine = ["--speed", str(SPEED), "--kv-capacity", str(KV_CAPACITY)]
        workers = start("workers", "worker", "sim", "--port", "0", "--count", str(WORKERS), *engine)
        urls = ",".join(workers.wait_for(r"simulated \S+ on (http://\S+)", WORKERS))
        env = {"WARMROUTE_INDEX__BACKEND": "memory"}
        if mode.shares:
            env = {
                "WARMROUTE_INDEX__BACKEND": "redis", "WARMROUTE_INDEX__REDIS__URL": redis,
                "WARMROUTE_INDEX__REDIS__POOL": secrets.token_hex(4), "WARMROUTE_POOL_SECRET": secrets.token_hex(16),
            }  # fmt: skip
        gateways = [start(f"gateway-{n}", "serve", "--port", "0", "--workers", urls, env=env) for n in range(mode.gateways)]
        roots = [gateway.wait_for(r"listening on (http://\S+)")[0] for gateway in gateways]
        for root in roots:
            ready = httpx.get(f"{root}/ready", trust_env=False)
            assert ready.status_code == 200 and all(ready.json()["workers"].values()), ready.text
        yield roots


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a new redis-server that keeps nothing on disk."""
    path = shutil.which("redis-server")
    if path is None:
        sys.exit("redis-server is not installed (Debian package redis-server)")
    with tempfile.TemporaryDirectory(prefix="warmroute-") as scratch:
        socket = Path(scratch, "redis.sock")
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", scratch]
        server = Program("redis", [path, *options], Path(scratch, "redis.log"))
        try:
            server.wait_for("(?i)(ready to accept connections)")
            yield f"unix://{socket}"
        finally:
            server.stop()


async def play(urls: list[str], seed: int, requests: int) -> dict[str, Any]:
    """The agentic trace, spread over these gateways request by request."""
    options = ReplayOptions(
        trace=TRACE, url=urls[0], more_urls=tuple(urls[1:]), spread="request", requests=requests, seed=seed,
        live_sessions=LIVE_SESSIONS, time_scale=TIME_SCALE, ramp_s=RAMP_S, kv_capacity_tokens=WORKERS * KV_CAPACITY,
    )  # fmt: skip
    (run,) = (await replay(options)).runs.values()
    return {
        "hit_rate": run.hit_rate, "hit_bound": run.hit_bound, "hit_bound_lru": run.hit_bound_lru,
        "ttft_p50_s": run.ttft_p50_s, "ttft_p90_s": run.ttft_p90_s, "ttft_p99_s": run.ttft_p99_s,
        "imbalance": max(run.worker_shares.values()) * WORKERS, "errors": run.errors, "degraded": run.degraded,
        "duration_s": run.duration_s,
    }  # fmt: skip


async def burst(urls: list[str], seed: int, bursts: int, size: int, forget: bool) -> dict[str, Any]:
    """Bursts of cold requests, each burst with one prefix of its own; the next begins when all of the one before are answered, and
    with `forget` the gateways know nothing of these any more."""
    rng = random.Random(seed)
    salt = secrets.token_hex(4)
    clients = [StreamClient(url) for url in urls]
    imbalances, answers = [], []
    with ExitStack() as stack:
        for client in clients:
            stack.enter_context(closing(client))
        for number in range(bursts):
            if forget:
                await asyncio.to_thread(reset, urls)
                await asyncio.sleep(0.2)  # the last messages of the burst before
            prefix = block_text(number, BURST_PREFIX_TOKENS, seed_of(salt, "prefix"))
            bodies = [burst_body(prefix, block_text(n, BURST_OWN_TOKENS, seed_of(salt, number))) for n in range(size)]
            got: list[Answer] = await asyncio.gather(*(rng.choice(clients).post("/v1/chat/completions", body) for body in bodies))
            answers += got
            shares = Counter(answer.worker for answer in got if answer.error is None)
            imbalances.append(max(shares.values(), default=0) * WORKERS / size)
    ttfts = [answer.ttft_s for answer in answers if answer.error is None]
    return {
        "imbalance_p50": percentile(imbalances, 50), "imbalance_p99": percentile(imbalances, 99),
        "ttft_p50_s": percentile(ttfts, 50), "ttft_p99_s": percentile(ttfts, 99),
        "errors": sum(answer.error is not None for answer in answers),
    }  # fmt: skip


def reset(urls: list[str]) -> None:
    """Let the gateways forget what they have sent (a switch of the policy does)."""
    for url in urls:
        httpx.put(f"{url}/admin/policy", json={"policy": "warm"}, trust_env=False).raise_for_status()


def burst_body(prefix: str, own: str) -> bytes:
    messages = [{"role": "system", "content": prefix}, {"role": "user", "content": own}]
    fields = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": BURST_OUTPUT_TOKENS, "ignore_eos": True}
    return orjson.dumps({"model": "sim", "messages": messages, **fields})


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Field by field; errors are added up."""
    return {
        name: sum(run[name] for run in runs) if name in ("errors", "degraded") else statistics.median(run[name] for run in runs)
        for name in runs[0]
    }


def show(results: dict[str, dict[str, Any]], bursts: int, size: int) -> None:
    print(f"\n{'':26}{'hit rate':>9}{'bound':>8}{'LRU':>8}{'TTFT p50':>11}{'p90':>9}{'p99':>9}{'busiest/mean':>14}{'errors':>8}")
    for name, result in results.items():
        run = result["replay"]
        times = f"{seconds(run['ttft_p50_s']):>11}{seconds(run['ttft_p90_s']):>9}{seconds(run['ttft_p99_s']):>9}"
        rates = f"{run['hit_rate']:>9.1%}{run['hit_bound']:>8.1%}{run['hit_bound_lru']:>8.1%}"
        print(f"{name:26}{rates}{times}{run['imbalance']:>14.2f}{run['errors']:>8}" + ("  sent late" if run["degraded"] else ""))
    for kind, number, how in (("in_a_row", IN_A_ROW, "one after the other"), ("bursts", bursts, "each on its own")):
        if bursts:
            print(f"\n{number} bursts of {size} cold requests with one prefix, {how}")
            show_bursts({name: result[kind] for name, result in results.items()})


def show_bursts(results: dict[str, dict[str, Any]]) -> None:
    print(f"{'':26}{'busiest/mean p50':>18}{'p99':>7}{'TTFT p50':>11}{'p99':>9}{'errors':>8}")
    for name, run in results.items():
        times = f"{seconds(run['ttft_p50_s']):>11}{seconds(run['ttft_p99_s']):>9}"
        print(f"{name:26}{run['imbalance_p50']:>18.2f}{run['imbalance_p99']:>7.2f}{times}{run['errors']:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)} (default: all)")
    parser.add_argument("--gateways", type=int, default=3, help="where there are several (default: 3)")
    parser.add_argument("--requests", type=int, default=800, help="of the trace (default: 800)")
    parser.add_argument("--bursts", type=int, default=100, help="on their own; 0: none of either kind (default: 100)")
    parser.add_argument("--burst-size", type=int, default=64, metavar="N", help="requests of a burst (default: 64)")
    parser.add_argument("--seeds", default="0", help="comma-separated (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args()
    modes = [MODES[name] for name in options.modes.split(",")]
    modes = [mode if mode.gateways == 1 else Mode(mode.name.format(n=options.gateways), options.gateways, mode.shares) for mode in modes]
    runs: dict[str, list[dict[str, dict[str, Any]]]] = {mode.name: [] for mode in modes}
    with redis_server() as redis:
        for seed in map(int, options.seeds.split(",")):
            for mode in modes:
                print(f"seed {seed}: {mode.name}", file=sys.stderr, flush=True)
                with running(mode, redis) as urls:
                    run = {"replay": uvloop.run(play(urls, seed, options.requests))}
                    if options.bursts:
                        run["in_a_row"] = uvloop.run(burst(urls, seed, IN_A_ROW, options.burst_size, False))
                        run["bursts"] = uvloop.run(burst(urls, seed + 1, options.bursts, options.burst_size, True))
                    runs[mode.name].append(run)
    results = {name: {kind: medians([run[kind] for run in each]) for kind in each[0]} for name, each in runs.items()}
    print(f"{WORKERS} simulated workers, {LIVE_SESSIONS} live sessions, {options.requests} requests of {TRACE.name}, seeds {options.seeds}")
    show(results, options.bursts, options.burst_size)
    if options.json:
        options.json.write_text(json.dumps({"medians": results, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
