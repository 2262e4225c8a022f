"""What unmeasured points of a grid are expected to measure, and how likely one of them is on the front.

A Gaussian process with a fixed kernel: two points are as alike as the product over the axes of how alike their values there are, so that
what holds at one topology is believed of the next one too, the less the more axes differ. Both figures are taken in logarithms; whether
a point counts at all (it can run and keeps the objectives) is a third figure, 1 or 0. Nothing is fitted but each figure's mean and spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import NamedTuple

from loadgen.sweep.grid import Axis, Grid, Point
from loadgen.sweep.objective import Value, front

STEPS = 6.0  # along an ordered axis until the likeness has fallen to 1/e; all of a longer axis
OTHER_VALUE = 0.8  # likeness of two values of an axis without order
NOISE = 0.003  # of a figure's variance: what the axes do not explain
COUNTS_NOISE = 0.02  # the same, for whether a point counts
DOUBT = 2.0  # times the deviation that the measured points speak for: cliffs make a few points miss by far more than the rest
_SQRT2 = math.sqrt(2)


class Normal(NamedTuple):
    """A distribution."""

    mean: float
    deviation: float


class Estimate:
    """Of the points of a grid, or of some; told what was measured, it says what the others may be worth."""

    def __init__(self, grid: Grid, points: Iterable[Point]) -> None:
        tables, points = [likeness(axis) for axis in grid.axes], list(points)
        self._figures = Process(tables, points, NOISE)
        self._counting = Process(tables, points, COUNTS_NOISE)
        self._values: dict[Point, Value | None] = {}

    def tell(self, point: Point, value: Value | None) -> None:
        """A point's figures; None where it cannot run or does not count."""
        self._values[point] = value
        self._counting.measured(point)
        if value is not None:
            self._figures.measured(point)

    def chances(self) -> dict[Point, float]:
        """For every point of which nothing was told: how likely it counts and nothing told dominates it, from 0 to 1."""
        good = {point: value for point, value in self._values.items() if value is not None}
        x = self._figures.expected([math.log(value.x) for value in good.values()])
        y = self._figures.expected([math.log(value.y) for value in good.values()])
        on_front = sorted((math.log(good[point].x), math.log(good[point].y)) for point in front(good))
        chances = {point: _not_dominated(on_front, x[point], y[point]) for point in x if point not in self._values}
        if len(good) < len(self._values):
            for point, expected in self._counting.expected([float(value is not None) for value in self._values.values()]).items():
                chances[point] *= 1 - _below(0.5, expected)
        return chances


class Process:
    """How alike points are to the measured ones: a Cholesky decomposition that grows by a column with each measured point."""

    def __init__(self, tables: Sequence[list[list[float]]], points: Sequence[Point], noise: float) -> None:
        self._tables = tables
        self._noise = noise
        self._open: dict[Point, list[float]] = {point: [] for point in points}
        self._measured: list[tuple[list[float], float]] = []  # row left of the diagonal, and the diagonal

    def measured(self, point: Point) -> None:
        own = self._open.pop(point)
        diagonal = math.sqrt(max(self._noise, 1 + self._noise - sum(map(mul, own, own))))
        of_axes = [table[at] for table, at in zip(self._tables, point, strict=True)]
        for other, row in self._open.items():
            alike = 1.0
            for of_axis, at in zip(of_axes, other, strict=True):
                alike *= of_axis[at]
            row.append((alike - sum(map(mul, own, row))) / diagonal)
        self._measured.append((own, diagonal))

    def expected(self, values: Sequence[float]) -> dict[Point, Normal]:
        """Of a figure, given as measured in turn, at the other points. Mean and variance before any was measured are the likeliest."""
        ones, whole = self._solve([1.0] * len(values)), self._solve(values)
        mean = sum(map(mul, ones, whole)) / sum(map(mul, ones, ones))
        rest = [value - mean * one for value, one in zip(whole, ones, strict=True)]
        spread = DOUBT * math.sqrt(sum(map(mul, rest, rest)) / len(rest))
        return {
            point: Normal(mean + sum(map(mul, row, rest)), max(1e-6, spread * math.sqrt(max(0.0, 1 - sum(map(mul, row, row))))))
            for point, row in self._open.items()
        }

    def _solve(self, values: Sequence[float]) -> list[float]:
        """What those before it do not explain of each value, over what was uncertain of it."""
        solved: list[float] = []
        for value, (row, diagonal) in zip(values, self._measured, strict=True):
            solved.append((value - sum(map(mul, row, solved))) / diagonal)
        return solved


def likeness(axis: Axis) -> list[list[float]]:
    """Of the values of an axis, from 0 to 1."""
    places = range(len(axis.values))
    if not axis.ordered:
        return [[1.0 if i == j else OTHER_VALUE for j in places] for i in places]
    length = max(STEPS, len(axis.values) - 1)
    return [[math.exp(-abs(i - j) / length) for j in places] for i in places]


def _not_dominated(on_front: Sequence[tuple[float, float]], x: Normal, y: Normal) -> float:
    """The chance that no point of a front, given by growing x (and so by falling y), has both figures larger."""
    chance, left_of = 0.0, 0.0
    for front_x, front_y in on_front:  # what lies between two points of the front has to top the right one
        within = _below(front_x, x)
        chance += (within - left_of) * (1 - _below(front_y, y))
        left_of = within
    return chance + 1 - left_of


def _below(bound: float, figure: Normal) -> float:
    """The chance that a figure is below a bound."""
    return 0.5 * (1 + math.erf((bound - figure.mean) / figure.deviation / _SQRT2))
