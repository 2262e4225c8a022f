"""A simulation's figures as a table: policies side by side, each figure as the median of its seeds, plus or minus half their range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from loadgen.report import seconds
from loadgen.results import Figures
from loadgen.simulate.simulator import Simulation

_SECONDS = (
    ("TTFT mean", "ttft_mean_s"), ("TTFT p50", "ttft_p50_s"), ("TTFT p90", "ttft_p90_s"), ("TTFT p99", "ttft_p99_s"),
    ("in the engine's queue p90", "queue_p90_s"), ("ITL p50", "itl_p50_s"), ("ITL p99", "itl_p99_s"),
    ("E2E p50", "e2e_p50_s"), ("E2E p90", "e2e_p90_s"), ("E2E p99", "e2e_p99_s"),
)  # fmt: skip


def figures_table(simulations: Mapping[str, Sequence[Simulation]], title: str) -> Table:
    """One column per policy (its simulations differ by seed), one row per figure."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for policy in simulations:
        table.add_column(policy, justify="right")

    def row(name: str, figure: Callable[[Simulation], float | None], text: Callable[[float], str]) -> None:
        table.add_row(name, *(_spread([figure(s) for s in runs], text) for runs in simulations.values()))

    def of(name: str) -> Callable[[Simulation], float | None]:
        return lambda simulation: getattr(simulation.figures, name)

    row("requests", of("requests"), lambda v: f"{v:,.0f}")
    row("errors", of("errors"), lambda v: f"{v:,.0f}")
    row("sessions ended", of("sessions"), lambda v: f"{v:,.0f}")
    row("hit rate", of("hit_rate"), lambda v: f"{v:.1%}")
    row("hit bound (infinite cache)", of("hit_bound"), lambda v: f"{v:.1%}")
    row("prompt tokens lost to eviction", lambda s: _share(s.figures.evicted_tokens, s.figures.prompt_tokens), lambda v: f"{v:.1%}")
    for name, field in _SECONDS:
        row(name, of(field), seconds)
    row("tokens/s/user (streaming)", of("user_tokens_per_s"), lambda v: f"{v:.1f}")
    for name, field in (("output", "output_tokens"), ("uncached input", "uncached_tokens")):
        row(f"{name} tokens/s/GPU", lambda s, field=field: _per_gpu(s, field), lambda v: f"{v:,.1f}")  # type: ignore[misc]
    row("engine busy", of("busy"), lambda v: f"{v:.0%}")
    row("sequences decoding per worker", of("batch"), lambda v: f"{v:.1f}")
    row("KV held by requests", of("kv_use"), lambda v: f"{v:.0%}")
    row("preemptions", of("preemptions"), lambda v: f"{v:,.0f}")
    row("busiest worker's prefill over the mean", of("imbalance"), lambda v: f"{v:.2f}")
    return table


def _per_gpu(simulation: Simulation, field: str) -> float:
    figures: Figures = simulation.figures
    return float(getattr(figures, field)) / figures.duration_s / simulation.fleet.gpus


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _spread(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    middle = statistics.median(known)
    spread = (max(known) - min(known)) / 2 / abs(middle) if middle else 0.0
    return text(middle) if spread < 0.005 else f"{text(middle)} ±{spread:.0%}"


def cost_line(simulations: Sequence[Simulation]) -> str:
    """What the simulations cost here."""
    wall = sum(s.wall_s for s in simulations)
    virtual = sum(s.virtual_s for s in simulations)
    requests = sum(s.figures.requests for s in simulations)
    workers = len(simulations[0].workers)
    per_day = wall / virtual * 86_400 if virtual else 0.0
    return (
        f"simulated {seconds(virtual)} of {workers} workers and {requests:,} measured requests in {wall:.1f} s; a day of this traffic "
        f"takes {_duration(per_day)}, and with 1,000 workers and as much traffic for each {_duration(per_day * 1000 / workers)}"
    )


def _duration(value: float) -> str:
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
