"""Tries a recommendation here: its gateway.yaml before simulated workers, the trace replayed, and the figures beside the predicted ones."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import yaml
from rich.table import Table

from loadgen.frontier.metrics import METRICS
from loadgen.local import Program, StartError
from loadgen.metrics import RunResult
from loadgen.recommend.output import GATEWAY, pool_model
from loadgen.recommend.plan import Pool
from loadgen.recommend.recommend import Recommendation, pool_name
from loadgen.recommend.search import fleet_of
from loadgen.recommend.table import figure
from loadgen.recommend.verdict import spread_of
from loadgen.replay import ReplayOptions, replay
from loadgen.results import Run
from loadgen.simulate.fleet import PoolSpec
from loadgen.simulate.load import Load
from loadgen.simulate.simulator import simulate
from loadgen.trace import Session

# Not the ITL: a simulation spreads a request's over its tokens evenly, a replay measures each.
COMPARED = ("ttft_p50_s", "ttft_p90_s", "e2e_p50_s", "e2e_p90_s", "user_tokens_per_s", "hit_rate")
_SEEDS = 3
_WARM_SHARE = 0.25  # of the measured requests are sent before, unmeasured


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One pool's figures as predicted for this very replay, and as measured."""

    pool: str
    predicted: list[Run]  # by seed
    measured: RunResult

    def figures(self, key: str) -> tuple[float | None, float | None]:
        """Predicted (median over the seeds) and measured."""
        spread = spread_of(self.predicted, key)
        return spread.median if spread is not None else None, getattr(self.measured, key)


def replay_load(load: Load, requests: int) -> Load:
    """The load as `replay` can bring it: it measures so many requests after a quarter as many, and sessions begin at their start."""
    warmup = round(_WARM_SHARE * requests)
    return replace(load, requests=requests, warmup=warmup, duration_s=None, warmup_s=0.0, advance=0.0, shuffle=False)


def rehearse(made: Recommendation, directory: Path, sessions: Sequence[Session], requests: int = 400) -> list[Rehearsed]:
    """Start what `directory` holds, replay `requests` requests to all pools at once, and predict the same by simulation.

    In real time: the programs and the client need the CPU time that so many streams take. Raises StartError, ReplayError.
    """
    assert made.plan is not None
    pools = made.plan.pools
    shares = [sum(made.request.tiers[tier].share for tier in pool.tiers) for pool in pools]
    loads = [
        replay_load(made.request.load(pool.tiers), max(1, round(requests * share / sum(shares))))
        for pool, share in zip(pools, shares, strict=True)
    ]
    predicted = [_predict(made, pool, load, sessions) for pool, load in zip(pools, loads, strict=True)]
    with ExitStack() as stack:
        url = _start(stack, directory)
        options = [_options(made, pool, load, sessions, url) for pool, load in zip(pools, loads, strict=True)]
        measured = asyncio.run(_replay_all(options))
    return [Rehearsed(pool_name(pool), runs, result) for pool, runs, result in zip(pools, predicted, measured, strict=True)]


def _predict(made: Recommendation, pool: Pool, load: Load, sessions: Sequence[Session]) -> list[Run]:
    fleet = fleet_of(made.request, [PoolSpec(count=pool.trial.count, profile=pool.trial.candidate.profile)])
    return [simulate(sessions, fleet, load, seed).run({}) for seed in range(_SEEDS)]


def _start(stack: ExitStack, directory: Path) -> str:
    """The gateway's URL, once it reaches every worker."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))
    config = directory / GATEWAY
    workers = len(yaml.safe_load(config.read_text("utf-8"))["workers"])

    def program(name: str, *options: str) -> Program:
        # by module name: the gateway is another program to the load generator, never an import
        started = Program(name, [sys.executable, "-m", "gateway.cli", *options], scratch / f"{name}.log")
        stack.callback(started.stop)
        return started

    program("workers", "worker", "sim", "--like", str(config)).wait_for(r"simulated \S+ on (http://\S+)", workers)
    url = program("gateway", "serve", "--config", str(config)).wait_for(r"listening on (http://\S+)")[0]
    ready = httpx.get(f"{url}/ready", trust_env=False)
    if ready.status_code != 200 or not all(ready.json()["workers"].values()):
        raise StartError(f"the gateway does not reach every worker: {ready.text}")
    return url


def _options(made: Recommendation, pool: Pool, load: Load, sessions: Sequence[Session], url: str) -> ReplayOptions:
    assert made.plan is not None
    return ReplayOptions(
        trace=list(sessions), url=url, model=pool_model(made.request, made.plan, pool), mode=load.mode, live_sessions=load.live_sessions,
        requests=load.requests, warmup=load.warmup, time_scale=load.time_scale, max_gap_s=load.max_gap_s, ramp_s=load.ramp_s,
        rate=load.rate, speedup=load.speedup,
    )  # fmt: skip


async def _replay_all(options: Sequence[ReplayOptions]) -> list[RunResult]:
    results = await asyncio.gather(*(replay(each) for each in options))
    return [next(iter(result.runs.values())) for result in results]


def rehearsal_table(rehearsed: Sequence[Rehearsed]) -> Table:
    """Predicted beside measured, a pool after the other."""
    table = Table(title="replay against simulated workers", title_justify="left")
    for heading in ("pool", "figure", "predicted", "measured", "off"):
        table.add_column(heading, justify="left" if heading in ("pool", "figure") else "right")
    for each in rehearsed:
        for number, key in enumerate(COMPARED):
            predicted, measured = each.figures(key)
            known = predicted is not None and measured is not None
            table.add_row(
                each.pool if number == 0 else "", METRICS[key].label.replace(" (s)", ""),
                "-" if predicted is None else figure(key, predicted), "-" if measured is None else figure(key, measured),
                f"{measured / predicted - 1:+.0%}" if known and predicted else "-",  # type: ignore[operator]
                end_section=number == len(COMPARED) - 1,
            )  # fmt: skip
    return table
