"""Runs fleets on the simulator, in this process or several, and never one twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from threading import Lock
from types import TracebackType
from typing import Self

from loadgen.results import Run
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.load import Load
from loadgen.simulate.simulator import simulate
from loadgen.trace import Session

ReadSessions = Callable[[], list[Session]]


class Simulations:
    """Use as a context manager. With `jobs` above 1, that many processes read the trace for themselves (`read` must be picklable)."""

    def __init__(self, read: ReadSessions, jobs: int = 1, on_done: Callable[[], None] | None = None) -> None:
        self.jobs = jobs
        self.done = 0
        self._read = read
        self._on_done = on_done or (lambda: None)
        self._known: dict[str, Run] = {}
        self._lock = Lock()
        self._sessions: list[Session] | None = None
        self._pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (read,)) if jobs > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def sessions(self) -> list[Session]:
        """The trace, as this process has read it."""
        if self._sessions is None:
            self._sessions = self._read()
        return self._sessions

    def run(self, fleet: FleetSpec, load: Load, seeds: Sequence[int] = (0,)) -> list[Run]:
        """The fleet's runs under a load, one for each seed; from several threads too. Raises FleetError."""
        begun = {seed: self._begin(fleet, load, seed) for seed in seeds}
        runs = []
        for seed, (key, pending) in begun.items():
            run = pending if isinstance(pending, Run) else pending.result() if pending is not None else None
            if run is None:
                run = _simulate(self.sessions, fleet, load, seed)
            if not isinstance(pending, Run):
                with self._lock:
                    self._known[key] = run
                    self.done += 1
                self._on_done()
            runs.append(run)
        return runs

    def _begin(self, fleet: FleetSpec, load: Load, seed: int) -> tuple[str, Run | Future[Run] | None]:
        key = f"{fleet.model_dump_json()} {load} {seed}"
        with self._lock:
            if key in self._known:
                return key, self._known[key]
        return key, None if self._pool is None else self._pool.submit(_run, fleet, load, seed)


_sessions: list[Session] = []  # of a child process


def _begin(read: ReadSessions) -> None:
    logging.disable(logging.WARNING)  # a fleet that is too small makes the router warn of much
    _sessions[:] = read()


def _run(fleet: FleetSpec, load: Load, seed: int) -> Run:
    return _simulate(_sessions, fleet, load, seed)


def _simulate(sessions: list[Session], fleet: FleetSpec, load: Load, seed: int) -> Run:
    run = simulate(sessions, fleet, load, seed).run({})
    if not run.tiers:
        run.tiers = dict.fromkeys(load.tiers, run.figures)
    return run
