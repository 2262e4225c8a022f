"""The demo: a gateway, four simulated workers, and the shipped agentic trace under `warm` and `round-robin`.

`python -m loadgen.demo` shows the table and stays up until Ctrl-C; with --exit it ends after the table.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click
import orjson
from rich.console import Console

from loadgen.local import LocalFleet, StartError
from loadgen.progress import ProgressView
from loadgen.readers import TraceError
from loadgen.replay import ReplayError, ReplayOptions, ReplayResult, replay
from loadgen.report import error_lines, result_table

WORKERS = 4
KV_CAPACITY = 400_000  # tokens a worker: less than half of what the live sessions hold together, so where they live matters
SPEED = 6.0  # simulated engines run this many times faster than real
LIVE_SESSIONS = 40
TIME_SCALE = 0.05  # tool and user gaps, shortened so that a minute shows what a quarter of an hour would
RAMP_S = 5.0
TRACE = Path(__file__).parent.parent / "traces" / "agentic.jsonl"


@click.command()
@click.option("--exit", "leave", is_flag=True, help="End after the table instead of staying up.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result as JSON.")
@click.option("--duration", type=click.FloatRange(1), default=60.0, show_default=True, help="Seconds to send requests, for each policy.")
@click.option("--trace", type=click.Path(exists=True, path_type=Path), default=TRACE, help="Trace to replay.  [default: the shipped one]")
def main(leave: bool, json_file: Path | None, duration: float, trace: Path) -> None:
    """Play agent sessions through a gateway to four simulated workers, under two routing policies in turn."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    console = Console()
    try:
        with LocalFleet(WORKERS, ["--speed", str(SPEED), "--kv-capacity", str(KV_CAPACITY)]) as fleet:
            console.print(f"gateway on {fleet.url}, {WORKERS} simulated workers of {KV_CAPACITY:,} KV tokens each", highlight=False)
            result = asyncio.run(_compare(fleet.url, trace, duration))
            _show(console, result)
            if json_file is not None:
                json_file.write_bytes(orjson.dumps(_to_json(result), option=orjson.OPT_INDENT_2) + b"\n")
            if not leave:
                console.print(f"\ndashboard: {fleet.url}/   OpenAI base URL: {fleet.url}/v1   Ctrl-C ends", highlight=False)
                with suppress(KeyboardInterrupt):
                    threading.Event().wait()
    except (StartError, ReplayError, TraceError) as error:
        raise click.ClickException(str(error)) from None


def _end(number: int, frame: FrameType | None) -> None:
    """Leave by way of every `finally`, so that no child outlives the demo."""
    sys.exit(128 + number)


async def _compare(url: str, trace: Path, duration_s: float) -> ReplayResult:
    options = ReplayOptions(
        trace=trace,
        url=url,
        policies=("warm", "round-robin"),
        live_sessions=LIVE_SESSIONS,
        duration_s=duration_s,
        time_scale=TIME_SCALE,
        ramp_s=RAMP_S,
        kv_capacity_tokens=WORKERS * KV_CAPACITY,
    )
    with ProgressView(Console(stderr=True)) as view:
        return await replay(options, view)


def _show(console: Console, result: ReplayResult) -> None:
    console.print(result_table(result))
    for line in error_lines(result):
        console.print(line, markup=False, highlight=False)
    warm, other = result.runs["warm"], result.runs["round-robin"]
    if warm.hit_rate and warm.hit_bound_lru and warm.ttft_p90_s and other.ttft_p90_s:
        console.print(
            f"warm hits {warm.hit_rate / warm.hit_bound_lru:.1%} of what one LRU cache as large as all workers' would; "
            f"its TTFT p90 is {warm.ttft_p90_s / other.ttft_p90_s:.2f} of round-robin's",
            highlight=False,
        )


def _to_json(result: ReplayResult) -> dict[str, Any]:
    """As `loadgen replay --json` writes it."""
    return result.to_json()


if __name__ == "__main__":
    main()
