"""Carries a sweep out: asks the plan for configurations, runs what the results file does not have, and writes each run down as it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

from loadgen.results import Run, append_run, mend, read_runs
from loadgen.sweep.adaptive import AdaptiveSearch
from loadgen.sweep.config import Sweep, SweepError
from loadgen.sweep.evaluate import Task, tasks_of
from loadgen.sweep.grid import Point
from loadgen.sweep.objective import Goal, Value, front
from loadgen.sweep.processes import Executor


class Plan(Protocol):
    """Which configurations to run."""

    budget: int  # at most so many

    def next(self) -> list[Point]:
        """The next ones; none when the sweep has ended."""
        ...

    def tell(self, point: Point, value: Value | None) -> None: ...


class FixedPlan:
    """Configurations that are known from the start."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = list(points)
        self.budget = len(self._points)

    def next(self) -> list[Point]:
        points, self._points = self._points, []
        return points

    def tell(self, point: Point, value: Value | None) -> None:
        pass


def plan_of(sweep: Sweep) -> Plan:
    """The plan that the sweep's `search` asks for."""
    grid, search = sweep.grid(), sweep.search
    if search.kind == "grid":
        return FixedPlan(list(grid.points()))
    budget = search.budget or max(1, grid.size // 3)
    return AdaptiveSearch(grid, budget, search.seed) if search.kind == "adaptive" else FixedPlan(grid.random_sample(budget, search.seed))


@dataclass(slots=True)
class Progress:
    """Where a sweep is, in runs."""

    total: int  # an adaptive search may end with fewer
    done: int = 0
    found: int = 0  # of these, were in the results file
    cannot_run: int = 0
    failed: int = 0
    on_front: int = 0
    started_at: float = 0.0
    newest: Run | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds until the end, at the pace so far."""
        fresh = self.done - self.found
        return (perf_counter() - self.started_at) / fresh * (self.total - self.done) if fresh else None


@dataclass(slots=True)
class Summary:
    """What a sweep came to. `failures` are of runs that are not in the file; the next start tries them again."""

    runs: list[Run] = field(default_factory=list)
    configurations: int = 0
    found: int = 0  # runs that were in the file
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False
    wall_s: float = 0.0

    @property
    def cannot_run(self) -> int:
        return sum(1 for run in self.runs if run.error is not None)


def run_sweep(sweep: Sweep, file: Path, executor: Executor, on_progress: Callable[[Progress], None] | None = None) -> Summary:
    """Run the sweep into `file`, going on where it was stopped. KeyboardInterrupt ends it early with what has ended by then.

    Raises SweepError, and ResultsError for a file that holds something else.
    """
    return _Runner(sweep, file, executor, on_progress or (lambda progress: None)).run()


class _Runner:
    def __init__(self, sweep: Sweep, file: Path, executor: Executor, on_progress: Callable[[Progress], None]) -> None:
        self._sweep = sweep
        self._grid = sweep.grid()
        self._goal: Goal = sweep.goal()
        self._file = file
        self._executor = executor
        self._on_progress = on_progress
        self._plan = plan_of(sweep)
        self._known = known_runs(file)
        self._values: dict[Point, Value] = {}
        self._summary = Summary()
        self._progress = Progress(self._plan.budget * len(sweep.seed_list), started_at=perf_counter())

    def run(self) -> Summary:
        try:
            while points := self._plan.next():
                self._run_batch(points)
        except KeyboardInterrupt:
            self._summary.interrupted = True
        finally:
            self._executor.close()
            self._summary.wall_s = perf_counter() - self._progress.started_at
        return self._summary

    def _run_batch(self, points: list[Point]) -> None:
        runs: dict[Point, list[Run]] = {point: [] for point in points}
        missing: dict[str, tuple[Task, Point]] = {}
        self._summary.configurations += len(points)
        for point in points:
            for task in tasks_of(self._sweep, self._grid.arm(point)):
                known = self._known.get(task.id)
                if known is None:
                    missing[task.id] = (task, point)
                    continue
                self._check_setup(known, task)
                self._summary.found += 1
                self._progress.found += 1
                self._take(runs[point], known)
        for point in points:
            self._learn(point, runs[point])
        self._on_progress(self._progress)
        for outcome in self._executor.run([task for task, _ in missing.values()]):
            point = missing[outcome.task.id][1]
            if outcome.run is None:
                self._summary.failures.append(f"{_text(outcome.task)}: {outcome.failure}")
                self._progress.failed += 1
                self._progress.done += 1
            else:
                append_run(self._file, outcome.run)
                self._take(runs[point], outcome.run)
                self._learn(point, runs[point])
            self._on_progress(self._progress)
        for point in points:
            self._plan.tell(point, self._goal.value(runs[point]))

    def _take(self, runs: list[Run], run: Run) -> None:
        runs.append(run)
        self._summary.runs.append(run)
        self._progress.done += 1
        self._progress.cannot_run += run.error is not None
        self._progress.newest = run

    def _learn(self, point: Point, runs: list[Run]) -> None:
        value = self._goal.value(runs)
        if value is not None:
            self._values[point] = value
            self._progress.on_front = len(front(self._values))

    def _check_setup(self, known: Run, task: Task) -> None:
        if known.setup != task.setup:
            raise SweepError(
                f"{self._file} has the run {_text(task)} of another sweep: the base, the load, the trace or what an axis stands for "
                "has changed since; write to another file with -o"
            )


def known_runs(file: Path) -> dict[str, Run]:
    """The runs that a results file has, by id; afterwards appending to it is safe. Raises ResultsError."""
    runs = {run.id: run for run in read_runs(file)} if file.exists() else {}
    mend(file)
    return runs


def _text(task: Task) -> str:
    return ", ".join(f"{name}={value}" for name, value in task.arm.items()) + f", seed {task.seed}"
