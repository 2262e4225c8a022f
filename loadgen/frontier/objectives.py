"""Service level objectives: bounds that a configuration's figures have to keep."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from loadgen.frontier.metrics import METRICS, FrontierError, metric
from loadgen.frontier.points import Point

_SLO = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=)\s*([-+0-9.e_]+)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Objective:
    """One bound, e.g. `ttft_p90_s<=5`. Of the median over the seeds; a figure that was not measured does not keep it."""

    key: str
    relation: Literal["<=", ">="]
    bound: float

    def holds(self, point: Point) -> bool:
        value = point.value(self.key)
        if value is None:
            return False
        return value <= self.bound if self.relation == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.key}{self.relation}{self.bound:g}"


def parse_objective(text: str) -> Objective:
    """`figure<=value` or `figure>=value`, in the figure's own unit. Raises FrontierError."""
    match = _SLO.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        key, relation, bound = match[1], match[2], float(match[3])
    except ValueError:
        raise FrontierError(f"{text!r} is not an objective; write e.g. ttft_p90_s<=5 or user_tokens_per_s>=30") from None
    if key not in METRICS:
        close = [name for name in METRICS if name.startswith(key)]
        if close:
            raise FrontierError(f"no figure is named {key!r}; did you mean {' or '.join(close)}?")
        metric(key)
    return Objective(key, "<=" if relation == "<=" else ">=", bound)


def broken(point: Point, objectives: list[Objective]) -> list[Objective]:
    """The objectives that a point does not keep."""
    return [objective for objective in objectives if not objective.holds(point)]
