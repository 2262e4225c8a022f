"""The cheapest pools for a set of tiers: which configuration, with which batch limits, and how many workers of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from threading import Lock

from loadgen.frontier.objectives import Objective
from loadgen.recommend.candidates import Candidate
from loadgen.recommend.demand import Demand, workers_needed
from loadgen.recommend.request import Request, TierName
from loadgen.recommend.simulations import Simulations
from loadgen.recommend.verdict import Verdict, judge
from loadgen.results import Run
from loadgen.simulate.fleet import FleetSpec, PoolSpec
from loadgen.simulate.load import Load

NEAR = 1.25  # configurations that cost up to this much more than the best are counted out too, as runners-up


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One pool, simulated alone under the load of its tiers. `prefill` of its workers only prefill, where it is disaggregated."""

    candidate: Candidate
    count: int
    runs: tuple[Run, ...]
    verdicts: tuple[Verdict, ...]
    prefill: int = 0

    @property
    def kept(self) -> bool:
        return all(verdict.kept for verdict in self.verdicts)

    @property
    def worst(self) -> Verdict | None:
        """The objective that is closest to being broken, or the most broken; None where there are none."""
        return self.verdicts[0] if self.verdicts else None

    @property
    def ratio(self) -> float:
        return self.verdicts[0].ratio if self.verdicts else 0.0

    @property
    def cost(self) -> float:
        return self.count * self.candidate.price

    @property
    def gpus(self) -> int:
        return self.count * self.candidate.profile.gpu_count

    @property
    def order(self) -> tuple[float, float, str]:
        """Cheapest first, of equally cheap ones that with most room."""
        return (round(self.cost, 6), self.ratio, self.candidate.name)


@dataclass(slots=True)
class Found:
    """What was found for a set of tiers: every configuration's cheapest pool that keeps the objectives, cheapest first."""

    tiers: tuple[TierName, ...]
    load: Load
    options: list[Trial] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)  # all that was simulated
    disaggregated: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        return self.options[0] if self.options else None


