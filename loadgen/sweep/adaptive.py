"""Finding the front with few of the grid's configurations.

It starts from a spread sample. Then, in rounds, it measures

- the middle between two measured values of an ordered axis where a cliff lies between a point of the front and the next one: one is worse
  in one figure by more than `CLIFF` times and not better in the other, so that the last good value is somewhere between;
- the points that are likeliest on the front: from the measured ones `Estimate` says what every other is expected to measure and how
  uncertain that is, hence how likely nothing measured dominates it. Much may be expected of a point (beside the front, or where what
  differs helped elsewhere), or little be known of it.

The estimate is for the order only; every point of the front is a measured one. When no point has a chance any more, or the budget is
spent, the search ends.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import pairwise

from loadgen.sweep.estimate import Estimate
from loadgen.sweep.grid import Grid, Point
from loadgen.sweep.objective import Value, front

START_SHARE = 0.2  # of the budget, for the first sample
CLIFF = 1.3
NO_CHANCE = 0.002  # to be on the front: not worth a run
_ROUND_SHARE = 0.04  # of the budget, in one round
_WHOLE = 2_000  # points of the largest grid of which every point is estimated, in about 30 s of a search; of a larger one, in each round,
_ESTIMATED = 600  # so many points are
_KNOWN = 200  # from so many measured ones


class AdaptiveSearch:
    """Ask it for points with `next`, tell it what they measured; it has ended when it asks for none."""

    def __init__(self, grid: Grid, budget: int, seed: int = 0) -> None:
        self._grid = grid
        self.budget = budget
        self._seed = seed
        self._values: dict[Point, Value | None] = {}  # None: cannot run, or does not keep an objective
        self._whole = Estimate(grid, grid.points()) if grid.size <= _WHOLE else None
        self._told = 0  # values that it knows

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
        chances = self._estimate(measured).chances()
        middles = set(self._cliff_middles(measured))
        best = sorted((point for point in chances if chances[point] > NO_CHANCE), key=lambda point: (point not in middles, -chances[point]))
        return best[: min(left, max(4, round(self.budget * _ROUND_SHARE)))]

    def _estimate(self, measured: Mapping[Point, Value]) -> Estimate:
        if self._whole is None:
            return self._partial_estimate(measured)
        for point in list(self._values)[self._told :]:
            self._whole.tell(point, self._values[point])
        self._told = len(self._values)
        return self._whole

    def _partial_estimate(self, measured: Mapping[Point, Value]) -> Estimate:
        """Of a large grid: the points beside the front and random others, from the measured ones nearest to the front and random others."""
        rng = random.Random(f"{self._seed}/{len(self._values)}")
        on_front, known = front(measured), list(self._values)
        if len(known) > _KNOWN:
            distance = {point: min(self._grid.distance(point, other) for other in on_front) for point in known}
            known.sort(key=distance.__getitem__)
            known = known[: _KNOWN // 2] + rng.sample(known[_KNOWN // 2 :], _KNOWN - _KNOWN // 2)
        near = [other for point in on_front for other in self._grid.neighbours(point)]
        some = self._grid.random_sample(_ESTIMATED + len(self._values), rng.getrandbits(32))
        candidates = [point for point in dict.fromkeys([*near, *some]) if point not in self._values]
        estimate = Estimate(self._grid, [*known, *candidates[:_ESTIMATED]])
        for point in known:
            estimate.tell(point, self._values[point])
        return estimate

    def _cliff_middles(self, measured: Mapping[Point, Value]) -> Iterable[Point]:
        """Middles between a point of the front and the next measured one along an ordered axis, where a cliff lies between."""
        on_front = set(front(measured))
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
