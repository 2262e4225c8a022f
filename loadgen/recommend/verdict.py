"""Whether a simulated fleet keeps every tier's objectives, and by how much it does or does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from loadgen.frontier.metrics import METRICS
from loadgen.frontier.points import Spread
from loadgen.recommend.request import TierName, TierWish
from loadgen.results import Run

_MOST_ERRORS = 0.01  # share of the requests


@dataclass(frozen=True, slots=True)
class Verdict:
    """One objective of one tier. `ratio` is how many times worse than the bound the figure is: at most 1 keeps it."""

    tier: str
    key: str
    relation: str
    bound: float
    value: float | None
    ratio: float

    @property
    def kept(self) -> bool:
        return self.ratio <= 1.0


def judge(wishes: Mapping[TierName, TierWish], tiers: Iterable[TierName], runs: Sequence[Run]) -> list[Verdict]:
    """Of the medians over the runs, the worst first. Requests that fail count as an objective of their own."""
    verdicts = []
    for tier in tiers:
        for objective in wishes[tier].objectives:
            spread = spread_of(runs, objective.key, tier)
            value = spread.median if spread else None
            if value is None or value < 0 or (objective.relation == ">=" and value == 0):
                ratio = math.inf
            else:
                ratio = value / objective.bound if objective.relation == "<=" else objective.bound / value
            verdicts.append(Verdict(tier, objective.key, objective.relation, objective.bound, value, ratio))
    asked = sum(run.figures.requests + run.figures.errors for run in runs)
    failed = sum(run.figures.errors for run in runs) / asked if asked else 1.0
    if failed > _MOST_ERRORS:
        verdicts.append(Verdict("", "share of failed requests", "<=", _MOST_ERRORS, failed, math.inf))
    return sorted(verdicts, key=lambda verdict: -verdict.ratio)


def spread_of(runs: Sequence[Run], key: str, tier: str | None = None) -> Spread | None:
    """A figure's median, lowest and highest over the runs, of one tier or of all; None where no run measured it."""
    of = METRICS[key].of
    measured = [value for run in runs if (value := of(run if tier is None else of_tier(run, tier))) is not None]
    return Spread(median(measured), min(measured), max(measured)) if measured else None


def of_tier(run: Run, tier: str) -> Run:
    """The run with the figures of one tier alone; GPUs and price stay those of the whole fleet."""
    return replace(run, figures=run.tiers[tier])
