"""One run of a sweep on the fleet simulator."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

import orjson

from loadgen.readers import read_trace
from loadgen.results import Figures, Run, Scalar, run_id
from loadgen.simulate.fleet import FleetError
from loadgen.simulate.simulator import simulate
from loadgen.sweep.config import Sweep, SweepError
from loadgen.sweep.configuration import CannotRun, configuration, draft
from loadgen.trace import Session, limit_context


@dataclass(frozen=True, slots=True)
class Task:
    """A configuration and a seed. `setup` tells runs apart whose arms are equal but mean something else; `id` is that of the run."""

    arm: dict[str, Scalar]
    seed: int
    id: str
    setup: str = ""


class Evaluate(Protocol):
    """Makes a run of a task. An exception costs this task only."""

    def __call__(self, task: Task) -> Run: ...


def read_sessions(sweep: Sweep) -> list[Session]:
    """The sweep's trace. Raises TraceError, SweepError."""
    sessions = read_trace(sweep.trace, sweep.trace_format, sweep.gaps)
    if sweep.max_context is not None:
        sessions = limit_context(sessions, sweep.max_context)
        if not sessions:
            raise SweepError(f"max_context: no session of {sweep.trace} has a step within {sweep.max_context:,} tokens")
    return sessions


class SimulatedRuns:
    """Simulates tasks of one sweep. The trace is read once."""

    def __init__(self, sweep: Sweep) -> None:
        logging.getLogger("routing").setLevel(logging.ERROR)  # hundreds of fleets would each say how they are
        self._sweep = sweep
        self._sessions = read_sessions(sweep)
        requests = [request for session in self._sessions for part in session.tree() for request in part.requests]
        self._longest = max(request.input_tokens + request.output_tokens for request in requests)

    def __call__(self, task: Task) -> Run:
        started = perf_counter()
        try:
            run = self._simulate(task)
        except (CannotRun, FleetError) as error:
            run = cannot_run(self._sweep, task, str(error))
        return replace(run, wall_s=round(perf_counter() - started, 3), setup=task.setup)

    def _simulate(self, task: Task) -> Run:
        made = configuration(self._sweep, self._sweep.settings(task.arm))
        room = min(pool.profile.kv_capacity_tokens for pool in made.fleet.pools)
        if room < self._longest:
            raise CannotRun(
                f"the trace's longest request, {self._longest:,} tokens, exceeds a worker's KV cache of {room:,}; "
                "max_context cuts the trace, more GPUs or fewer bits make room"
            )
        return simulate(self._sessions, made.fleet, made.load, task.seed).run(task.arm, self._sweep.trace.name)


def cannot_run(sweep: Sweep, task: Task, why: str) -> Run:
    """The run of a configuration that has no figures."""
    source = "live" if sweep.mode == "live" else "simulated"
    return Run(task.arm, task.seed, Figures(), source=source, trace=sweep.trace.name, error=why, setup=task.setup)  # type: ignore[arg-type]


def tasks_of(sweep: Sweep, arm: dict[str, Scalar]) -> list[Task]:
    """A configuration's runs, one for each seed."""
    made = draft(sweep, sweep.settings(arm))
    engines = None if sweep.engines is None else sweep.engines.model_dump(mode="json", exclude={"startup_timeout_s"})
    said = [made.fleet, made.load, made.gpus, made.pd, made.per_gpu, sweep.max_context, sweep.gaps, _size(sweep), engines]
    setup = hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)).hexdigest()[:12]
    return [Task(arm, seed, run_id(arm, seed, sweep.trace.name, sweep.mode), setup) for seed in sweep.seed_list]


def _size(sweep: Sweep) -> int:
    """Of the trace's file: enough to tell a trace that was made anew."""
    return sweep.trace.stat().st_size if sweep.trace.is_file() else 0
