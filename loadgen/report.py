"""Tables: a replay's policies side by side, and a trace's shape."""

from __future__ import annotations

from rich.table import Table

from loadgen.metrics import RunResult
from loadgen.replay import ReplayResult


def result_table(result: ReplayResult) -> Table:
    """One column per policy, one row per figure."""
    runs = list(result.runs.values())
    spread = f", spread over {result.gateways} gateways by {result.spread}" if result.gateways > 1 else ""
    table = Table(title=f"replay{spread}", title_justify="left")
    table.add_column("", no_wrap=True)
    for policy, run in result.runs.items():
        table.add_column(policy + (" (ended early)" if run.interrupted else ""), justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("requests", *(f"{run.requests}" for run in runs))
    row("errors", *(f"{run.errors}" for run in runs))
    row("hit rate", *(_percent(run.hit_rate) for run in runs))
    row("hit bound (infinite cache)", *(_percent(run.hit_bound) for run in runs))
    if any(run.hit_bound_lru is not None for run in runs):
        row("hit bound (pooled LRU)", *(_percent(run.hit_bound_lru) for run in runs))
    row("TTFT p50 / p90 / p99", *(_times(run.ttft_p50_s, run.ttft_p90_s, run.ttft_p99_s) for run in runs))
    row("ITL p50 / p90 / p99", *(_times(run.itl_p50_s, run.itl_p90_s, run.itl_p99_s) for run in runs))
    row("E2E p50 / p90 / p99", *(_times(run.e2e_p50_s, run.e2e_p90_s, run.e2e_p99_s) for run in runs))
    row("output tokens/s", *(f"{run.output_tokens_per_s:,.0f}" for run in runs))
    row("uncached input tokens/s", *(f"{run.uncached_input_tokens_per_s:,.0f}" for run in runs))
    row("requests by worker", *(_shares(run) for run in runs))
    row("schedule lag p50 / p99", *(_times(run.schedule_lag_p50_s, run.schedule_lag_p99_s) + _flag(run) for run in runs))
    row("duration", *(f"{run.duration_s:.1f} s" for run in runs))
    return table


def error_lines(result: ReplayResult) -> list[str]:
    """The errors of every run, most frequent first."""
    return [f"{policy}: {count} x {kind}" for policy, run in result.runs.items() for kind, count in run.error_kinds.items()]


def seconds(value: float | None) -> str:
    """A time with three digits, in ms below one second."""
    if value is None:
        return "-"
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _times(*values: float | None) -> str:
    """Times in one unit, that of the longest: `16.5 / 58.9 / 241 ms`."""
    measured = [value for value in values if value is not None]
    if not measured:
        return "-"
    scale, unit = (1000, "ms") if max(measured) < 0.9995 else (1, "s")
    numbers = ("-" if value is None else f"{value * scale:.3g}" if value * scale < 999.5 else f"{value * scale:.0f}" for value in values)
    return f"{' / '.join(numbers)} {unit}"


def _shares(run: RunResult) -> str:
    return "\n".join(f"{worker} {share:.0%}" for worker, share in run.worker_shares.items()) or "-"


def _flag(run: RunResult) -> str:
    return "\ndegraded: sent late" if run.degraded else ""
