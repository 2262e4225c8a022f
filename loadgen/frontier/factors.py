"""Expansion: how much better the best configuration is than a baseline, split into factors that multiply to the total."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import exp, factorial, fsum, log

from loadgen.frontier.metrics import FrontierError, Metric
from loadgen.frontier.objectives import Objective, broken
from loadgen.frontier.points import Point, Points, arm_key
from loadgen.frontier.wording import setting, short
from loadgen.results import Scalar

_MOST_GROUPS = 7  # orders grow as n!


@dataclass(slots=True)
class Factor:
    """What changing one group of axes was worth. `low` and `high` over the orders in which the groups can be changed."""

    name: str
    changes: list[tuple[str, Scalar, Scalar]]  # axis, baseline's value, best's value
    value: float
    low: float
    high: float


@dataclass(slots=True)
class Expansion:
    """From `baseline` to `best`: `total` is the product of the factors' values."""

    metric: Metric
    baseline: Point
    best: Point
    total: float
    factors: list[Factor]
    at: tuple[Metric, float] | None  # the user's speed (or another x) that both have to reach
    orders: int  # of changing the groups, that were measured throughout
    possible_orders: int
    missing: list[str]  # combinations without a run that would complete the split


@dataclass(slots=True)
class _Cells:
    """The best measured point of each combination of the baseline's and the best's groups. Axes in no group are free to be the best."""

    points: list[Point]
    groups: dict[str, list[str]]  # that differ
    fixed: list[str]  # axes of groups that do not differ
    baseline: Point
    best: Point
    metric: Metric

    def best_of(self, changed: frozenset[str]) -> Point | None:
        wanted = {axis: self.baseline.arm.get(axis) for axis in self.fixed}
        for group, axes in self.groups.items():
            source = self.best if group in changed else self.baseline
            wanted |= {axis: source.arm.get(axis) for axis in axes}
        return _best([point for point in self.points if _matches(point, wanted)], self.metric)


def expansion(
    points: Points,
    metric: Metric,
    baseline: dict[str, Scalar],
    groups: dict[str, list[str]],
    objectives: Sequence[Objective] = (),
    at: tuple[Metric, float] | None = None,
) -> Expansion:
    """Split best / baseline of a metric into one factor a group of axes. Raises FrontierError.

    The baseline is the best point with the given axis values, the best is the best of all; both within the objectives and, with `at`, at
    least as good as this in another figure (a measured point that reaches it; nothing is interpolated). An axis of the baseline that no
    group has is a group of its own. Axes in no group (concurrency, batch limits) are free: every combination counts with its best.

    A group's factor is the geometric mean, over the orders in which the groups can be changed one after the other, of the step it makes
    (its Shapley value in logarithms). Each order's steps telescope, so the factors multiply to the total. Only orders whose every
    combination was measured count; where there is none, as few groups as possible are joined until there is one.
    """
    groups = groups | {axis: [axis] for axis in baseline if not any(axis in axes for axes in groups.values())}
    able = [point for point in points.points if not broken(point, list(objectives)) and _reaches(point, at) and _measured(point, metric)]
    start = _best([point for point in able if _matches(point, baseline)], metric)
    best = _best(able, metric)
    if start is None or best is None:
        known = any(_matches(point, baseline) for point in points.points)
        why = "keeps the objectives" if known else "was run"
        wanted = ", ".join(f"{axis}={setting(value)}" for axis, value in baseline.items())
        raise FrontierError(f"no configuration with {wanted} {why}: there is no baseline")
    differing = {name: axes for name, axes in groups.items() if any(_differs(start, best, axis) for axis in axes)}
    if len(differing) > _MOST_GROUPS:
        raise FrontierError(f"{len(differing)} groups differ; join some with --factor, at most {_MOST_GROUPS} can be told apart")
    fixed = [axis for name, axes in groups.items() if name not in differing for axis in axes]
    cells = _Cells(able, differing, fixed, start, best, metric)
    return _split(cells, points, at)


