"""From a request to a recommendation: search pools, choose a plan, simulate the whole fleet, and look at what is beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from loadgen.recommend.candidates import Candidate, Rejected, candidates
from loadgen.recommend.demand import Demand
from loadgen.recommend.plan import Plan, Pool, Tiers, exceeds, groups, plans, served_sets
from loadgen.recommend.request import Request, RequestError
from loadgen.recommend.search import Found, PoolSearch, Trial, fleet_of, value_per_hour
from loadgen.recommend.simulations import Simulations
from loadgen.recommend.verdict import Verdict, judge
from loadgen.results import Run
from loadgen.simulate.fleet import FleetSpec, PoolSpec
from loadgen.simulate.load import Load

_MOST_ADDED = 8  # workers that the whole fleet may need beyond what the single pools did
_NEIGHBOUR_SEEDS = 3


@dataclass(slots=True)
class Progress:
    """Where the search is. `share` is of configurations to decide, of which some take many simulations and some none."""

    doing: str
    share: float
    simulations: int
    elapsed_s: float

    @property
    def left_s(self) -> float | None:
        return self.elapsed_s / self.share - self.elapsed_s if self.share > 0.02 else None


@dataclass(frozen=True, slots=True, eq=False)
class Neighbour:
    """The recommended fleet with one worker more or less in one pool."""

    pool: str
    change: int
    cost: float
    verdicts: tuple[Verdict, ...]
    runs: tuple[Run, ...]

    @property
    def kept(self) -> bool:
        return all(verdict.kept for verdict in self.verdicts)


@dataclass(slots=True)
class Recommendation:
    """What is recommended, and from what. Without a plan, `closest` is what comes nearest and `over` the plan beyond the limits."""

    request: Request
    load: Load
    plan: Plan | None = None
    fleet: FleetSpec | None = None
    runs: list[Run] = field(default_factory=list)  # of the whole fleet, one for each seed
    verdicts: list[Verdict] = field(default_factory=list)
    exceeded: str | None = None  # a limit that the whole fleet exceeds, though its pools one by one did not
    neighbours: list[Neighbour] = field(default_factory=list)
    sharings: list[Plan] = field(default_factory=list)  # the best plan of every sharing, the best first
    found: dict[Tiers, Found] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    over: Plan | None = None
    closest: dict[Tiers, Trial] = field(default_factory=dict)
    simulations: int = 0
    wall_s: float = 0.0

    @property
    def value(self) -> float:
        """What the fleet's output is worth per hour, by what tiers pay."""
        return value_per_hour(self.request, self.plan.tiers, self.runs) if self.plan is not None else 0.0


def recommend(request: Request, jobs: int = 1, on_progress: Callable[[Progress], None] | None = None) -> Recommendation:
    """Search for the fleet. Deterministic for equal requests, whatever `jobs`.

    Raises TraceError, FleetError and RequestError (also where no configuration can serve the model).
    """
    with Simulations(request.read_sessions, jobs) as simulations:
        return _Recommender(request, simulations, on_progress or (lambda progress: None)).run()


