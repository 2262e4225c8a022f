"""The simulator against reality: two real vLLM engines on the CPU, calibrated, then a trace played live and simulated.

Sessions of a synthetic agentic trace are played in a closed loop through `warmroute serve` against both engines, in short rounds with
sessions of their own. Before the first round and after each both engines are calibrated, at the same time, since they share the machine's
memory with each other. The simulator then plays every round against a fleet of two workers with the coefficients fitted to the
calibrations on both sides of it: same sessions, gaps, policy and KV capacity. Compared are the means over the rounds of the medians of
TTFT and E2E, and the hit rate.

The client, the gateway and two engines share the machine's cores here, and a virtual machine's cores are half as fast again in one second
as in the next; hence many short rounds. Run it on a machine that does nothing else.

Run from the project's folder, with the engine and model of `make test-engine` in the environment: python -m benchmarks.reality
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from loadgen.calibrate import Calibration, DecodePoint, PrefillPoint, ProbeOptions, fit, measure
from loadgen.client import StreamClient
from loadgen.generate import BLOCK_TOKENS, generate
from loadgen.local import Program
from loadgen.prompts import block_text
from loadgen.replay import ReplayOptions, replay
from loadgen.results import Figures
from loadgen.simulate import FleetSpec, Load, PoolSpec, simulate
from loadgen.trace import Session
from tests.engine.engines import BLOCK, Engine
from workers.profile import WorkerProfile

MODEL = "tiny"
KV_TOKENS = 131_072
SMALLER = 4
TIME_SCALE, MAX_GAP_S, RAMP_S = 0.2, 5.0, 1.0
CHUNK, SLOTS = 2048, 16  # deploy/profiles/tiny-cpu.yaml


@dataclass(frozen=True, slots=True)
class Round:
    """One part of the trace, live and simulated, and what the engines were calibrated to around it."""

    live: Figures
    simulated: Figures
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rounds. Times are means over them."""

    rounds: list[Round]

    def live(self, name: str) -> float:
        return fmean(getattr(each.live, name) for each in self.rounds)

    def simulated(self, name: str) -> float:
        return fmean(getattr(each.simulated, name) for each in self.rounds)

    def error(self, name: str) -> float:
        """Simulated over live, minus 1."""
        return self.simulated(name) / self.live(name) - 1

    @property
    def hit_rates(self) -> tuple[float, float]:
        """Live and simulated."""
        return _hit_rate([each.live for each in self.rounds]), _hit_rate([each.simulated for each in self.rounds])

    @property
    def hit_points(self) -> float:
        """Simulated minus live hit rate, in percentage points."""
        live, simulated = self.hit_rates
        return 100 * (simulated - live)


def _hit_rate(figures: list[Figures]) -> float:
    return sum(each.cached_tokens for each in figures) / sum(each.prompt_tokens for each in figures)


async def compare(
    urls: list[str], *, rounds: int, sessions: int, live_sessions: int, max_context: int, requests: int, warmup: int, seed: int
) -> Comparison:
    """Calibrate the engines at `urls`, play a trace live through a gateway, and simulate it.

    `sessions` are those of all rounds, `requests` and `warmup` those of each. Tokens are the trace's.
    """
    trace = [in_small(session) for session in generate(sessions, seed, SMALLER * max_context)]
    scale = await _tokens_per_trace_token(urls[0])
    longest = int(max_context * scale)
    load = Load(live_sessions=live_sessions, requests=requests, warmup=warmup, time_scale=TIME_SCALE, max_gap_s=MAX_GAP_S, ramp_s=RAMP_S)
    options = ReplayOptions(
        trace, model=MODEL, live_sessions=live_sessions, requests=requests, warmup=warmup, dialect="completions",
        time_scale=TIME_SCALE, max_gap_s=MAX_GAP_S, ramp_s=RAMP_S,
    )  # fmt: skip
    compared: list[Round] = []
    before = await _measured(urls, longest)
    async with _gateway(urls, _profile(fit(*before, chunk=CHUNK))) as url:
        for number in range(rounds):
            part = trace[number::rounds]
            result = await replay(replace(options, trace=part, url=url))
            after = await _measured(urls, longest)
            calibration = fit(before[0] + after[0], before[1] + after[1], chunk=CHUNK)
            fleet = FleetSpec(
                pools=[PoolSpec(count=len(urls), profile=_profile(calibration))], policy="warm",
                overhead_s=calibration.overhead_s, overhead_token_s=calibration.overhead_token_s,
            )  # fmt: skip
            (run,) = result.runs.values()
            simulation = simulate([scaled(session, scale) for session in part], fleet, load)
            compared.append(Round(run.figures(), simulation.figures, calibration))
            before = after
    return Comparison(compared)


def _profile(calibration: Calibration) -> WorkerProfile:
    return WorkerProfile(
        engine="vllm", model=MODEL, block_size=BLOCK, kv_capacity_tokens=KV_TOKENS, max_num_seqs=SLOTS, max_num_batched_tokens=CHUNK,
        latency=calibration.latency,
    )  # fmt: skip