class PoolSearch:
    """Searches for one set of tiers. `on_step` is called when a configuration has been decided."""

    def __init__(
        self,
        request: Request,
        tiers: tuple[TierName, ...],
        candidates: Sequence[Candidate],
        demand: Demand,
        simulations: Simulations,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._request = request
        self._tiers = tiers
        self._candidates = candidates
        self._demand = demand
        self._simulations = simulations
        self._on_step = on_step
        self._load = request.load(tiers)
        self._most = request.search.max_workers
        self._found = Found(tiers, self._load)
        self._best_cost = math.inf
        self._lock = Lock()

    def run(self) -> Found:
        found = self._found
        with ThreadPoolExecutor(self._simulations.jobs) as threads:
            smallest = list(threads.map(self._smallest, self._shortlist()))
        options = sorted((trial for trial in smallest if trial is not None), key=lambda trial: trial.order)
        options = [trial for trial in options if trial.cost <= NEAR * options[0].cost]
        if options:
            options[0] = self._worthwhile(self._refine(options[0]))
            options.sort(key=lambda trial: trial.order)
            found.disaggregated = self._disaggregate(options[0])
        found.options = options
        return found

    # --- what to simulate ---

    def _shortlist(self) -> list[tuple[Candidate, int]]:
        """Configurations with an estimate of the workers they need, by estimated cost; those of no estimate last."""
        objectives = self._objectives()
        estimated = []
        for candidate in self._candidates:
            count = workers_needed(candidate.profile, self._demand, self._load, objectives, self._most)
            cost = math.inf if count is None else count * candidate.price
            estimated.append((cost, candidate.price, candidate.name, candidate, count or self._most))
        estimated.sort(key=lambda entry: entry[:3])
        return [(candidate, count) for *_, candidate, count in estimated[: self._request.search.shortlist]]

    def _objectives(self) -> list[Objective]:
        return [objective for tier in self._tiers for objective in self._request.tiers[tier].objectives]

    # --- how many workers ---

    def _smallest(self, about: tuple[Candidate, int]) -> Trial | None:
        """The smallest pool of a configuration that keeps all objectives, unless another is far cheaper.

        More workers are taken to be no worse. What a pool of few workers costs in simulation grows with how overloaded it is, so the
        search begins at an estimate and gallops.
        """
        candidate, estimate = about
        trial = self._gallop(candidate, estimate)
        if trial is not None:
            with self._lock:
                self._best_cost = min(self._best_cost, trial.cost)
        self._on_step()
        return trial

    def _gallop(self, candidate: Candidate, estimate: int) -> Trial | None:
        with self._lock:
            affordable = NEAR * self._best_cost / candidate.price
        most = self._most if math.isinf(affordable) else min(self._most, int(affordable + 1e-9))
        if most < 1:
            return None
        fails, keeps = 0, most + 1
        kept: Trial | None = None
        probe, step = min(estimate, most), 1
        while keeps - fails > 1:
            trial = self.trial(candidate, probe)
            if trial.kept:
                keeps, kept = probe, trial
            else:
                fails = probe
            if kept is not None and fails:
                probe = (fails + keeps) // 2
            elif kept is None:
                # the farther from its objectives, the larger the step
                step = max(2 * step, probe // 4) if trial.ratio < 4 else max(2 * step, probe)
                probe = min(most, probe + step)
            else:
                step = max(2 * step, probe // 5)
                probe = max(1, probe - step)
        return kept

    def trial(self, candidate: Candidate, count: int, prefill: int = 0) -> Trial:
        """Simulate a pool of `count` workers, of which `prefill` only prefill and the others only decode where it is above 0."""
        if prefill:
            sides = (("prefill", prefill), ("decode", count - prefill))
            pools = [
                PoolSpec(name=role, count=workers, profile=candidate.profile.model_copy(update={"role": role})) for role, workers in sides
            ]
        else:
            pools = [PoolSpec(count=count, profile=candidate.profile)]
        runs = self._simulations.run(fleet_of(self._request, pools), self._load)
        trial = Trial(candidate, count, tuple(runs), tuple(judge(self._request.tiers, self._tiers, runs)), prefill)
        with self._lock:
            self._found.trials.append(trial)
        return trial

    # --- with what limits ---

    def _refine(self, best: Trial) -> Trial:
        """Other batch limits, each on its own, where they save a worker; the first values stay where they save none."""
        search = self._request.search
        axes = {
            "max_num_seqs": search.max_num_seqs,
            "max_num_batched_tokens": search.max_num_batched_tokens,
            "long_prefill_token_threshold": search.long_prefill_token_threshold,
        }
        while best.count > 1:
            closest = self.trial(best.candidate, best.count - 1)
            for name, values in axes.items():
                for value in values:
                    if closest.kept or getattr(closest.candidate.profile, name) == value:
                        continue
                    other = self.trial(closest.candidate.with_limits(**{name: value}), closest.count)
                    closest = min(closest, other, key=lambda trial: trial.ratio)
            if not closest.kept:
                break
            best = closest
        self._on_step()
        return best

    def _worthwhile(self, best: Trial) -> Trial:
        """More workers than the objectives need, where what tiers pay for the additional output exceeds their cost."""
        if not any(self._request.tiers[tier].pays_per_million_output for tier in self._tiers):
            return best
        while best.count < self._most:
            more = self.trial(best.candidate, min(self._most, max(best.count + 1, round(best.count * 1.2))))
            if not more.kept or self._profit(more) <= self._profit(best):
                break
            best = more
        return best

    def _profit(self, trial: Trial) -> float:
        return value_per_hour(self._request, self._tiers, trial.runs) - trial.cost

    # --- on two sides ---

    def _disaggregate(self, best: Trial) -> list[Trial]:
        """The same number of workers, and one less, split into prefill and decode workers."""
        splits = dict.fromkeys(
            (count, min(count - 1, max(1, round(count * prefill / (prefill + decode)))))
            for count in (best.count, best.count - 1)
            if count > 1
            for prefill, decode in (map(int, ratio.split(":")) for ratio in self._request.search.disaggregated)
        )
        trials = [self.trial(best.candidate, count, prefill) for count, prefill in splits]
        self._on_step()
        return sorted(trials, key=lambda t: (not t.kept, t.cost, t.ratio) if t.kept else (not t.kept, t.ratio, t.cost))


def fleet_of(request: Request, pools: list[PoolSpec]) -> FleetSpec:
    """A fleet set up as the request asks."""
    return FleetSpec(pools=pools, policy=request.policy, knowledge=request.knowledge, overhead_s=request.overhead_s)


def value_per_hour(request: Request, tiers: Sequence[TierName], runs: Sequence[Run]) -> float:
    """What the tiers' output is worth per hour, by what they pay."""
    total = 0.0
    for tier in tiers:
        if pays := request.tiers[tier].pays_per_million_output:
            per_s = [run.tiers[tier].output_tokens / run.figures.duration_s for run in runs if run.figures.duration_s]
            total += pays * median(per_s) * 3600 / 1e6 if per_s else 0.0
    return total
