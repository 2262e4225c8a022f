"""`loadgen sweep`: many configurations, one results file."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from types import FrameType

import click
from rich.console import Console
from rich.table import Table

from loadgen.frontier.metrics import METRICS
from loadgen.frontier.points import Point
from loadgen.readers import TraceError
from loadgen.results import ResultsError, Run, Scalar
from loadgen.sweep.adaptive import AdaptiveSearch
from loadgen.sweep.config import Sweep, SweepError, load_sweep
from loadgen.sweep.configuration import CannotRun, configuration
from loadgen.sweep.evaluate import SimulatedRuns, tasks_of
from loadgen.sweep.grid import Grid
from loadgen.sweep.objective import Goal, front
from loadgen.sweep.processes import Executor, Processes
from loadgen.sweep.progress import SweepProgress, duration
from loadgen.sweep.runner import Summary, plan_of, run_sweep

_CHECKED = 2_000  # configurations that --check looks at
_TRIED = 3  # and runs
_SHOWN = 12  # lines of a table


@click.command("sweep")
@click.argument("sweep_file", metavar="SWEEP.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Results file (JSON lines); runs it has are not repeated."
)
@click.option("--jobs", type=click.IntRange(1), help="Processes at a time.  [default: the CPUs]")
@click.option("--ray", "use_ray", is_flag=True, help="Spread the runs over the Ray cluster that this machine belongs to.")
@click.option("--check", is_flag=True, help="Check every configuration, try a few, say how long the sweep would take, and end.")
@click.option("--dry-run", is_flag=True, help="List what would be run, and end.")
def sweep_command(sweep_file: Path, output: Path | None, jobs: int | None, use_ray: bool, check: bool, dry_run: bool) -> None:
    """Run many configurations, simulated or live, and write their figures to a results file.

    The YAML file says what to start from, which axes to vary and how to choose: every combination (grid), some (random), or those near
    the front and around cliffs (adaptive). deploy/sweeps has some to start from. Ctrl-C keeps what has ended; the same command goes on.

    \b
    loadgen sweep deploy/sweeps/agentic.yaml --check
    loadgen sweep deploy/sweeps/agentic.yaml -o agentic.jsonl
    loadgen frontier agentic.jsonl
    """
    try:
        sweep = load_sweep(sweep_file)
        _check_paths(sweep)
        if use_ray and sweep.mode == "live":
            raise click.UsageError("--ray is for simulated sweeps: a live one starts its engines on this machine")
        if jobs is not None and (use_ray or sweep.mode == "live"):
            raise click.UsageError(
                "--jobs is for simulated sweeps on this machine: live ones run one after the other, Ray has its own CPUs"
            )
        jobs = jobs or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
        if check:
            _check(sweep, jobs)
            return
        if dry_run:
            _show_plan(sweep)
            return
        if output is None:
            raise click.UsageError("name the results file with -o, or look first with --check or --dry-run")
        summary = _run(sweep, output, _executor(sweep, jobs, use_ray))
    except (SweepError, TraceError, ResultsError) as error:
        raise click.ClickException(str(error)) from None
    _conclude(sweep, output, summary)


def _executor(sweep: Sweep, jobs: int, use_ray: bool) -> Executor:
    if sweep.mode == "live":
        from loadgen.sweep.live import LiveRuns

        return LiveRuns(sweep, say=lambda text: click.echo(text, err=True))
    if use_ray:
        from loadgen.sweep.rayrun import RayRuns

        return RayRuns(partial(SimulatedRuns, sweep))
    return Processes(partial(SimulatedRuns, sweep), jobs)


def _run(sweep: Sweep, output: Path, executor: Executor) -> Summary:
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with SweepProgress(Console(stderr=True)) as view:
            return run_sweep(sweep, output, executor, view)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the sweep, once: a second Ctrl-C must not keep what was started from being stopped."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _check_paths(sweep: Sweep) -> None:
    """Every axis value alone on the base, so that a wrong path or type is found before the first run, with its place."""
    grid = sweep.grid()
    for axis in grid.axes:
        for value in axis.values:
            _try(sweep, {axis.name: value}, f"axes.{axis.name}: {value}")


def _try(sweep: Sweep, arm: dict[str, Scalar], where: str) -> str | None:
    """Why a configuration cannot run, if so. Raises SweepError, beginning with `where`, for what is a mistake."""
    try:
        if sweep.mode == "live":
            from loadgen.sweep.live import live_configuration

            live_configuration(sweep, arm)
        else:
            configuration(sweep, sweep.settings(arm))
    except CannotRun as error:
        return str(error)
    except SweepError as error:
        raise SweepError(f"{where}: {error}") from None
    return None


def _check(sweep: Sweep, jobs: int) -> None:
    grid, plan = sweep.grid(), plan_of(sweep)
    runs = plan.budget * len(sweep.seed_list)
    at_most = "at most " if sweep.search.kind == "adaptive" else ""
    excluded = f"{grid.size - _allowed(grid):,} excluded, " if sweep.exclude and grid.size <= 1_000_000 else ""
    click.echo(
        f"{grid.size:,} combinations, {excluded}search {sweep.search.kind}: {at_most}{plan.budget:,} configurations x "
        f"{len(sweep.seed_list)} seeds = {runs:,} runs"
    )
    looked_at = grid.random_sample(_CHECKED)
    reasons: dict[str, int] = {}
    for point in looked_at:
        arm = grid.arm(point)
        why = _try(sweep, arm, _text(arm))
        if why is not None:
            reasons[why] = reasons.get(why, 0) + 1
    for why, count in sorted(reasons.items(), key=lambda item: -item[1])[:_SHOWN]:
        click.echo(f"{count} of {len(looked_at)} cannot run: {why}")
    if sweep.mode == "live":
        from loadgen.sweep.live import window_s

        window = window_s(sweep)
        text = (
            "unknown: the load is bounded by requests" if window is None else f"{duration(window * runs)} of load, and the engines' starts"
        )
        click.echo(f"time: {text}")
        return
    evaluate = SimulatedRuns(sweep)
    times = []
    for point in grid.spread_sample(_TRIED):
        started = perf_counter()
        run = evaluate(tasks_of(sweep, grid.arm(point))[0])
        if run.error is None:
            times.append(perf_counter() - started)
            click.echo(f"tried {_text(run.arm)}: {run.figures.requests:,} requests in {times[-1]:.1f} s")
        else:
            click.echo(f"tried {_text(run.arm)}: cannot run: {run.error}")
    if times:
        click.echo(f"time: about {duration(runs * sum(times) / len(times) / jobs)} with {jobs} processes")


def _allowed(grid: Grid) -> int:
    return sum(1 for _ in grid.points())


def _show_plan(sweep: Sweep) -> None:
    plan = plan_of(sweep)
    grid = sweep.grid()
    table = Table(*[axis.name for axis in grid.axes])
    for point in plan.next():
        table.add_row(*(str(value) for value in grid.arm(point).values()))
    seeds = ", ".join(map(str, sweep.seed_list))
    Console().print(table)
    rest = f"; the first sample, up to {plan.budget} configurations in all" if isinstance(plan, AdaptiveSearch) else ""
    click.echo(f"{table.row_count} configurations, each with seeds {seeds}{rest}")


def _conclude(sweep: Sweep, output: Path, summary: Summary) -> None:
    console = Console()
    goal = sweep.goal()
    arms: dict[str, list[Run]] = {}
    for run in summary.runs:
        arms.setdefault(_text(run.arm), []).append(run)
    values = {name: value for name, runs in arms.items() if (value := goal.value(runs)) is not None}
    best = front(values)
    if best:
        console.print(_front_table(goal, best, arms))
    for failure in summary.failures[:_SHOWN]:
        click.echo(f"failed: {failure}", err=True)
    errors = f", {summary.cannot_run} cannot run" if summary.cannot_run else ""
    known = f", {summary.found} of them from before" if summary.found else ""
    click.echo(f"{output}: {len(summary.runs)} runs of {summary.configurations} configurations{known}{errors}; {duration(summary.wall_s)}")
    again = shlex.join(["loadgen", *sys.argv[1:]]) if sys.argv[1:2] == ["sweep"] else "the same command"
    if summary.interrupted:
        click.echo(f"interrupted; {again} goes on", err=True)
        sys.exit(130)
    if summary.failures:
        raise click.ClickException(f"{len(summary.failures)} runs failed and are not in the file; {again} tries them again")
    if not best:
        slo = f" within {', '.join(sweep.slo)}" if sweep.slo else ""
        raise click.ClickException(f"no configuration could be measured{slo}; the errors are in {output}")


def _front_table(goal: Goal, best: list[str], arms: dict[str, list[Run]]) -> Table:
    """The front's points, with the axes in which they differ."""
    shown = best if len(best) <= _SHOWN else [best[round(i * (len(best) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]
    first = [arms[name][0].arm for name in shown]
    axes = [axis for axis in first[0] if len({str(arm[axis]) for arm in first}) > 1]
    same = [f"{axis.rpartition('.')[2]} {first[0][axis]}" for axis in first[0] if axis not in axes]
    title = f"front: {len(best)} of {len(arms)} configurations" + (f", all with {', '.join(same)}" if same and len(best) > 1 else "")
    table = Table(title=title, title_justify="left")
    for column in (METRICS[goal.x].label, METRICS[goal.y].label, "hit rate", *(axis.rpartition(".")[2] for axis in axes)):
        table.add_column(column, justify="right", overflow="fold")
    for name in shown:
        point = Point(0, arms[name][0].arm, [run for run in arms[name] if run.error is None])
        x, y, hit = point.value(goal.x), point.value(goal.y), point.value("hit_rate")
        table.add_row(f"{x:,.4g}", f"{y:,.4g}", "-" if hit is None else f"{hit:.1%}", *(str(point.arm[axis]) for axis in axes))
    return table


def _text(arm: dict[str, Scalar]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arm.items())
