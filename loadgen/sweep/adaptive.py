"""Finding the front with few of the grid's configurations.

It starts from a spread sample. Then, in rounds, it measures what is most promising of

- the neighbours of the points on the current front, one step away along one axis;
- the middle between two measured values of an ordered axis where a cliff lies between them: the farther one is worse in one figure by
  more than `CLIFF` and not better in the other, so that the last good value is somewhere between;
- points that the estimate below expects on the front.

The estimate is for the order only; every point of the front is a measured one. It takes the logarithms of both figures as a sum of one
effect per axis value, and corrects it by what near points were off by, since cliffs are no sums. A neighbour of the front that is
expected far below it (by `MARGIN`) is not worth a run; when nothing better is left, or the budget is spent, the search ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from itertools import pairwise

from loadgen.sweep.grid import Axis, Grid, Point
from loadgen.sweep.objective import Value, front

CLIFF = 1.3
MARGIN = 0.25  # in logarithms of the figures: a quarter below the front in both
UNCERTAINTY = 0.10  # the same, for each step to the nearest measured point
UNFIT = 0.5  # the same, for a point all of whose measured neighbourhood cannot run or does not count
START_SHARE = 0.2  # of the budget, for the first sample
_ROUND_SHARE = 0.06  # of the budget, in one round
_ESTIMATED = 3_000  # points whose promise is estimated in a round, where the grid has more
_EFFECT_PASSES = 6
_FADING = 1.5  # a measured point's weight in the correction falls to a fifth with each step
_OTHER_STEPS = 1.5  # between two values of an axis without order


class AdaptiveSearch:
    """Ask it for points with `next`, tell it what they measured; it has ended when it asks for none."""

    def __init__(self, grid: Grid, budget: int, seed: int = 0) -> None:
        self._grid = grid
        self.budget = budget
        self._seed = seed
        self._values: dict[Point, Value | None] = {}  # None: cannot run, or does not keep an objective

    def tell(self, point: Point, value: Value | None) -> None:
        """A point's figures; None where it cannot run or does not count."""
        self._values[point] = value

    def next(self) -> list[Point]:
        left = self.budget - len(self._values)
        if left <= 0:
            return []
        if not self._values:
            return self._grid.spread_sample(min(left, max(6, round(self.budget * START_SHARE))), self._seed)
        measured = {point: value for point, value in self._values.items() if value is not None}
        if not measured:
            return [point for point in self._grid.random_sample(2 * self.budget, self._seed) if point not in self._values][: min(left, 6)]
        promise = self._promise(measured)
        best = sorted((point for point in promise if promise[point] > -MARGIN), key=lambda point: -promise[point])
        return best[: min(left, max(4, round(self.budget * _ROUND_SHARE)))]

    def _promise(self, measured: Mapping[Point, Value]) -> dict[Point, float]:
        """How far above the front (below: negative) unmeasured points are expected, in logarithms; more where less is known."""
        on_front = front(measured)
        heights = [(math.log(measured[point].x), math.log(measured[point].y)) for point in on_front]
        estimate = _Estimate(self._grid, measured, [point for point, value in self._values.items() if value is None])
        near = {other for point in on_front for other in self._grid.neighbours(point)}
        cliffs = set(self._cliff_middles(measured, set(on_front)))
        candidates = dict.fromkeys([*near, *cliffs, *self._some_points()])
        promise = {}
        for point in candidates:
            if point in self._values:
                continue
            x, y, steps, unfit = estimate.at(point)
            above = min(max(x - fx, y - fy) for fx, fy in heights) - UNFIT * unfit
            promise[point] = above + UNCERTAINTY * steps if point not in cliffs else max(above, 0.0) + UNCERTAINTY * steps
        return promise

    def _some_points(self) -> Iterable[Point]:
        if self._grid.size <= _ESTIMATED:
            return self._grid.points()
        return self._grid.random_sample(_ESTIMATED, random.Random(f"{self._seed}/{len(self._values)}").getrandbits(32))

    def _cliff_middles(self, measured: Mapping[Point, Value], on_front: set[Point]) -> Iterable[Point]:
        """Middles between a point of the front and the next measured one along an ordered axis, where a cliff lies between."""
        for number, axis in enumerate(self._grid.axes):
            if not axis.ordered:
                continue
            lines: dict[Point, list[int]] = {}
            for point in measured:
                lines.setdefault((*point[:number], -1, *point[number + 1 :]), []).append(point[number])
            for line, places in lines.items():
                places.sort()
                for low, high in pairwise(places):
                    if high - low < 2:
                        continue
                    a, b = ((*line[:number], at, *line[number + 1 :]) for at in (low, high))
                    if (a in on_front or b in on_front) and _cliff(measured[a], measured[b]):
                        middle = (*line[:number], (low + high) // 2, *line[number + 1 :])
                        if self._grid.allowed(middle):
                            yield middle


def _cliff(a: Value, b: Value) -> bool:
    """Whether one is worse by more than CLIFF in one figure and no better in the other."""
    worse, better = (a, b) if a.x <= b.x else (b, a)
    return worse.y <= better.y and (better.x > CLIFF * worse.x or better.y > CLIFF * worse.y)


class _Estimate:
    """What unmeasured points are expected to measure: a sum of effects, corrected by the nearest measured points."""

    def __init__(self, grid: Grid, measured: Mapping[Point, Value], unfit: Iterable[Point]) -> None:
        self._axes = grid.axes
        self._steps = [_step_table(axis) for axis in grid.axes]
        self._points = list(measured)
        logs = [(math.log(value.x), math.log(value.y)) for value in measured.values()]
        self._models = [self._effects([pair[side] for pair in logs]) for side in (0, 1)]
        self._known: list[tuple[Point, tuple[float, float] | None]] = [(point, None) for point in unfit]
        for point, (x, y) in zip(self._points, logs, strict=True):
            self._known.append((point, (x - self._sum(0, point), y - self._sum(1, point))))

    def _effects(self, values: list[float]) -> tuple[float, list[list[float]]]:
        """Mean, and the effect of every axis value: in turn set to what the others leave, drawn towards zero where seldom seen."""
        mean = sum(values) / len(values)
        effects = [[0.0] * len(axis.values) for axis in self._axes]
        rest = [value - mean for value in values]
        for _ in range(_EFFECT_PASSES):
            for number, of_axis in enumerate(effects):
                sums, counts = [0.0] * len(of_axis), [0] * len(of_axis)
                for point, left in zip(self._points, rest, strict=True):
                    sums[point[number]] += left + of_axis[point[number]]
                    counts[point[number]] += 1
                fresh = [total / (count + 0.5) for total, count in zip(sums, counts, strict=True)]
                for index, point in enumerate(self._points):
                    rest[index] += of_axis[point[number]] - fresh[point[number]]
                effects[number] = fresh
        return mean, effects

    def _sum(self, side: int, point: Point) -> float:
        mean, effects = self._models[side]
        return mean + sum(of_axis[at] for of_axis, at in zip(effects, point, strict=True))

    def at(self, point: Point) -> tuple[float, float, float, float]:
        """Logarithms of both figures; steps to the nearest measured point; how much of what is near does not count, from 0 to 1."""
        fit, unfit, dx, dy, nearest = 1e-9, 0.0, 0.0, 0.0, math.inf
        rows = [table[at] for table, at in zip(self._steps, point, strict=True)]
        for other, miss in self._known:
            steps = 0.0
            for row, at in zip(rows, other, strict=True):
                steps += row[at]
            weight = math.exp(-_FADING * steps)
            if miss is None:
                unfit += weight
                continue
            fit += weight
            dx += weight * miss[0]
            dy += weight * miss[1]
            if steps < nearest:
                nearest = steps
        trust = 1.0 if nearest < 3 else 3 / nearest  # far away the correction means little
        return self._sum(0, point) + trust * dx / fit, self._sum(1, point) + trust * dy / fit, nearest, unfit / (fit + unfit)


def _step_table(axis: Axis) -> list[list[float]]:
    """Steps between the values of an axis."""
    places = range(len(axis.values))
    return [[abs(i - j) if axis.ordered else _OTHER_STEPS * (i != j) for j in places] for i in places]