def _split(cells: _Cells, points: Points, at: tuple[Metric, float] | None) -> Expansion:
    names = list(cells.groups)
    gains: dict[frozenset[str], float] = {}
    missing: list[frozenset[str]] = []
    for size in range(len(names) + 1):
        for chosen in combinations(names, size):
            cell = frozenset(chosen)
            point = cells.best_of(cell)
            if point is None:
                missing.append(cell)
            else:
                gains[cell] = _gain(cells.baseline, point, cells.metric)
    joined, paths = _finest(names, gains)
    factors = []
    for block in joined:
        steps = [log(gains[before | block]) - log(gains[before]) for path in paths for before in (_before(path, block),)]
        changes = [
            (axis, cells.baseline.arm.get(axis), cells.best.arm.get(axis))
            for name in names
            if name in block
            for axis in cells.groups[name]
            if _differs(cells.baseline, cells.best, axis)
        ]
        name = " + ".join(name for name in names if name in block)
        factors.append(Factor(name, changes, exp(fsum(steps) / len(steps)), exp(min(steps)), exp(max(steps))))
    return Expansion(
        cells.metric, cells.baseline, cells.best, gains[frozenset(names)], factors, at,
        len(paths) if len(joined) == len(names) else 0, factorial(len(names)), [_in_words(cell, cells, points) for cell in missing],
    )  # fmt: skip


def _finest(names: list[str], gains: dict[frozenset[str], float]) -> tuple[list[frozenset[str]], list[tuple[frozenset[str], ...]]]:
    """The partition of the groups into the most blocks that some measured order exists for, and all its measured orders."""
    found: tuple[list[frozenset[str]], list[tuple[frozenset[str], ...]]] = ([], [])
    for partition in _partitions(names):
        if len(partition) < len(found[0]):
            continue
        paths = [path for path in permutations(partition) if all(_before(path, block) in gains for block in path)]
        if paths and (len(partition), len(paths)) > (len(found[0]), len(found[1])):
            found = (partition, paths)
    return found


def _partitions(names: list[str]) -> Iterator[list[frozenset[str]]]:
    """All ways to join names, those that join none first."""
    if not names:
        yield []
        return
    first, rest = names[0], names[1:]
    for partition in _partitions(rest):
        yield [frozenset([first]), *partition]
    for partition in _partitions(rest):
        for place, block in enumerate(partition):
            yield [*partition[:place], block | {first}, *partition[place + 1 :]]


def _before(path: tuple[frozenset[str], ...], block: frozenset[str]) -> frozenset[str]:
    """The groups that an order has changed before it comes to this block."""
    return frozenset().union(*path[: path.index(block)])


def _in_words(cell: frozenset[str], cells: _Cells, points: Points) -> str:
    arm = {axis: cells.baseline.arm.get(axis) for axes in cells.groups.values() for axis in axes}
    arm |= {axis: cells.best.arm.get(axis) for name in cell for axis in cells.groups[name]}
    return ", ".join(f"{short(axis, [*points.axes, *points.constant])}={setting(value)}" for axis, value in arm.items())


def _best(points: list[Point], metric: Metric) -> Point | None:
    """The best in the metric; of equals the first."""
    return max(points, key=lambda point: _oriented(point, metric), default=None)


def _oriented(point: Point, metric: Metric) -> float:
    value = point.value(metric.key)
    assert value is not None
    return value if metric.higher else -value


def _gain(baseline: Point, point: Point, metric: Metric) -> float:
    """Times better than the baseline."""
    was, now = baseline.value(metric.key), point.value(metric.key)
    assert was and now
    return now / was if metric.higher else was / now


def _measured(point: Point, metric: Metric) -> bool:
    return (point.value(metric.key) or 0.0) > 0


def _reaches(point: Point, at: tuple[Metric, float] | None) -> bool:
    if at is None:
        return True
    value = point.value(at[0].key)
    if value is None:
        return False
    return value >= at[1] if at[0].higher else value <= at[1]


def _matches(point: Point, arm: dict[str, Scalar]) -> bool:
    own = {axis: point.arm.get(axis) for axis in arm}
    return arm_key(own) == arm_key(arm)


def _differs(a: Point, b: Point, axis: str) -> bool:
    return not _matches(a, {axis: b.arm.get(axis)})
