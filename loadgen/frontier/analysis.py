"""All that the table, the report and the images show of one set of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.frontier.cliffs import LOAD_AXES, Cliff, distinct, find_cliffs, series_along
from loadgen.frontier.factors import Expansion
from loadgen.frontier.metrics import CHARTED, METRICS, Metric
from loadgen.frontier.objectives import Objective, broken
from loadgen.frontier.pareto import front
from loadgen.frontier.points import Point, Points, is_number
from loadgen.results import Scalar

_KIND = ("topology", "profile", "name", "pd", "accelerator", "model", "tp", "ep", "policy", "quantization", "weights")  # what a series is
_MOST_SERIES = 12


@dataclass(slots=True)
class Analysis:
    """Points with their front in one pair of figures, and what was found along the way."""

    points: Points
    x: Metric
    y: Metric
    objectives: list[Objective]
    series: str | None  # axis whose values are drawn apart
    along: str | None  # numeric axis whose neighbours a thin line joins
    cliffs: list[Cliff]
    expansion: Expansion | None = None

    def front(self, points: Sequence[Point] | None = None, x: Metric | None = None, y: Metric | None = None) -> list[Point]:
        """The points that none dominates, by growing x; of all points, or of those given. Objectives do not count."""
        x, y = x or self.x, y or self.y
        points = self.points.points if points is None else points
        return [points[index] for index in front([coordinates(point, x, y) for point in points], x.higher, y.higher)]

    def front_within(self, x: Metric | None = None, y: Metric | None = None) -> list[Point]:
        """The front of the points that keep every objective."""
        return self.front([point for point in self.points.points if not broken(point, self.objectives)], x, y)

    def by_series(self) -> dict[Scalar, list[Point]]:
        """The points of each value of the series axis; all under None without one."""
        if self.series is None:
            return {None: self.points.points}
        return {
            value: [point for point in self.points.points if point.arm.get(self.series) == value]
            for value in self.points.values(self.series)
        }

    def lines(self) -> list[list[Point]]:
        """Neighbours along the `along` axis, one list for each setting of the others."""
        return series_along(self.points, self.along) if self.along else []


def coordinates(point: Point, x: Metric, y: Metric) -> tuple[float, float] | None:
    """Where a point stands; None where a figure was not measured."""
    at, up = point.value(x.key), point.value(y.key)
    return None if at is None or up is None else (at, up)


def analyse(
    points: Points,
    x: Metric,
    y: Metric,
    objectives: list[Objective] | None = None,
    series: str | None = None,
    cliff_factor: float = 1.5,
) -> Analysis:
    """Find the cliffs, and choose series and lines where none are given."""
    along = load_axis(points, without=series)
    chosen = series if series is not None else series_axis(points, without=along)
    found = Analysis(points, x, y, objectives or [], chosen, along, [])
    fronts = [point.id for members in found.by_series().values() for point in found.front(members)]
    found.cliffs = distinct(find_cliffs(points, cliff_factor), {point.id for point in found.front_within()}, set(fronts))
    return found


def load_axis(points: Points, without: str | None = None) -> str | None:
    """The numeric axis that lines follow: the load where it varies, else the one with the most values."""
    numeric = [axis for axis in points.axes if axis != without and all(is_number(point.arm.get(axis)) for point in points.points)]
    loads = [axis for name in LOAD_AXES for axis in numeric if axis.rpartition(".")[2] == name]
    return loads[0] if loads else max(numeric, key=lambda axis: len(points.values(axis)), default=None)


def series_axis(points: Points, without: str | None = None) -> str | None:
    """The axis that tells the series: what a person would name a configuration by, with few enough values for a legend."""
    few = [axis for axis in points.axes if axis != without and len(points.values(axis)) <= _MOST_SERIES]
    named = [axis for name in _KIND for axis in few if axis.rpartition(".")[2] == name]
    words = [axis for axis in few if not all(is_number(value) for value in points.values(axis))]
    return next(iter([*named, *words, *few]), None)


def charted(points: Points) -> list[Metric]:
    """The figures that some point has, of those worth an axis."""
    return [METRICS[key] for key in CHARTED if any(point.value(key) is not None for point in points.points)]


def to_json(analysis: Analysis) -> dict[str, Any]:
    """The fronts, cliffs and factors as plain data."""
    points, within = analysis.points, {point.id for point in analysis.front_within()}
    on_front = {point.id for point in analysis.front()}
    fewest, most = points.seeds
    return {
        "trace": points.trace,
        "runs": points.runs,
        "configurations": len(points.points),
        "seeds": {"fewest": fewest, "most": most},
        "x": analysis.x.key,
        "y": analysis.y.key,
        "objectives": [str(objective) for objective in analysis.objectives],
        "constant": points.constant,
        "points": [
            {
                "id": point.id,
                "arm": point.arm,
                "gpus": point.gpus,
                "seeds": len(point.runs),
                "front": point.id in on_front,
                "front_within_objectives": point.id in within,
                "breaks": [str(objective) for objective in broken(point, analysis.objectives)],
                "figures": {key: value for key in METRICS if (value := point.value(key)) is not None},
            }
            for point in points.points
        ],
        "cliffs": [
            {
                "axis": cliff.axis,
                "from": cliff.step[0],
                "to": cliff.step[1],
                "before": cliff.before.id,
                "after": cliff.after.id,
                "factor": cliff.factor,
                "changes": [{"figure": c.key, "before": c.before, "after": c.after, "factor": c.factor} for c in cliff.changes],
                "cause": cliff.cause.kind,
                "text": cliff.cause.text,
                "likewise": cliff.likewise,
            }
            for cliff in analysis.cliffs
        ],
        "failed": [{"arm": run.arm, "seed": run.seed, "error": run.error} for run in points.failed],
        "expansion": _expansion_json(analysis.expansion) if analysis.expansion else None,
    }


def _expansion_json(found: Expansion) -> dict[str, Any]:
    return {
        "metric": found.metric.key,
        "baseline": found.baseline.id,
        "best": found.best.id,
        "at": {found.at[0].key: found.at[1]} if found.at else None,
        "total": found.total,
        "factors": [
            {
                "name": factor.name,
                "value": factor.value,
                "low": factor.low,
                "high": factor.high,
                "changes": [{"axis": axis, "from": was, "to": now} for axis, was, now in factor.changes],
            }
            for factor in found.factors
        ],
        "orders": {"measured": found.orders, "possible": found.possible_orders},
        "missing": found.missing,
    }
