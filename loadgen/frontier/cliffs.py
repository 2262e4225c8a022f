"""Cliffs: a small step on one axis that costs much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, replace
from itertools import pairwise

from loadgen.frontier.causes import Cause, name_cause
from loadgen.frontier.metrics import METRICS
from loadgen.frontier.points import Point, Points, arm_key, is_number, order
from loadgen.frontier.wording import arm_text, factor, number, setting, short
from loadgen.results import Scalar

LOAD_AXES = ("live_sessions", "live_sessions_per_gpu", "concurrency", "rate", "speedup")  # by their last name
_TTFT_FLOOR_S = 0.1  # a rise by less is seen by nobody
_NOTICED = 1.1


@dataclass(frozen=True, slots=True)
class Change:
    """A figure that got worse, by how much."""

    key: str
    before: float
    after: float
    factor: float  # times worse, over 1

    def __str__(self) -> str:
        return f"{METRICS[self.key].label} {number(self.before)} -> {number(self.after)} ({factor(self.factor)} worse)"


@dataclass(slots=True)
class Cliff:
    """A fall from `before` to `after`, neighbours on `axis` and equal on every other."""

    axis: str
    before: Point
    after: Point
    changes: list[Change]  # the worst first
    cause: Cause
    likewise: int = 0  # other configurations that fall at the same step for the same reason
    beside: bool = False  # starts at a point of the front

    @property
    def factor(self) -> float:
        return self.changes[0].factor

    @property
    def step(self) -> tuple[Scalar, Scalar]:
        return self.before.arm[self.axis], self.after.arm[self.axis]

    def title(self, points: Points) -> str:
        return f"{short(self.axis, points.axes)} {setting(self.step[0])} -> {setting(self.step[1])}"

    def where(self, points: Points) -> str:
        """The axes that stay the same."""
        return arm_text(self.before.arm, [axis for axis in points.axes if axis != self.axis])


def find_cliffs(points: Points, limit: float = 1.5) -> list[Cliff]:
    """Every cliff between neighbouring values of a numeric axis, the steepest first.

    Both directions are looked at (a larger batch, less KV memory), but of the load only more. Going from one neighbour to the other, it is
    a cliff where, by more than `limit`,

    - output tokens/s/GPU fall, and users feel it (TTFT, E2E or streaming get worse by a tenth): fewer tokens because less was asked of
      each GPU is none; or
    - streaming slows down or TTFT p90 (p50 where there is no p90) rises, beyond what throughput per GPU gained in exchange, and more than
      the axis itself changed: twice the sessions at half the speed each is a fair share, not a cliff.

    The seeds' ranges of the figure must not overlap. `limit` is a ratio over 1.
    """
    cliffs = []
    for axis in points.axes:
        for series in series_along(points, axis):
            for low, high in pairwise(series):
                for before, after in ((low, high),) if axis.rpartition(".")[2] in LOAD_AXES else ((low, high), (high, low)):
                    changes = _changes(before, after, axis, limit)
                    if changes:
                        cliffs.append(Cliff(axis, before, after, changes, name_cause(before, after)))
    return sorted(cliffs, key=lambda cliff: -cliff.factor)


def distinct(cliffs: list[Cliff], front: Set[int] = frozenset(), fronts: Set[int] = frozenset()) -> list[Cliff]:
    """One of the cliffs at one step of one axis with one kind of cause, with the number of the others.

    It is the steepest of those that start at a point of the front (ids), where one would stand; else of one of the series' `fronts`; else
    of all. Cliffs beside the front come first, then the steepest.
    """
    groups: dict[tuple[object, ...], list[Cliff]] = defaultdict(list)
    for cliff in cliffs:
        groups[(cliff.axis, *cliff.step, cliff.cause.kind)].append(cliff)
    chosen = []
    for group in groups.values():
        one = max(group, key=lambda cliff: (cliff.before.id in front, cliff.before.id in fronts, cliff.factor))
        chosen.append(replace(one, likewise=len(group) - 1, beside=one.before.id in front))
    return sorted(chosen, key=lambda cliff: (not cliff.beside, -cliff.factor))


def series_along(points: Points, axis: str) -> list[list[Point]]:
    """The points that differ in `axis` alone, in its order: one list for each setting of the other axes. Only numeric values count."""
    series: dict[tuple[tuple[str, Scalar], ...], list[Point]] = defaultdict(list)
    for point in points.points:
        if is_number(point.arm.get(axis)):
            series[arm_key(point.arm, without=(axis,))].append(point)
    return [sorted(members, key=lambda point: order(point.arm[axis])) for members in series.values() if len(members) > 1]


def _changes(before: Point, after: Point, axis: str, limit: float) -> list[Change]:
    throughput = _ratio(before, after, "output_per_gpu")  # over 1: fell
    gained = max(1.0, 1 / throughput) if throughput else 1.0
    step = _step(before.arm[axis], after.arm[axis])
    changes = []
    if throughput is not None and throughput > limit and _apart(before, after, "output_per_gpu") and _felt(before, after):
        changes.append(_change(before, after, "output_per_gpu", throughput))
    for key in ("user_tokens_per_s", "ttft_p90_s" if after.value("ttft_p90_s") is not None else "ttft_p50_s"):
        ratio = _ratio(before, after, key)
        if ratio is None or ratio / gained <= limit or ratio <= step or not _apart(before, after, key):
            continue
        if key.startswith("ttft") and (after.value(key) or 0.0) - (before.value(key) or 0.0) < _TTFT_FLOOR_S:
            continue
        changes.append(_change(before, after, key, ratio))
    return sorted(changes, key=lambda change: -change.factor)


def _change(before: Point, after: Point, key: str, ratio: float) -> Change:
    return Change(key, before.value(key) or 0.0, after.value(key) or 0.0, ratio)


def _felt(before: Point, after: Point) -> bool:
    """Whether users were worse off too, with every seed. True where nothing that they feel was measured."""
    keys = ("ttft_p50_s", "ttft_p90_s", "e2e_p50_s", "e2e_p90_s", "user_tokens_per_s")
    ratios = {key: ratio for key in keys if (ratio := _ratio(before, after, key)) is not None}
    return not ratios or any(ratio > _NOTICED and _apart(before, after, key) for key, ratio in ratios.items())


def _ratio(before: Point, after: Point, key: str) -> float | None:
    """Times worse; None where a side was not measured or is 0."""
    was, now = before.value(key), after.value(key)
    if not was or not now:
        return None
    return was / now if METRICS[key].higher else now / was


def _apart(before: Point, after: Point, key: str) -> bool:
    """Whether no seed before the step was as bad as one after it."""
    was, now = before.spread(key), after.spread(key)
    assert was is not None and now is not None
    return was.low > now.high if METRICS[key].higher else was.high < now.low


def _step(before: Scalar, after: Scalar) -> float:
    """Times that the axis changed, over 1; 1 where it has no ratio (zero, signs)."""
    assert is_number(before) and is_number(after)
    small, large = sorted((float(before), float(after)))  # type: ignore[arg-type]
    return large / small if small > 0 else 1.0