@asynccontextmanager
async def _gateway(urls: list[str], profile: WorkerProfile) -> AsyncIterator[str]:
    """A gateway in front of the engines at `urls`, until the context ends; gives its URL."""
    fields = profile.model_dump(mode="json", exclude={"engine", "model"}, exclude_unset=True)
    config = {"policy": "warm", "workers": [{"url": url, "kv_events": "off", **fields} for url in urls]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "warmroute.yaml")
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--config", str(file)]
        gateway = Program("gateway", command, Path(folder, "log"))
        try:
            (url,) = await asyncio.to_thread(gateway.wait_for, r"listening on (http://\S+)")
            yield url
        finally:
            gateway.stop()


async def _measured(urls: list[str], longest: int) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """Points of all engines, measured at the same time."""
    seed = time.time_ns() & 0xFFFFFF
    clients = [StreamClient(url) for url in urls]
    options = [ProbeOptions(max_context=longest, max_batch=4, repeat=1, seed=seed + number) for number in range(len(urls))]
    measured = await asyncio.gather(*(measure(client, MODEL, own) for client, own in zip(clients, options, strict=True)))
    for client in clients:
        client.close()
    print("\n".join(map(str, measured)), file=sys.stderr, flush=True)
    return [point for each in measured for point in each.prefills], [point for each in measured for point in each.decodes]


def in_small(session: Session) -> Session:
    """The same with prompts of a quarter of the length and answers of an eighth: what a core computes in the time of the gaps."""
    small = scaled(session, 1 / SMALLER)
    for part in small.tree():
        for request in part.requests:
            request.output_tokens = max(8, request.output_tokens // (2 * SMALLER))
    return small


def scaled(session: Session, factor: float) -> Session:
    """The session in an engine's tokens, of which the text of a trace's token makes `factor`."""
    block = round(session.block_size * factor)
    factor = block / session.block_size
    requests = [
        replace(r, input_tokens=round(r.input_tokens * factor), spawns=[scaled(child, factor) for child in r.spawns])
        for r in session.requests
    ]
    return replace(
        session, requests=requests, block_size=block, tool_tokens=round(session.tool_tokens * factor),
        system_tokens=round(session.system_tokens * factor),
    )  # fmt: skip


async def _tokens_per_trace_token(url: str) -> float:
    """How many tokens of the engine the text of one token of a trace is."""
    client = StreamClient(url)
    text = "".join(block_text(number, BLOCK_TOKENS // SMALLER, 1) for number in range(128))
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/completions", json.dumps(body).encode())
    client.close()
    assert answer.prompt_tokens, answer.error
    return answer.prompt_tokens / (128 * BLOCK_TOKENS // SMALLER)


def table(comparison: Comparison) -> Table:
    rounds = comparison.rounds
    shown = Table("", "live", "simulated", "error", "of each round", title="Two vLLM engines on CPU cores")
    for name in ("ttft_p50_s", "ttft_p90_s", "e2e_p50_s", "e2e_p90_s", "itl_p50_s"):
        live, simulated = comparison.live(name), comparison.simulated(name)
        each = ", ".join(f"{Comparison([one]).error(name):+.0%}" for one in rounds)
        shown.add_row(name, f"{live * 1e3:.1f} ms", f"{simulated * 1e3:.1f} ms", f"{comparison.error(name):+.1%}", each)
    rates = (f"{rate:.2%}" for rate in comparison.hit_rates)
    each = ", ".join(f"{Comparison([one]).hit_points:+.1f}" for one in rounds)
    shown.add_row("hit_rate", *rates, f"{comparison.hit_points:+.2f} points", each)
    requests = sum(each.live.requests for each in rounds), sum(each.simulated.requests for each in rounds)
    shown.add_row("requests", *map(str, requests))
    return shown


async def _main(arguments: argparse.Namespace) -> None:
    engines: list[Engine] = []
    if not arguments.url:
        python, model = Path(os.environ["WARMROUTE_VLLM_PYTHON"]), Path(os.environ["WARMROUTE_TINY_MODEL"])
        engines = [Engine(python, model, core=number, kv_tokens=KV_TOKENS) for number in range(2)]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            await engine.ready()
        comparison = await compare(
            arguments.url or [engine.url for engine in engines],
            rounds=arguments.rounds,
            sessions=6 * arguments.rounds,
            live_sessions=arguments.sessions,
            max_context=arguments.max_context,
            requests=arguments.requests,
            warmup=arguments.requests // 5,
            seed=arguments.seed,
        )
    finally:
        for engine in engines:
            engine.stop()
    console = Console(width=110)
    for each in comparison.rounds:
        console.print(each.calibration)
    console.print(table(comparison))
    if arguments.json:
        errors: dict[str, Any] = {name: comparison.error(name) for name in ("ttft_p50_s", "e2e_p50_s")}
        errors["hit_points"] = comparison.hit_points
        arguments.json.write_text(json.dumps(errors, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=3, help="sessions alive at a time")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, each between two calibrations")
    parser.add_argument("--requests", type=int, default=50, help="measured requests of a round")
    parser.add_argument("--max-context", type=int, default=4096, help="longest prompt of the trace, in its tokens")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--url", action="append", help="use these engines instead of starting two")
    parser.add_argument("--json", type=Path, help="also write the errors here")
    asyncio.run(_main(parser.parse_args()))
