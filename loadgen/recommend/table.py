"""A recommendation in words and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.frontier.metrics import METRICS
from loadgen.frontier.points import Spread
from loadgen.recommend.plan import Plan
from loadgen.recommend.recommend import Recommendation, pool_name
from loadgen.recommend.request import Request
from loadgen.recommend.search import Found, Trial
from loadgen.recommend.verdict import Verdict, spread_of
from loadgen.report import seconds
from loadgen.results import Run
from loadgen.simulate.load import Load

EXPECTED = (
    "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_p50_s", "itl_p90_s", "e2e_p50_s", "e2e_p90_s", "user_tokens_per_s", "hit_rate",
    "output_per_gpu",
)  # fmt: skip
_RUNNERS_UP = 5


def show(console: Console, made: Recommendation) -> None:
    """Print all of it."""
    say = _Speaker(console)
    if made.plan is None:
        _show_no_plan(say, made)
    else:
        _show_plan(say, made, made.plan)
    say(f"{made.simulations} simulations in {made.wall_s:.0f} s", style="dim")


class _Speaker:
    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, text: str = "", style: str | None = None) -> None:
        self.console.print(escape(text), style=style, highlight=False, soft_wrap=True)


def _show_plan(say: _Speaker, made: Recommendation, plan: Plan) -> None:
    request = made.request
    say.console.print(_fleet_table(request, plan))
    say(f"for {load_words(made.load, request)}; {_bill(made, plan)}")
    left_out = [tier for tier in request.tiers if tier not in plan.tiers]
    if left_out:
        say(f"not served: {', '.join(left_out)} (pays less than it costs)")
    if not all(verdict.kept for verdict in made.verdicts):
        say("the whole fleet does not keep every objective though its pools one by one do; see below", style="bold")
    if made.exceeded:
        say(f"the whole fleet takes {made.exceeded}", style="bold")
    say()
    say.console.print(_expected_table(made, plan))
    for line in _binding(made):
        say(line)
    say()
    for lines in (_sharings(made, plan), _runners_up(made, plan), _disaggregated(made, plan)):
        for line in lines:
            say(line)
    if len(plan.pools) > 1:
        say("the gateway tells the pools apart by the model name that a tier's clients ask for: see gateway.yaml")


def _fleet_table(request: Request, plan: Plan) -> Table:
    table = Table(title=f"recommended: {request.model}", title_justify="left")
    for heading in ("pool", "workers", "configuration", "GPUs", "KV tokens", "per hour"):
        table.add_column(heading, justify="left" if heading in ("pool", "configuration") else "right")
    for pool in plan.pools:
        trial = pool.trial
        table.add_row(
            pool_name(pool), f"{trial.count}", f"{escape(trial.candidate.name)}\n{trial.candidate.limits}", f"{trial.gpus}",
            f"{trial.count * trial.candidate.profile.kv_capacity_tokens:,}", price(request, trial.cost),
        )  # fmt: skip
    return table


def _bill(made: Recommendation, plan: Plan) -> str:
    output, total = spread_of(made.runs, "price_per_million_output"), spread_of(made.runs, "price_per_million_total")
    text = f"{price(made.request, plan.cost)} per hour on {plan.gpus} GPUs"
    if output is not None and total is not None:
        text += f", {output.median:.3g} per million output tokens, {total.median:.3g} per million tokens with prompts"
    if made.value:
        text += f"; its output is worth {made.value:.2f} per hour by what tiers pay"
    return text


def _expected_table(made: Recommendation, plan: Plan) -> Table:
    seeds = len(made.runs)
    table = Table(title=f"expected (median of {seeds} seed{'s' * (seeds > 1)}, lowest to highest)", title_justify="left")
    table.add_column("", no_wrap=True)
    for tier in plan.tiers:
        table.add_column(tier, justify="right")
    bounds = {(verdict.tier, verdict.key): verdict for verdict in made.verdicts}
    keys = dict.fromkeys((*EXPECTED, *(verdict.key for verdict in made.verdicts if verdict.key in METRICS)))
    for key in keys:
        cells = []
        for tier in plan.tiers:
            cell = _spread(key, spread_of(made.runs, key, tier))
            verdict = bounds.get((tier, key))
            if verdict is not None:
                mark = "kept" if verdict.kept else "broken"
                cell += f"\n{'at most' if verdict.relation == '<=' else 'at least'} {figure(key, verdict.bound)}: {mark}"
            cells.append(cell)
        table.add_row(METRICS[key].label.replace(" (s)", ""), *cells)
    return table


def _binding(made: Recommendation) -> Iterator[str]:
    if made.verdicts:
        yield f"closest to its bound: {verdict_words(made.verdicts[0])}"
    for beside in made.neighbours:
        change = "one worker less" if beside.change < 0 else "one worker more"
        line = f"{change} in pool {beside.pool} ({price(made.request, beside.cost)} per hour): "
        if not beside.verdicts:
            yield line + "no objective says anything about it"
            continue
        yield line + ("all objectives kept; " if beside.kept else "") + verdict_words(beside.verdicts[0])


def _sharings(made: Recommendation, plan: Plan) -> Iterator[str]:
    if len(made.sharings) < 2:
        return
    yield "ways to share pools between tiers (by one seed each):"
    for sharing in made.sharings:
        chosen = "  <- recommended" if sharing.sharing == plan.sharing else ""
        worth = f", worth {sharing.value:.2f}" if sharing.value else ""
        yield f"  {sharing.sharing}: {price(made.request, sharing.cost)} per hour, {sharing.gpus} GPUs{worth}{chosen}"


def _runners_up(made: Recommendation, plan: Plan) -> Iterator[str]:
    for pool in plan.pools:
        found = made.found[pool.tiers]
        others = [trial for trial in found.options if trial.candidate.name != pool.trial.candidate.name][:_RUNNERS_UP]
        if others:
            yield f"next best for pool {pool_name(pool)} (by one seed):"
        for trial in others:
            yield f"  {_trial_words(made.request, trial)}"


def _disaggregated(made: Recommendation, plan: Plan) -> Iterator[str]:
    for pool in plan.pools:
        found = made.found[pool.tiers]
        if not found.disaggregated:
            continue
        best = found.disaggregated[0]
        splits = f"best of {len(found.disaggregated)} splits"
        line = f"prefill and decode apart, pool {pool_name(pool)}: {splits} is {_trial_words(made.request, best)}"
        if best.kept and best.cost < pool.trial.cost:
            line += "; cheaper, but gateway.yaml cannot realise it: the gateway does not route prefill and decode apart"
        yield line


def _trial_words(request: Request, trial: Trial) -> str:
    split = f" ({trial.prefill} prefill : {trial.count - trial.prefill} decode)" if trial.prefill else ""
    line = f"{trial.count} x {trial.candidate.name}{split}: {price(request, trial.cost)} per hour"
    return line + (f", {verdict_words(trial.worst)}" if trial.worst is not None else "")


def _show_no_plan(say: _Speaker, made: Recommendation) -> None:
    request = made.request
    if made.sharings:
        best = made.sharings[0]
        say("serving nothing is best: no tier pays what it costs", style="bold")
        say(f"the least loss: {best.sharing} at {price(request, best.cost)} per hour, worth {best.value:.2f}")
        return
    say("no fleet keeps every objective within the limits", style="bold")
    say(f"for {load_words(made.load, request)}")
    for group, trial in made.closest.items():
        found: Found = made.found[group]
        if found.options and made.over is None:
            continue
        say(f"closest for {' + '.join(group)}: {_trial_words(request, trial)}")
        for verdict in trial.verdicts[1:]:
            if not verdict.kept:
                say(f"    and {verdict_words(verdict)}")
    if made.over is not None:
        pools = ", ".join(f"{pool.trial.count} x {pool.trial.candidate.name} for {' + '.join(pool.tiers)}" for pool in made.over.pools)
        cost = f"{price(request, made.over.cost)} per hour on {made.over.gpus} GPUs"
        say(f"what would help: {pools} keeps all for {cost}; raise the limits to it")
    for line in _what_helps(made):
        say(line)


def _what_helps(made: Recommendation) -> Iterator[str]:
    relaxed = {
        verdict.key: verdict for trial in made.closest.values() for verdict in trial.verdicts if not verdict.kept and verdict.value
    }  # fmt: skip
    for key, verdict in relaxed.items():
        yield f"what would help: {key} of {verdict.tier} at {figure(key, verdict.value or 0.0)} instead of {figure(key, verdict.bound)}"
    if made.over is None:
        ideas = "faster accelerators, larger tp, fewer bits (quantization, kv_dtype)"
        speeds = any(verdict.key.startswith(("itl", "user")) for verdict in relaxed.values())
        yield (
            f"what else may help: {ideas}"
            + (", speculation" if speeds else "")
            + f", or max_workers above {made.request.search.max_workers}"
        )


# --- figures ---


def figure(key: str, value: float) -> str:
    """A figure in its unit."""
    if key.endswith("_s") and not key.endswith("per_s"):
        return seconds(value)
    return f"{value:.1%}" if key in ("hit_rate", "hit_bound", "kv_use", "busy") else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _spread(key: str, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if spread.high - spread.low < 0.005 * abs(spread.median):
        return figure(key, spread.median)
    texts = [figure(key, value) for value in (spread.median, spread.low, spread.high)]
    unit = texts[0].rpartition(" ")[2] if " " in texts[0] else ""
    if unit and all(text.endswith(f" {unit}") for text in texts):  # once is enough
        texts = [text.removesuffix(f" {unit}") for text in texts]
        return f"{texts[0]} ({texts[1]}-{texts[2]}) {unit}"
    return f"{texts[0]} ({texts[1]}-{texts[2]})"


def verdict_words(verdict: Verdict) -> str:
    """TTFT p90 of latency 7.2 s, at most 5 s (44 % over)"""
    label = METRICS[verdict.key].label.replace(" (s)", "") if verdict.key in METRICS else verdict.key
    of = f" of {verdict.tier}" if verdict.tier else ""
    value = "not measured" if verdict.value is None else figure(verdict.key, verdict.value)
    bound = f"{'at most' if verdict.relation == '<=' else 'at least'} {figure(verdict.key, verdict.bound)}"
    if math.isinf(verdict.ratio):
        off = "broken"
    elif verdict.kept:
        off = f"{1 - verdict.ratio:.0%} room"
    else:
        off = f"missed by {verdict.ratio - 1:.0%}" if verdict.ratio < 2 else f"missed {verdict.ratio:.1f} times"
    return f"{label}{of} {value}, {bound} ({off})"


def price(request: Request, cost: float) -> str:
    """Of a fleet per hour; GPUs where nothing has a price."""
    priced = bool(request.accelerators) or any(profile.price_per_hour for profile in request.workers.values())
    return f"{cost:,.2f}" if priced else f"{cost:.0f} GPUs"


def load_words(load: Load, request: Request) -> str:
    """What the fleet is sized for."""
    growth = f" ({request.traffic.growth:.0%} growth included)" if request.traffic.growth else ""
    pace = f"{load.live_sessions} live sessions" if load.mode == "closed" else f"{load.rate:.3g} sessions per second"
    return f"{pace}{growth} of {request.traffic.trace.name}"


def expected_figures(runs: Sequence[Run], tier: str | None = None) -> dict[str, list[float] | None]:
    """Figure -> [median, lowest, highest] over the runs."""
    return {key: list(spread) if (spread := spread_of(runs, key, tier)) is not None else None for key in EXPECTED}
