"""Pareto fronts: the points that no other point beats. Exact; nothing is smoothed or interpolated."""

from __future__ import annotations

from collections.abc import Sequence


def dominates(a: tuple[float, float], b: tuple[float, float], x_higher: bool, y_higher: bool) -> bool:
    """Whether `a` is at least as good as `b` in both figures and better in one."""
    ax, ay = _oriented(a, x_higher, y_higher)
    bx, by = _oriented(b, x_higher, y_higher)
    return ax >= bx and ay >= by and (ax > bx or ay > by)


def front(values: Sequence[tuple[float, float] | None], x_higher: bool, y_higher: bool) -> list[int]:
    """Indices of the points that none dominates, by growing x. Equal points are all in the front; None is in none.

    O(n log n): walk from the best x and keep what is better in y than all seen so far.
    """
    points = [(*_oriented(value, x_higher, y_higher), index) for index, value in enumerate(values) if value is not None]
    points.sort(key=lambda point: (-point[0], -point[1], point[2]))
    kept: list[tuple[float, float, int]] = []
    for x, y, index in points:
        if not kept or y > kept[-1][1] or (x, y) == kept[-1][:2]:
            kept.append((x, y, index))
    indices = [index for _, _, index in kept]
    return indices[::-1] if x_higher else indices


def step_shape(x_higher: bool) -> str:
    """How a front's line steps from point to point (plotly's names): through what was reached by one of them, never between them.

    Growing x is worse where less is better, so a level holds until the next point (`hv`), and the other way round.
    """
    return "vh" if x_higher else "hv"


def _oriented(value: tuple[float, float], x_higher: bool, y_higher: bool) -> tuple[float, float]:
    return (value[0] if x_higher else -value[0], value[1] if y_higher else -value[1])
