"""Points: the runs of one configuration with different seeds, as the median and the spread of each figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from loadgen.frontier.metrics import METRICS, FrontierError
from loadgen.results import Run, Scalar


class Spread(NamedTuple):
    """A figure over a point's seeds."""

    median: float
    low: float
    high: float


@dataclass(slots=True, eq=False)
class Point:
    """One configuration. `id` is its place in the list of points."""

    id: int
    arm: dict[str, Scalar]
    runs: list[Run]
    _figures: dict[str, Spread | None] = field(default_factory=dict, repr=False)

    def spread(self, key: str) -> Spread | None:
        """Median, lowest and highest over the seeds that measured it; None where none did."""
        if key not in self._figures:
            measured = [value for run in self.runs if (value := METRICS[key].of(run)) is not None]
            self._figures[key] = Spread(median(measured), min(measured), max(measured)) if measured else None
        return self._figures[key]

    def value(self, key: str) -> float | None:
        """The median over the seeds; None where it was not measured."""
        spread = self.spread(key)
        return spread.median if spread else None

    @property
    def gpus(self) -> int:
        return self.runs[0].gpus


@dataclass(slots=True)
class Points:
    """All configurations of one trace, and those that could not run."""

    points: list[Point]
    axes: list[str]  # that differ between the points, in the order of the sweep
    constant: dict[str, Scalar]  # axes with one value
    failed: list[Run]
    trace: str
    runs: int

    @property
    def seeds(self) -> tuple[int, int]:
        """Fewest and most runs of a point."""
        counts = [len(point.runs) for point in self.points] or [0]
        return min(counts), max(counts)

    def values(self, axis: str) -> list[Scalar]:
        """The different values of an axis, numbers in order."""
        found = list(dict.fromkeys(point.arm.get(axis) for point in self.points))
        return sorted(found, key=order)

    def axis(self, name: str) -> str:
        """An axis by its name or by the last part of its dotted name. Raises FrontierError."""
        known = [*self.axes, *self.constant]
        if name in known:
            return name
        found = [axis for axis in known if axis.rpartition(".")[2] == name]
        if len(found) == 1:
            return found[0]
        problem = f"{name!r} could be {' or '.join(found)}" if found else f"no axis is named {name!r}"
        raise FrontierError(f"{problem}; the results have {', '.join(known) or 'no axes'}")


def order(value: Scalar) -> tuple[int, float, str]:
    """A key that sorts numbers by size and all else by its text."""
    if is_number(value):
        return (0, float(value), "")  # type: ignore[arg-type]
    return (1, 0.0, str(value))


def is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def gather(runs: Iterable[Run], trace: str | None = None) -> Points:
    """Make points of runs; runs with one seed that occur twice (a file given twice) count once, the last of them.

    Points are comparable on one trace only: with several, `trace` says which. Live and simulated runs of one arm are two points, told
    apart by an axis `source`. Raises FrontierError.
    """
    by_id: dict[str, Run] = {}
    for run in runs:
        if (other := by_id.get(run.id)) is not None and other.setup != run.setup:
            arm = ", ".join(f"{axis}={value}" for axis, value in run.arm.items())
            raise FrontierError(
                f"two sweeps have the run {arm}, seed {run.seed}, but differ in the base, the load or the trace: they do not compare; "
                "sweep what differs as an axis"
            )
        by_id[run.id] = run
    unique = list(by_id.values())
    if not unique:
        raise FrontierError("the results hold no run")
    traces = sorted({run.trace for run in unique})
    if trace is not None:
        unique = [run for run in unique if run.trace == trace]
        if not unique:
            raise FrontierError(f"no run is of the trace {trace!r}; there are runs of {', '.join(traces)}")
    elif len(traces) > 1:
        raise FrontierError(f"runs of different traces do not compare: choose one of {', '.join(traces)} with --trace")
    if len({run.source for run in unique}) > 1:
        unique = [replace(run, arm={**run.arm, "source": run.source}) for run in unique]
    measured = [run for run in unique if run.error is None and run.figures.requests > 0]
    failed = [
        run if run.error is not None else replace(run, error="no request ended in the window")
        for run in unique
        if run.error is not None or run.figures.requests == 0
    ]
    groups: dict[tuple[tuple[str, Scalar], ...], list[Run]] = {}
    for run in measured:
        groups.setdefault(arm_key(run.arm), []).append(run)
    points = [Point(number, group[0].arm, group) for number, group in enumerate(groups.values())]
    axes, constant = _axes(points)
    return Points(points, axes, constant, failed, unique[0].trace, len(measured))


def arm_key(arm: dict[str, Scalar], without: Sequence[str] = ()) -> tuple[tuple[str, Scalar], ...]:
    """What is equal for equal arms, whatever the order of their axes."""
    return tuple(sorted((axis, _typed(value)) for axis, value in arm.items() if axis not in without))


def _typed(value: Scalar) -> Scalar:
    """1 and True, and None and "null", are different values to a person; as text with their type they also sort."""
    return f"{float(value)!r}" if is_number(value) else f"{type(value).__name__}:{value}"  # type: ignore[arg-type]


def _axes(points: list[Point]) -> tuple[list[str], dict[str, Scalar]]:
    names = list(dict.fromkeys(axis for point in points for axis in point.arm))
    varying, constant = [], {}
    for name in names:
        if len({_typed(point.arm.get(name)) for point in points}) > 1:
            varying.append(name)
        else:
            constant[name] = points[0].arm.get(name)
    return varying, constant
