"""The grid that a sweep's axes span: points, their neighbours, and well spread samples of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from loadgen.results import Scalar

Point = tuple[int, ...]
"""A configuration: for every axis the position of its value."""

_SAMPLED_FROM = 4_000  # candidates from which a spread sample is drawn: its cost grows with their number


@dataclass(frozen=True, slots=True)
class Axis:
    """What is varied. The values of an ordered axis are neighbours in their order; those of any other are all neighbours."""

    name: str
    values: tuple[Scalar, ...]
    ordered: bool

    @classmethod
    def of(cls, name: str, values: Sequence[Scalar]) -> Axis:
        """Numbers are put in order; other values are kept as they are."""
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return cls(name, tuple(sorted(values)), ordered=True)  # type: ignore[type-var]
        return cls(name, tuple(values), ordered=False)


class Grid:
    """All combinations of the axes' values but those that `exclude` names (a mapping axis -> value excludes what has all its values)."""

    def __init__(self, axes: Sequence[Axis], exclude: Sequence[Mapping[str, Scalar]] = ()) -> None:
        self.axes = tuple(axes)
        self._exclude = [dict(rule) for rule in exclude]

    @property
    def size(self) -> int:
        """Points before exclusion."""
        return math.prod(len(axis.values) for axis in self.axes)

    def arm(self, point: Point) -> dict[str, Scalar]:
        """Axis -> value."""
        return {axis.name: axis.values[at] for axis, at in zip(self.axes, point, strict=True)}

    def allowed(self, point: Point) -> bool:
        if not self._exclude:
            return True
        arm = self.arm(point)
        return not any(all(arm[name] == value for name, value in rule.items()) for rule in self._exclude)

    def points(self) -> Iterator[Point]:
        """The points, last axis fastest."""
        return filter(self.allowed, itertools.product(*(range(len(axis.values)) for axis in self.axes)))

    def neighbours(self, point: Point) -> Iterator[Point]:
        """Points one step away: along an ordered axis the values beside it, along any other every other value."""
        for number, axis in enumerate(self.axes):
            at = point[number]
            steps = (at - 1, at + 1) if axis.ordered else range(len(axis.values))
            for other in steps:
                if 0 <= other < len(axis.values) and other != at:
                    moved = (*point[:number], other, *point[number + 1 :])
                    if self.allowed(moved):
                        yield moved

    def distance(self, a: Point, b: Point) -> float:
        """How different two points are: each axis counts its share of its length, or 1 where it is not ordered and differs."""
        total = 0.0
        for axis, i, j in zip(self.axes, a, b, strict=True):
            if i != j:
                total += abs(i - j) / (len(axis.values) - 1) if axis.ordered else 1.0
        return total

    def random_sample(self, count: int, seed: int = 0) -> list[Point]:
        """`count` different points in random order; all where there are no more."""
        rng = random.Random(seed)
        if self.size <= max(_SAMPLED_FROM, 4 * count):
            points = list(self.points())
            rng.shuffle(points)
            return points[:count]
        found: dict[Point, None] = {}
        for _ in range(100 * count):  # where nearly all is excluded it stays short
            point = tuple(rng.randrange(len(axis.values)) for axis in self.axes)
            if self.allowed(point):
                found[point] = None
            if len(found) == count:
                break
        return list(found)

    def spread_sample(self, count: int, seed: int = 0) -> list[Point]:
        """`count` points far from each other: each is the farthest from those before (of a random 4,000 where the grid is larger)."""
        candidates = self.random_sample(_SAMPLED_FROM, seed)
        if len(candidates) <= count:
            return candidates
        corner = [0 if axis.ordered else at for axis, at in zip(self.axes, candidates[0], strict=True)]
        chosen = [min(candidates, key=lambda point: self.distance(point, tuple(corner)))]
        nearest = [self.distance(point, chosen[0]) for point in candidates]
        while len(chosen) < count:
            farthest = max(range(len(candidates)), key=nearest.__getitem__)
            chosen.append(candidates[farthest])
            nearest = [min(now, self.distance(point, chosen[-1])) for now, point in zip(nearest, candidates, strict=True)]
        return chosen