class _Recommender:
    def __init__(self, request: Request, simulations: Simulations, on_progress: Callable[[Progress], None]) -> None:
        self._request = request
        self._simulations = simulations
        self._on_progress = on_progress
        self._started = perf_counter()
        self._steps_done = 0
        self._steps = 1
        self._doing = ""

    def run(self) -> Recommendation:
        request = self._request
        everything = tuple(request.tiers)
        made = Recommendation(request, request.load(everything))
        demand = Demand.of(self._simulations.sessions, made.load)
        fitting, made.rejected = candidates(request, demand.longest_tokens)
        if not fitting:
            reasons = "; ".join(f"{rejected.name}: {rejected.why}" for rejected in made.rejected[:3])
            raise RequestError(f"no configuration can serve {request.model} and this trace: {reasons}")
        wanted = groups(request)
        self._steps = len(wanted) * (min(request.search.shortlist, len(fitting)) + 2) + 2
        for group in wanted:
            self._begin(f"pools for {' + '.join(group)}")
            made.found[group] = PoolSearch(request, group, fitting, demand, self._simulations, self._step).run()
        made.sharings = plans(request, made.found)
        if made.sharings and (made.sharings[0].profit >= 0 or not _may_serve_nothing(request)):
            self._verify(made, made.sharings[0])
        else:
            self._explain(made, fitting, demand)
        self._steps_done = self._steps
        self._step()
        made.simulations, made.wall_s = self._simulations.done, perf_counter() - self._started
        return made

    def _begin(self, doing: str) -> None:
        self._doing = doing
        self._tell()

    def _step(self) -> None:
        self._steps_done = min(self._steps_done + 1, self._steps)
        self._tell()

    def _tell(self) -> None:
        share = self._steps_done / self._steps
        self._on_progress(Progress(self._doing, share, self._simulations.done, perf_counter() - self._started))

    # --- the whole fleet ---

    def _verify(self, made: Recommendation, plan: Plan) -> None:
        """Simulate all pools together with several seeds; where a median breaks an objective, its pool gets a worker more."""
        request = self._request
        made.load = request.load(plan.tiers)
        seeds = range(request.seeds)
        self._begin("the whole fleet")
        for _ in range(_MOST_ADDED):
            made.plan, made.fleet = plan, self._fleet(plan)
            made.runs = self._simulations.run(made.fleet, made.load, seeds)
            made.verdicts = judge(request.tiers, plan.tiers, made.runs)
            if all(verdict.kept for verdict in made.verdicts):
                break
            plan = _with_change(plan, _pool_of(plan, made.verdicts[0]), +1)
        made.exceeded = exceeds(request, made.plan) if made.plan else None
        self._step()
        self._begin("one worker less, one more")
        assert made.plan is not None
        for number, pool in enumerate(made.plan.pools):
            for change in (-1, +1):
                if pool.trial.count + change < 1:
                    continue
                beside = _with_change(made.plan, number, change)
                runs = self._simulations.run(self._fleet(beside), made.load, range(min(_NEIGHBOUR_SEEDS, request.seeds)))
                verdicts = judge(request.tiers, plan.tiers, runs)
                made.neighbours.append(Neighbour(pool_name(pool), change, beside.cost, tuple(verdicts), tuple(runs)))

    def _fleet(self, plan: Plan) -> FleetSpec:
        several = len(plan.pools) > 1
        return fleet_of(
            self._request,
            [
                PoolSpec(
                    name=f"{pool_name(pool)}-", count=pool.trial.count, tiers=list(pool.tiers) if several else [],
                    profile=pool.trial.candidate.profile,
                )
                for pool in plan.pools
            ],
        )  # fmt: skip

    # --- nothing fits ---

    def _explain(self, made: Recommendation, fitting: list[Candidate], demand: Demand) -> None:
        """What would be recommended without limits, and what comes closest within them."""
        beyond = plans(self._request, made.found, limited=False)
        made.over = beyond[0] if beyond else None
        for group, found in made.found.items():
            allowed = [trial for trial in found.trials if not trial.prefill and not exceeds(self._request, Plan((Pool(group, trial),)))]
            if not allowed:
                allowed = self._most_allowed(group, found, fitting, demand)
            if allowed and (len(group) == 1 or group in served_sets(self._request)):
                made.closest[group] = min(allowed, key=lambda trial: (trial.ratio, trial.order))

    def _most_allowed(self, group: Tiers, found: Found, fitting: list[Candidate], demand: Demand) -> list[Trial]:
        """The configurations that the search preferred, with as many workers as the limits allow."""
        search = PoolSearch(self._request, group, fitting, demand, self._simulations)
        preferred = {trial.candidate.name: trial.candidate for trial in [*found.options, *found.trials] if not trial.prefill}
        trials = []
        for candidate in preferred.values():
            counts = range(1, self._request.search.max_workers + 1)
            fits = [n for n in counts if not exceeds(self._request, Plan((Pool(group, Trial(candidate, n, (), ())),)))]
            if fits:
                trials.append(search.trial(candidate, fits[-1]))
        return trials


def pool_name(pool: Pool) -> str:
    """Of its tiers."""
    return "-".join(pool.tiers)


def _may_serve_nothing(request: Request) -> bool:
    return all(tier.pays_per_million_output is not None for tier in request.tiers.values())


def _pool_of(plan: Plan, verdict: Verdict) -> int:
    """The number of the pool that serves the verdict's tier; of errors, which have none, the largest pool's."""
    for number, pool in enumerate(plan.pools):
        if verdict.tier in pool.tiers:
            return number
    return max(range(len(plan.pools)), key=lambda number: plan.pools[number].trial.count)


def _with_change(plan: Plan, number: int, change: int) -> Plan:
    """The plan with more or fewer workers in one pool; what that pool's trial measured no longer holds."""
    pools = list(plan.pools)
    trial = pools[number].trial
    pools[number] = Pool(pools[number].tiers, Trial(trial.candidate, trial.count + change, trial.runs, trial.verdicts))
    return Plan(tuple(pools), plan.value)
