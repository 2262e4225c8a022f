"""The frontier on the console: front, cliffs, factors, and what could not run."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from loadgen.frontier.analysis import Analysis
from loadgen.frontier.factors import Expansion
from loadgen.frontier.metrics import METRICS
from loadgen.frontier.objectives import broken
from loadgen.frontier.points import Point, Points
from loadgen.frontier.wording import factor, number, plural, setting, short
from loadgen.results import Scalar

_SHOWN_CLIFFS = 12
_FIGURES = ("ttft_p50_s", "ttft_p90_s", "e2e_p90_s", "hit_rate", "price_per_million_output")


def console(analysis: Analysis) -> Group:
    """Everything, top down."""
    nothing = f"no configuration measured both {analysis.x.key} and {analysis.y.key}"
    parts: list[RenderableType] = [_headline(analysis), "", front_table(analysis) if analysis.front() else nothing]
    if analysis.cliffs:
        parts += ["", cliff_table(analysis)]
    if analysis.expansion:
        parts += ["", expansion_table(analysis.expansion, analysis.points)]
    if analysis.points.failed:
        parts += ["", *_failed(analysis.points)]
    return Group(*parts)


def _headline(analysis: Analysis) -> str:
    points = analysis.points
    fewest, most = points.seeds
    seeds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    constant = ", ".join(f"{short(axis, points.constant)} {setting(value)}" for axis, value in points.constant.items())
    trace = f"{points.trace}: " if points.trace else ""
    counts = f"{plural(len(points.points), 'configuration')}, {plural(points.runs, 'run')}, {seeds} a configuration"
    return escape(trace + counts + (f"\nall: {constant}" if constant else ""))


def front_table(analysis: Analysis) -> Table:
    """The front's points by growing x. Those that break an objective are dimmed and named with it."""
    points, shown = analysis.points, analysis.front()
    if analysis.objectives:
        within = analysis.front_within()
        shown = sorted({point.id: point for point in [*shown, *within]}.values(), key=lambda point: point.value(analysis.x.key) or 0.0)
    table = Table(title=f"front: {analysis.y.label} against {analysis.x.label}", title_justify="left")
    for axis in points.axes:
        table.add_column(escape(short(axis, points.axes)))
    figures = [
        METRICS[key]
        for key in dict.fromkeys((analysis.x.key, analysis.y.key, *_FIGURES))
        if any(point.value(key) is not None for point in shown)
    ]
    for figure in figures:
        table.add_column(escape(figure.label), justify="right")
    if analysis.objectives:
        table.add_column("breaks")
    for point in shown:
        cells = [escape(setting(point.arm.get(axis))) for axis in points.axes]
        cells += [
            _with_spread(point, figure.key) if figure in (analysis.x, analysis.y) else number(point.value(figure.key)) for figure in figures
        ]
        breaks = broken(point, analysis.objectives)
        if analysis.objectives:
            cells.append(" ".join(str(objective) for objective in breaks))
        table.add_row(*cells, style="dim" if breaks else None)
    if analysis.objectives and all(broken(point, analysis.objectives) for point in shown):
        table.caption = "no configuration keeps every objective"
    return table


def _with_spread(point: Point, key: str) -> str:
    spread = point.spread(key)
    if spread is None or spread.low == spread.high:
        return number(point.value(key))
    return f"{number(spread.median)} ({number(spread.low)}..{number(spread.high)})"


def cliff_table(analysis: Analysis) -> Table:
    """The steepest cliffs with their cause."""
    table = Table(title="cliffs", title_justify="left")
    for name in ("step", "what falls", "cause", "where"):
        table.add_column(name, overflow="fold")
    for cliff in analysis.cliffs[:_SHOWN_CLIFFS]:
        where = cliff.where(analysis.points) + (f"\nand {cliff.likewise} more alike" if cliff.likewise else "")
        table.add_row(
            escape(cliff.title(analysis.points)),
            "\n".join(map(str, cliff.changes)),
            f"{cliff.cause.kind}: {cliff.cause.text}",
            escape(where),
        )
    if len(analysis.cliffs) > _SHOWN_CLIFFS:
        table.caption = f"{len(analysis.cliffs) - _SHOWN_CLIFFS} more in the report"
    return table


def expansion_table(found: Expansion, points: Points) -> Table:
    """The factors from the baseline to the best, their product last."""
    table = Table(title=escape(f"expansion of {found.metric.label}{at_text(found)}"), title_justify="left")
    table.add_column("factor")
    table.add_column("change", overflow="fold")
    table.add_column("x", justify="right")
    table.add_column("by order", justify="right")
    for part in found.factors:
        spread = "" if part.high / part.low < 1.005 else f"{factor(part.low)}..{factor(part.high)}"
        table.add_row(escape(part.name), escape(changes_text(part.changes, points)), factor(part.value), spread)
    table.add_section()
    before, after = found.baseline.value(found.metric.key), found.best.value(found.metric.key)
    table.add_row("total", f"{number(before)} -> {number(after)}", factor(found.total), "")
    note = order_note(found)
    if note:
        table.caption = escape(note)
    return table


def at_text(found: Expansion) -> str:
    if found.at is None:
        return ""
    return f" at {'least' if found.at[0].higher else 'most'} {number(found.at[1])} {found.at[0].label}"


def changes_text(changes: list[tuple[str, Scalar, Scalar]], points: Points) -> str:
    names = [*points.axes, *points.constant]
    return ", ".join(f"{short(axis, names)} {setting(was)} -> {setting(now)}" for axis, was, now in changes)


def order_note(found: Expansion) -> str:
    """What the split rests on, where it is not every order; empty where it is."""
    if not found.missing:
        return ""
    wanted = "; ".join(found.missing[:4]) + (f"; and {len(found.missing) - 4} more" if len(found.missing) > 4 else "")
    if found.orders:
        return f"mean over {found.orders} of {found.possible_orders} orders; the others lack runs (within objectives) of: {wanted}"
    return f"joined factors cannot be told apart; there is no run (within objectives) of: {wanted}"


def _failed(points: Points) -> list[str]:
    """How many configurations could not run, by reason."""
    reasons = Counter(run.error or "" for run in points.failed)
    lines = [f"without figures: {plural(len(points.failed), 'run')}"]
    return lines + [escape(f"  {count} x {reason}") for reason, count in reasons.most_common(5)]
