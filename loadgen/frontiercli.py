"""`loadgen frontier`: what results files hold, as a table, a page and images."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
import orjson
from rich.console import Console

from loadgen.frontier.analysis import Analysis, analyse, to_json
from loadgen.frontier.factors import expansion
from loadgen.frontier.images import write_images
from loadgen.frontier.metrics import FrontierError, metric
from loadgen.frontier.objectives import parse_objective
from loadgen.frontier.points import Points, gather, is_number
from loadgen.frontier.report import write_report
from loadgen.frontier.table import console
from loadgen.frontier.wording import setting
from loadgen.results import ResultsError, Scalar, read_runs

# What an axis's last name belongs to where no --factor says otherwise.
GROUPS: dict[str, tuple[str, ...]] = {
    "hardware": ("accelerator", "topology", "gpus", "tp", "pp", "ep", "attention_dp", "count", "pd"),
    "quantization": ("quantization", "weights", "activations", "kv_dtype"),
    "kernels": ("kernel", "kernel_factor", "engine", "latency"),
    "speculation": ("speculation", "method", "num_tokens"),
    "caching": ("kv_capacity_tokens", "kv_capacity", "offload", "block_size", "knowledge"),
    "routing": ("policy",),
}


@click.command("frontier", context_settings={"show_default": True})
@click.argument("results", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("-x", "x", default="user_tokens_per_s", metavar="FIGURE", help="Figure across: a user's speed, a latency ...")
@click.option("-y", "y", default="output_per_gpu", metavar="FIGURE", help="Figure up: a throughput per GPU, a price ...")
@click.option("--slo", "objectives", multiple=True, metavar="FIGURE<=VALUE", help="A bound to keep, or FIGURE>=VALUE; repeatable.")
@click.option("--series", metavar="AXIS", help="Axis whose values get a colour and a front of their own.  [default: chosen from the axes]")
@click.option("--trace", help="Trace to show, where the results have several.")
@click.option(
    "--cliff-factor", default=1.5, type=click.FloatRange(1, min_open=True), help="How many times worse a neighbour is beyond a cliff."
)
@click.option("--baseline", metavar="AXIS=VALUE,...", help="Split what the best configuration gains over this one into factors.")
@click.option(
    "--factor", "factors", multiple=True, metavar="NAME=AXIS,...",
    help="Axes that make one factor; repeatable.  [default: by the axes' names: " + ", ".join(GROUPS) + "]",
)  # fmt: skip
@click.option("--at", type=float, metavar="VALUE", help="With --baseline: only configurations at least this good in the figure across.")
@click.option("-o", "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write an interactive page, one file.")
@click.option("--png", "folder", type=click.Path(file_okay=False, path_type=Path), help="Write images into this directory.")
@click.option("--title", help="Title of the page.  [default: the trace's name]")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write points, cliffs and factors as JSON.")
def frontier_command(
    results: tuple[Path, ...],
    x: str,
    y: str,
    objectives: tuple[str, ...],
    series: str | None,
    trace: str | None,
    cliff_factor: float,
    baseline: str | None,
    factors: tuple[str, ...],
    at: float | None,
    page: Path | None,
    folder: Path | None,
    title: str | None,
    json_file: Path | None,
) -> None:
    """Show which configurations no other beats, where they fall off a cliff and why, and what each kind of change was worth.

    Reads results files of `loadgen sweep`. Runs that differ in the seed alone are one point: its median, with the spread. Axes may be
    named by the last part of their name (tp for profile.tp).

    \b
    loadgen frontier results.jsonl
    loadgen frontier results.jsonl --slo 'ttft_p90_s<=5' --slo 'itl_p99_s<=0.1' --html frontier.html
    loadgen frontier results.jsonl -x ttft_p90_s -y price_per_million_output --png images
    loadgen frontier results.jsonl --baseline accelerator=h100,quantization=bf16,policy=round-robin --at 50
    loadgen frontier before.jsonl after.jsonl --baseline policy=random --factor hardware=accelerator,tp --factor routing=policy
    """
    if baseline is None and (factors or at is not None):
        raise click.UsageError("--factor and --at split a gain: add --baseline")
    try:
        points = gather((run for file in results for run in read_runs(file)), trace)
        if not points.points:
            raise FrontierError(f"none of the {len(points.failed)} runs has figures; the first: {points.failed[0].error}")
        found = analyse(
            points, metric(x), metric(y), [parse_objective(text) for text in objectives],
            points.axis(series) if series else None, cliff_factor,
        )  # fmt: skip
        if baseline is not None:
            add_expansion(found, baseline, factors, at)
        if page is not None:
            write_report(page, found, title)
        images = write_images(folder, found) if folder is not None else []
        if json_file is not None:
            json_file.write_bytes(orjson.dumps(to_json(found), option=orjson.OPT_INDENT_2) + b"\n")
    except (ResultsError, FrontierError, OSError) as error:
        raise click.ClickException(str(error)) from None
    terminal = Console()
    if not terminal.is_terminal:
        terminal.width = max(terminal.width, 140)  # a pipe has no edge to fold at
    terminal.print(console(found))
    for file in [*([page] if page else []), *images, *([json_file] if json_file else [])]:
        click.echo(f"written: {file}", err=True)


def add_expansion(found: Analysis, baseline: str, factors: tuple[str, ...], at: float | None) -> None:
    """Split the gain over a baseline as the options say. Raises FrontierError."""
    points = found.points
    groups = _groups(points, factors) if factors else default_groups(points)
    found.expansion = expansion(
        points, found.y, _baseline(points, baseline), groups, found.objectives, None if at is None else (found.x, at)
    )


def default_groups(points: Points) -> dict[str, list[str]]:
    """Axes that differ, by what their names say they are."""
    groups = {
        name: [axis for axis in points.axes if axis.rpartition(".")[2] in members or axis.split(".")[-2:-1] == [name]]
        for name, members in GROUPS.items()
    }
    return {name: axes for name, axes in groups.items() if axes}


def _groups(points: Points, factors: tuple[str, ...]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for text in factors:
        name, equals, members = text.partition("=")
        if not equals or not name.strip() or not members.strip():
            raise FrontierError(f"{text!r} is not a factor; write --factor quantization=weights,kv_dtype")
        for member in members.split(","):
            axis = points.axis(member.strip())
            if taken.setdefault(axis, name.strip()) != name.strip():
                raise FrontierError(f"the axis {axis} is in two factors, {taken[axis]} and {name.strip()}")
            groups.setdefault(name.strip(), []).append(axis)
    return groups


def _baseline(points: Points, text: str) -> dict[str, Scalar]:
    wanted: dict[str, Scalar] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise FrontierError(f"{part!r} is not an axis and its value; write --baseline accelerator=h100,tp=8")
        axis = points.axis(name.strip())
        wanted[axis] = _value(points, axis, value.strip())
    return wanted


def _value(points: Points, axis: str, text: str) -> Scalar:
    """The axis's value that this text means."""
    values = points.values(axis)
    for value in values:
        if text in (str(value), setting(value)):
            return value
    with contextlib.suppress(ValueError):
        asked = float(text)
        for value in values:
            if is_number(value) and float(value) == asked:  # type: ignore[arg-type]
                return value
    raise FrontierError(f"{axis} has no value {text!r}; it has {', '.join(setting(value) for value in values)}")
