"""One self-contained interactive HTML page: data, script, style and plotly.js in one file; it asks no server for anything."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from loadgen.frontier.analysis import Analysis, charted
from loadgen.frontier.causes import TITLES
from loadgen.frontier.cliffs import Cliff, series_along
from loadgen.frontier.factors import Expansion
from loadgen.frontier.metrics import METRICS, FrontierError
from loadgen.frontier.points import Points, is_number
from loadgen.frontier.table import at_text, changes_text, order_note
from loadgen.frontier.wording import arm_text, number, setting, short


def write_report(file: Path, analysis: Analysis, title: str | None = None, now: datetime | None = None) -> None:
    """Write the page. Raises FrontierError where plotly is not installed."""
    file.write_text(report(analysis, title, now), encoding="utf-8")


def report(analysis: Analysis, title: str | None = None, now: datetime | None = None) -> str:
    """The page as HTML. Values of the results' users (axes, settings, traces) only enter as JSON data or escaped text."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise FrontierError("the report needs plotly: pip install 'warmroute[report]'") from None
    static = files("loadgen.frontier") / "static"
    heading = title or (f"The frontier of {analysis.points.trace}" if analysis.points.trace else "The frontier")
    data = orjson.dumps(page_data(analysis, heading, now or datetime.now(UTC))).decode()
    parts = {
        "TITLE": escape(heading),
        "STYLE": (static / "page.css").read_text("utf-8"),
        "PLOTLY": get_plotlyjs(),
        "DATA": data.replace("<", "\\u003c"),
        "SCRIPT": (static / "page.js").read_text("utf-8"),
    }
    pieces = (static / "page.html").read_text("utf-8").split("@@")  # text, name, text, name, ... text
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def page_data(analysis: Analysis, title: str, now: datetime) -> dict[str, Any]:
    """What the page draws. Settings are indices into their axis's values, figures are in the order of `metrics`."""
    points = analysis.points
    asked = {analysis.x.key, analysis.y.key}
    shown = [m for m in METRICS.values() if m.key in asked or any(point.value(m.key) is not None for point in points.points)]
    choices = {metric.key for metric in charted(points)} | asked
    values = {axis: points.values(axis) for axis in points.axes}
    fewest, most = points.seeds
    return {
        "title": title,
        "date": f"{now:%d %b %Y, %H:%M} UTC",
        "trace": points.trace,
        "runs": points.runs,
        "seeds": str(fewest) if fewest == most else f"{fewest} to {most}",
        "sources": sorted({run.source for point in points.points for run in point.runs}),
        "constant": [[short(axis, [*points.axes, *points.constant]), setting(value)] for axis, value in points.constant.items()],
        "metrics": [{"key": m.key, "label": m.label, "higher": m.higher, "axis": m.key in choices} for m in shown],
        "axes": [
            {
                "key": axis,
                "name": short(axis, points.axes),
                "values": [setting(value) for value in values[axis]],
                "lines": [[point.id for point in line] for line in series_along(points, axis)],
                "numeric": all(is_number(value) for value in values[axis]),
            }
            for axis in points.axes
        ],
        "points": [
            {
                "arm": [values[axis].index(point.arm.get(axis)) for axis in points.axes],
                "at": [point.value(metric.key) for metric in shown],
                "spread": {
                    str(place): [spread.low, spread.high]
                    for place, metric in enumerate(shown)
                    if metric.key in choices and (spread := point.spread(metric.key)) is not None and spread.low != spread.high
                },
                "gpus": point.gpus,
                "seeds": len(point.runs),
            }
            for point in points.points
        ],
        "x": analysis.x.key,
        "y": analysis.y.key,
        "series": analysis.series,
        "along": analysis.along,
        "objectives": [str(objective) for objective in analysis.objectives],
        "cliffs": [_cliff(cliff, points) for cliff in analysis.cliffs],
        "expansion": _expansion(analysis.expansion, points) if analysis.expansion else None,
        "failed": [[arm_text(run.arm, list(run.arm)), run.error] for run in points.failed],
    }


def _cliff(cliff: Cliff, points: Points) -> dict[str, Any]:
    return {
        "before": cliff.before.id,
        "after": cliff.after.id,
        "step": cliff.title(points),
        "where": cliff.where(points),
        "factor": cliff.factor,
        "changes": [[METRICS[c.key].label, number(c.before), number(c.after), c.factor] for c in cliff.changes],
        "kind": cliff.cause.kind,
        "cause": TITLES[cliff.cause.kind],
        "text": cliff.cause.text,
        "likewise": cliff.likewise,
        "beside": cliff.beside,
    }


def _expansion(found: Expansion, points: Points) -> dict[str, Any]:
    return {
        "label": found.metric.label + at_text(found),
        "baseline": found.baseline.id,
        "best": found.best.id,
        "from": number(found.baseline.value(found.metric.key)),
        "to": number(found.best.value(found.metric.key)),
        "total": found.total,
        "note": order_note(found),
        "factors": [
            {"name": f.name, "changes": changes_text(f.changes, points), "value": f.value, "low": f.low, "high": f.high}
            for f in found.factors
        ],
    }
