"""`loadgen simulate`: a trace against a fleet in virtual time."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadgen.options import format_option, gaps_option, json_option, max_context_option, write_json
from loadgen.readers import Gaps, TraceError, TraceFormat, read_trace
from loadgen.simulate.fleet import FleetError, FleetSpec, Knowledge, PoolSpec, load_fleet
from loadgen.simulate.load import Load, Mode
from loadgen.simulate.simulator import Simulation, simulate
from loadgen.simulate.table import cost_line, figures_table
from loadgen.trace import limit_context
from routing.policies import POLICIES


@click.command("simulate", context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--fleet", "fleet_file", type=click.Path(dir_okay=False, path_type=Path), help="The fleet as YAML; see below.")
@click.option(
    "--workers", type=click.IntRange(1), help="Without --fleet: so many workers of the default profile.  [default: 4]", show_default=False
)
@click.option("--policy", "policies", help="Policies to simulate, e.g. warm,llm-d or all; by default the fleet's.")
@click.option(
    "--knowledge",
    type=click.Choice(get_args(Knowledge)),
    help="How the router knows the caches; by default the fleet's.",
    show_default=False,
)
@click.option("--mode", type=click.Choice(get_args(Mode)), default="closed", help="Who sets the pace: answers or the clock.")
@click.option("--sessions", "live_sessions", type=click.IntRange(1), default=32, help="Closed loop: sessions that are alive at a time.")
@click.option("--requests", type=click.IntRange(1), help="Measure so many requests. Sessions start over when the trace is through.")
@click.option("--duration", "duration_s", type=click.FloatRange(0, min_open=True), help="Measure for so many virtual seconds.")
@click.option("--warmup", type=click.IntRange(0), default=0, help="First requests that are not measured.")
@click.option("--warmup-time", "warmup_s", type=click.FloatRange(0), default=0.0, help="First virtual seconds that are not measured.")
@click.option(
    "--advance", type=click.FloatRange(0, 1), default=0.0, help="Closed loop: lanes begin at a step within this share of a session."
)
@click.option("--shuffle", is_flag=True, help="Play the sessions in an order drawn by the seed.")
@click.option("--time-scale", type=click.FloatRange(0), default=1.0, help="Gaps are multiplied by this.")
@click.option("--max-gap", "max_gap_s", type=click.FloatRange(0), default=300.0, help="Cut longer gaps to these seconds, before scaling.")
@click.option("--ramp", "ramp_s", type=click.FloatRange(0), default=10.0, help="Closed loop: start the sessions over this many seconds.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Open loop: sessions a second (Poisson), not the trace's times.")
@click.option("--speedup", type=click.FloatRange(0, min_open=True), default=1.0, help="Open loop: divide the trace's times.")
@click.option("--seeds", type=click.IntRange(1), default=1, help="Repeat with so many seeds; figures are then medians with their range.")
@click.option("--seed", type=int, default=0, help="The first seed.")
@format_option
@gaps_option
@max_context_option
@json_option
def simulate_command(
    trace: Path,
    fleet_file: Path | None,
    workers: int | None,
    policies: str | None,
    knowledge: Knowledge | None,
    seeds: int,
    seed: int,
    trace_format: TraceFormat,
    gaps: Gaps,
    max_context: int | None,
    json_file: Path | None,
    **load_options: Any,
) -> None:
    """Play a trace against a simulated fleet in virtual time, by the gateway's own routing code.

    Engines batch, chunk prefills, cache prefixes, evict and preempt as vLLM does; how long their steps take is their latency profile's
    affair. Equal seeds give equal figures. A fleet is YAML (docs/simulator.md has every field):

    \b
    policy: warm                  # or any other: --policy all compares them
    knowledge: memory             # or exact, as with KV events
    pools:
      - count: 8
        profile: {tp: 2, kv_capacity_tokens: 1500000, max_num_seqs: 64, latency: qwen3-32b-h100-tp2}
      - name: slow
        count: 2
        speed: 0.5                # half as fast as the profile says
        profile: {kv_capacity_tokens: 600000}

    \b
    loadgen simulate traces/agentic.jsonl --workers 4 --policy warm,round-robin
    loadgen simulate traces/agentic.jsonl --fleet fleet.yaml --sessions 96 --duration 1800 --warmup-time 600 --seeds 5
    loadgen simulate mooncake.jsonl.gz --mode open --workers 16 --policy all --json result.json
    """
    if (load_options["rate"] is not None or load_options["speedup"] != 1.0) and load_options["mode"] != "open":
        raise click.UsageError("--rate and --speedup are for --mode open")
    if fleet_file is not None and workers is not None:
        raise click.UsageError("--workers is for a fleet without --fleet; change the file's 'count'")
    try:
        fleet = load_fleet(fleet_file) if fleet_file is not None else FleetSpec(pools=[PoolSpec(count=workers or 4)])
        asked = list(POLICIES) if policies == "all" else (fleet.policy if policies is None else policies).split(",")
        names = list(dict.fromkeys(name.strip() for name in asked))
        if unknown := [name for name in names if name not in POLICIES]:
            raise click.UsageError(f"unknown policy {unknown[0]!r}; known: {', '.join(POLICIES)}")
        try:
            load = Load(**load_options)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        simulations = _simulate_all(trace, trace_format, gaps, max_context, fleet, names, knowledge, load, range(seed, seed + seeds))
    except (FleetError, TraceError) as error:
        raise click.ClickException(str(error)) from None
    console = Console()
    every = [s for runs in simulations.values() for s in runs]
    console.print(figures_table(simulations, f"{trace.name}, {len(every[0].workers)} workers, {seeds} seed{'s' * (seeds > 1)}"))
    for policy, runs in simulations.items():
        for kind, count in runs[0].error_kinds.items():
            console.print(f"{policy}: {count} x {kind}", markup=False, highlight=False)
    console.print(cost_line(every), highlight=False, soft_wrap=True)
    write_json(json_file, {policy: [_to_json(s) for s in runs] for policy, runs in simulations.items()})


def _simulate_all(
    trace: Path,
    trace_format: TraceFormat,
    gaps: Gaps,
    max_context: int | None,
    fleet: FleetSpec,
    policies: list[str],
    knowledge: Knowledge | None,
    load: Load,
    seeds: range,
) -> dict[str, list[Simulation]]:
    simulations: dict[str, list[Simulation]] = {policy: [] for policy in policies}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=len(policies) * len(seeds))
        done = 0
        for seed in seeds:
            sessions = read_trace(trace, trace_format, gaps, seed)
            if max_context is not None:
                sessions = limit_context(sessions, max_context)
            for policy in policies:
                changes = {"policy": policy} | ({"knowledge": knowledge} if knowledge else {})
                bars.update(task, completed=done, description=f"{policy}, seed {seed}")
                show = partial(_show, bars, task, done)
                simulations[policy].append(simulate(sessions, fleet.model_copy(update=changes), load, seed, show))
                done += 1
    return simulations


def _show(bars: Progress, task: TaskID, done: int, share: float) -> None:
    bars.update(task, completed=done + share)


def _to_json(simulation: Simulation) -> dict[str, Any]:
    return {
        "seed": simulation.seed, "gpus": simulation.fleet.gpus, "virtual_s": simulation.virtual_s, "wall_s": simulation.wall_s,
        "figures": {**asdict(simulation.figures), "hit_rate": simulation.figures.hit_rate},
        "tiers": {tier: asdict(figures) for tier, figures in simulation.tiers.items()},
        "workers": {worker: asdict(figures) for worker, figures in simulation.workers.items()}, "errors": simulation.error_kinds,
    }  # fmt: skip
