"""The frontier as PNG images, for documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from loadgen.frontier.analysis import Analysis, coordinates
from loadgen.frontier.metrics import METRICS, FrontierError, Metric
from loadgen.frontier.objectives import broken
from loadgen.frontier.pareto import step_shape
from loadgen.frontier.points import Point
from loadgen.frontier.wording import setting, short

COLOURS = (
    "#4269d0", "#e8853a", "#3ca951", "#a463f2", "#d6527e", "#26a3a8", "#b59312", "#9c6b4e", "#7f93c4", "#e0705f", "#5b8c3a", "#8a6d9e",
)  # fmt: skip
_INK, _SOFT, _BAD = "#1b1d20", "#9aa0a6", "#c8321f"
_CLIFFS = 4


def write_images(folder: Path, analysis: Analysis) -> list[Path]:
    """Write `frontier.png` (the analysis's figures), `ttft.png` and `cost.png`; a chart whose figures nobody measured is left out.

    Raises FrontierError where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise FrontierError("images need matplotlib: pip install 'warmroute[report]'") from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    charts = (
        ("frontier.png", analysis.x, analysis.y),
        ("ttft.png", METRICS["ttft_p90_s"], analysis.y if analysis.y.higher else METRICS["output_per_gpu"]),
        ("cost.png", analysis.x, METRICS["price_per_million_output"]),
    )
    written = []
    for name, x, y in charts:
        if any(coordinates(point, x, y) is not None for point in analysis.points.points):
            _draw(folder / name, analysis, x, y)
            written.append(folder / name)
    return written


def _draw(file: Path, analysis: Analysis, x: Metric, y: Metric) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.4), dpi=160)
    try:
        _fronts(axes, analysis, x, y)
        _failing(axes, analysis, x, y)
        _cliffs(axes, analysis, x, y)
        _dress(axes, analysis, x, y)
        figure.tight_layout()
        figure.savefig(file)
    finally:
        pyplot.close(figure)


def _failing(axes: Any, analysis: Analysis, x: Metric, y: Metric) -> None:
    failing = [point for point in analysis.points.points if broken(point, analysis.objectives)]
    if failing:
        label = "breaks " + " or ".join(map(str, analysis.objectives))
        axes.scatter(*_columns(failing, x, y), marker="x", s=16, linewidths=0.9, color=_SOFT, alpha=0.6, label=label, zorder=2)


def _fronts(axes: Any, analysis: Analysis, x: Metric, y: Metric) -> None:
    series = analysis.by_series()
    for colour, (value, members) in zip(_cycle(len(series)), series.items(), strict=True):
        keeping = [point for point in members if not broken(point, analysis.objectives)]
        found = analysis.front(keeping, x, y)
        axes.scatter(*_columns(keeping, x, y), s=11, color=colour, alpha=0.35, linewidths=0, zorder=3)
        for line in analysis.lines():
            if line[0] in members and any(point in found for point in line):
                axes.plot(*_columns(line, x, y), color=colour, alpha=0.4, linewidth=0.9, zorder=3)
        axes.plot(*_columns(found, x, y), drawstyle=_steps(x), color=colour, linewidth=1.3, zorder=4)
        axes.errorbar(
            *_columns(found, x, y), xerr=_whiskers(found, x), yerr=_whiskers(found, y), fmt="o", markersize=5.5, color=colour,
            markeredgecolor="white", markeredgewidth=0.8, elinewidth=0.8, zorder=6,
        )  # fmt: skip
        if analysis.series is not None:
            axes.plot([], [], "o-", color=colour, markersize=5.5, linewidth=1.3, label=_plain(setting(value)))
    envelope = "front of all that keep the objectives" if analysis.objectives else "front"
    axes.plot(*_columns(analysis.front_within(x, y), x, y), drawstyle=_steps(x), color=_INK, linewidth=1.8, label=envelope, zorder=5)
    if analysis.objectives:
        everything = analysis.front(x=x, y=y)
        axes.plot(
            *_columns(everything, x, y), drawstyle=_steps(x), color=_SOFT, linewidth=1, linestyle="--", label="front of all", zorder=4
        )


def _cliffs(axes: Any, analysis: Analysis, x: Metric, y: Metric) -> None:
    """The first cliffs as arrows, with their step and cause where they begin."""
    label = "cliff"
    badges: Counter[int] = Counter()  # cliffs that start at one point have their numbers side by side
    for number, cliff in enumerate(analysis.cliffs[:_CLIFFS], 1):
        start, end = coordinates(cliff.before, x, y), coordinates(cliff.after, x, y)
        if start is None or end is None:
            continue
        axes.annotate(
            "", end, start, arrowprops={"arrowstyle": "->", "color": _BAD, "linewidth": 1.4, "shrinkA": 4, "shrinkB": 3}, zorder=7
        )
        axes.annotate(
            str(number), start, xytext=(8 + 13 * badges[cliff.before.id], 8), textcoords="offset points", color="white", fontsize=7,
            ha="center", va="center", zorder=8, bbox={"boxstyle": "circle,pad=0.25", "color": _BAD},
        )  # fmt: skip
        badges[cliff.before.id] += 1
        label += f"\n{number}: {_plain(cliff.title(analysis.points))}, {cliff.cause.kind}"
    if label != "cliff":
        axes.plot([], [], color=_BAD, linewidth=1.4, label=label)


def _dress(axes: Any, analysis: Analysis, x: Metric, y: Metric) -> None:
    for metric, scale, limit in ((x, axes.set_xscale, axes.set_xlim), (y, axes.set_yscale, axes.set_ylim)):
        values = [value for point in analysis.points.points if (value := point.value(metric.key)) is not None]
        if not metric.higher and min(values) > 0 and max(values) > 20 * min(values):
            scale("log")
            ruler = axes.xaxis if metric is x else axes.yaxis
            ruler.set_major_formatter("{x:g}")
        else:
            limit(0, max(values) * 1.06 or 1)
            (axes.xaxis if metric is x else axes.yaxis).set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel(f"{x.label}, {'more' if x.higher else 'less'} is better")
    axes.set_ylabel(y.label)
    axes.set_title(_plain(analysis.points.trace or "frontier"), loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.grid(color="#ececea", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    title = _plain(short(analysis.series, analysis.points.axes)) if analysis.series else None
    axes.legend(title=title, fontsize=7.5, title_fontsize=8, alignment="left", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _columns(points: list[Point], x: Metric, y: Metric) -> tuple[list[float], list[float]]:
    measured = [found for point in points if (found := coordinates(point, x, y)) is not None]
    return [at for at, _ in measured], [up for _, up in measured]


def _whiskers(points: list[Point], metric: Metric) -> list[list[float]]:
    spreads = [spread for point in points if (spread := point.spread(metric.key)) is not None]
    return [[spread.median - spread.low for spread in spreads], [spread.high - spread.median for spread in spreads]]


def _steps(x: Metric) -> str:
    return "steps-pre" if step_shape(x.higher) == "vh" else "steps-post"


def _cycle(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _plain(text: str) -> str:
    """matplotlib reads $ as the start of a formula."""
    return text.replace("$", r"\$")
