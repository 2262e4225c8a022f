"""What a sweep looks for: two figures of a run, and the objectives that a configuration must keep to count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loadgen.frontier.metrics import METRICS
from loadgen.frontier.objectives import Objective as Slo
from loadgen.frontier.objectives import broken
from loadgen.frontier.pareto import front as pareto_front
from loadgen.frontier.points import Point as MeasuredPoint
from loadgen.results import Run

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Value:
    """A configuration's two figures, medians over its seeds, turned so that more is better and that ratios keep their meaning."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Goal:
    """The figures that make the front, and the objectives within which it lies."""

    x: str = "user_tokens_per_s"
    y: str = "output_per_gpu"
    slo: tuple[Slo, ...] = ()

    def value(self, runs: Sequence[Run]) -> Value | None:
        """Of the runs of one configuration; None where it cannot run, measured nothing or does not keep an objective."""
        usable = [run for run in runs if run.error is None]
        if not usable:
            return None
        point = MeasuredPoint(0, usable[0].arm, usable)
        x, y = point.value(self.x), point.value(self.y)
        if x is None or y is None or x <= 0 or y <= 0 or broken(point, list(self.slo)):
            return None
        return Value(x if METRICS[self.x].higher else 1 / x, y if METRICS[self.y].higher else 1 / y)


def front(values: Mapping[Key, Value]) -> list[Key]:
    """The keys of the values that none dominates, by growing x. Equal ones are all kept."""
    keys = list(values)
    return [keys[index] for index in pareto_front([(values[key].x, values[key].y) for key in keys], True, True)]


def hypervolume(values: Iterable[Value]) -> float:
    """The area that these values dominate, from zero."""
    known = dict(enumerate(values))
    area, reached = 0.0, 0.0
    for key in front(known):
        area += (known[key].x - reached) * known[key].y
        reached = known[key].x
    return area
