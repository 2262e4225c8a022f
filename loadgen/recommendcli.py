"""`loadgen recommend`: from traffic, objectives and prices to a fleet."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from loadgen.frontier.metrics import METRICS, FrontierError
from loadgen.frontier.objectives import parse_objective
from loadgen.local import StartError
from loadgen.options import max_context_option
from loadgen.readers import TraceError
from loadgen.recommend import Progress, Recommendation, Request, RequestError, load_request, parse_request, recommend
from loadgen.recommend.output import FIRST_WORKER_PORT, write
from loadgen.recommend.rehearsal import rehearsal_table, rehearse
from loadgen.recommend.table import show
from loadgen.replay import ReplayError
from loadgen.simulate.fleet import FleetError
from loadgen.sweep.progress import duration

_LINE_EVERY_S = 5.0


@click.command("recommend", context_settings={"show_default": True})
@click.argument("source", metavar="REQUEST.yaml|TRACE", type=click.Path(path_type=Path))
@click.option("--model", help="With a trace: the model, e.g. qwen3-32b.")
@click.option("--accelerator", "accelerators", multiple=True, help="With a trace: what may be rented, e.g. h100; repeatable.")
@click.option("--sessions", type=click.IntRange(1), help="With a trace: sessions that are alive at a time.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="With a trace: sessions that start per second, instead of --sessions."
)
@click.option(
    "--slo", "objectives", multiple=True, metavar="FIGURE<=VALUE", help="With a trace: an objective, or FIGURE>=VALUE; repeatable."
)
@click.option("--growth", type=click.FloatRange(0), help="With a trace: share of more traffic to size for, e.g. 0.2.")
@click.option("--budget", type=click.FloatRange(0, min_open=True), help="With a trace: price per hour at most.")
@click.option("--time-scale", type=click.FloatRange(0), help="With a trace: gaps are multiplied by this.")
@max_context_option
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Write gateway.yaml, fleet.yaml, engines/ ... into it."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port of the gateway in gateway.yaml.")
@click.option(
    "--worker-port",
    type=click.IntRange(1, 65535),
    default=FIRST_WORKER_PORT,
    help="Port of the first worker in gateway.yaml; the others follow.",
)
@click.option("--try", "try_requests", type=click.IntRange(1), metavar="REQUESTS", help="Then start it with simulated workers and replay.")
@click.option("--jobs", type=click.IntRange(1), help="Processes at a time.  [default: the CPUs]", show_default=False)
@click.option("--seeds", type=click.IntRange(1), help="Simulations of the final fleet.  [default: 5]", show_default=False)
def recommend_command(
    source: Path,
    output: Path | None,
    port: int,
    worker_port: int,
    try_requests: int | None,
    jobs: int | None,
    seeds: int | None,
    **options: Any,
) -> None:
    """Find the cheapest fleet that serves given traffic within its objectives, by simulation.

    Tried are parallelism, quantization, batch limits and numbers of workers, one pool for all tiers or several, and where tiers say what
    they pay, which of them are worth serving. deploy/recommend has requests to start from; the simple ones need no file:

    \b
    loadgen recommend traces/agentic.jsonl --model qwen3-32b --accelerator h100 --sessions 200 --slo 'ttft_p90_s<=2' --slo 'itl_p90_s<=0.05'
    loadgen recommend deploy/recommend/tiers.yaml -o fleet
    warmroute check-config fleet/gateway.yaml
    warmroute worker sim --like fleet/gateway.yaml          # and in another terminal:
    warmroute serve --config fleet/gateway.yaml
    """
    if try_requests is not None and output is None:
        raise click.UsageError("--try starts what -o writes; name the directory")
    logging.getLogger().setLevel(logging.ERROR)  # fleets that are too small make the router warn of much
    console = Console()
    try:
        request = _request(source, options)
        if seeds is not None:
            request = request.model_copy(update={"seeds": seeds})
        if output is not None:
            _make(output)  # now, not after the search
        with _ProgressView(Console(stderr=True)) as view:
            made = recommend(request, jobs or os.cpu_count() or 1, view)
    except (RequestError, TraceError, FleetError) as error:
        raise click.ClickException(str(error)) from None
    show(console, made)
    if made.plan is None:
        raise SystemExit(1)
    if output is not None:
        _write(console, made, output, port, worker_port)
        if try_requests is not None:
            _try(console, made, output, try_requests)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{directory}: cannot be made: {error}") from None


def _request(source: Path, options: dict[str, Any]) -> Request:
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if source.suffix in (".yaml", ".yml"):
        if given:
            name = next(iter(given))
            spelled = {"accelerators": "accelerator", "objectives": "slo"}.get(name, name).replace("_", "-")
            raise click.UsageError(f"--{spelled} is for a trace; say it in {source}")
        return load_request(source)
    for name, spelled in (("model", "--model"), ("accelerators", "--accelerator")):
        if name not in given:
            raise click.UsageError(f"a trace needs {spelled} (or give a request's YAML file)")
    traffic: dict[str, Any] = {name: given[name] for name in ("sessions", "rate", "growth", "max_context") if name in given}
    if "time_scale" in given:
        traffic["load"] = {"time_scale": given["time_scale"]}
    data: dict[str, Any] = {
        "traffic": {"trace": source, **traffic}, "model": given["model"], "accelerators": list(given["accelerators"]),
        "tiers": {"standard": {"slo": _slo(given.get("objectives", ()))}}, "budget": {"price_per_hour": given.get("budget")},
    }  # fmt: skip
    return parse_request(data, "options")


def _slo(texts: tuple[str, ...]) -> dict[str, float]:
    slo = {}
    for text in texts:
        try:
            objective = parse_objective(text)
        except FrontierError as error:
            raise click.UsageError(f"--slo: {error}") from None
        if (objective.relation == ">=") != METRICS[objective.key].higher:
            raise click.UsageError(f"--slo {text}: of {objective.key}, {'more' if METRICS[objective.key].higher else 'less'} is better")
        slo[objective.key] = objective.bound
    return slo


def _write(console: Console, made: Recommendation, output: Path, port: int, worker_port: int) -> None:
    for note in write(made, output, port, worker_port):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"written to {output}; try it without a GPU: warmroute worker sim --like {output}/gateway.yaml, "
        f"and warmroute serve --config {output}/gateway.yaml",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def _try(console: Console, made: Recommendation, output: Path, requests: int) -> None:
    try:
        rehearsed = rehearse(made, output, made.request.read_sessions(), requests)
    except (StartError, ReplayError) as error:
        raise click.ClickException(str(error)) from None
    console.print(rehearsal_table(rehearsed))
    for each in rehearsed:
        if each.measured.errors:
            console.print(f"{each.pool}: {each.measured.errors} errors, {each.measured.error_kinds}", markup=False, highlight=False)
        if each.measured.degraded:
            console.print(f"{each.pool}: this machine was too slow to send on time, so the measured times are its own too", highlight=False)


class _ProgressView:
    """A bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Bars(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bars.add_task("reading the trace", total=1.0)
        self._line_at = perf_counter()

    def __enter__(self) -> _ProgressView:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        left = f", {duration(progress.left_s)} left" if progress.left_s and progress.share < 1 else ""
        text = f"{progress.doing}: {progress.simulations} simulations{left}"
        if self._console.is_terminal:
            self._bars.update(self._task, completed=progress.share, description=text)
        elif perf_counter() - self._line_at >= _LINE_EVERY_S:
            self._line_at = perf_counter()
            self._console.print(f"{progress.share:.0%}, {text}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    recommend_command()
