"""The command line: `loadgen`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from loadgen.calibratecli import calibrate_command
from loadgen.conversation import Dialect
from loadgen.frontiercli import frontier_command
from loadgen.generate import generate as generate_sessions
from loadgen.inspect import inspect as inspect_trace
from loadgen.inspect import shape_table
from loadgen.options import TOKENS, format_option, gaps_option, json_option, kv_capacity_option, max_context_option, write_json
from loadgen.progress import ProgressView
from loadgen.readers import Gaps, TraceError, TraceFormat, read_trace
from loadgen.recommendcli import recommend_command
from loadgen.replay import ReplayError, ReplayOptions, ReplayResult, Spread, replay
from loadgen.report import error_lines, result_table
from loadgen.simulatecli import simulate_command
from loadgen.sweepcli import sweep_command
from loadgen.trace import limit_context, write_trace

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None  # type: ignore[assignment]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="warmroute")
def main() -> None:
    """Traces of coding agents: their replay against an OpenAI-compatible server, and simulated fleets that serve them.

    \b
    loadgen inspect traces/agentic.jsonl
    loadgen simulate traces/agentic.jsonl --workers 4 --policy warm,round-robin
    loadgen replay traces/agentic.jsonl --url http://127.0.0.1:8000 --compare round-robin
    loadgen generate -o mine.jsonl --sessions 200 --max-context 128k
    """


@main.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File to write (.jsonl or .jsonl.gz).")
@click.option("--sessions", type=click.IntRange(1), default=64, show_default=True, help="Number of sessions.")
@click.option("--seed", type=int, default=7, show_default=True, help="The same seed gives the same bytes.")
@click.option("--max-context", type=TOKENS, default=60_000, show_default=True, help="Most tokens of a prompt and its answer.")
@json_option
def generate(output: Path, sessions: int, seed: int, max_context: int, json_file: Path | None) -> None:
    """Write a synthetic agentic trace.

    Sessions share their harness's tools and system prompt, grow turn by turn, wait for tools and users, spawn sub-agents and are
    compacted at the context limit. Lengths and gaps are drawn from percentiles of recorded coding sessions.

    \b
    loadgen generate -o traces/agentic.jsonl
    loadgen generate -o long.jsonl.gz --sessions 500 --max-context 200k --seed 1
    """
    try:
        made = generate_sessions(sessions, seed, max_context)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    write_trace(output, made)
    click.echo(f"{output}: {len(made)} sessions, {output.stat().st_size:,} bytes", err=True)
    _show_shape(made, None, json_file)


@main.command()
@click.argument("trace", type=click.Path(path_type=Path))
@format_option
@gaps_option
@max_context_option
@kv_capacity_option
@json_option
def inspect(
    trace: Path, trace_format: TraceFormat, gaps: Gaps, max_context: int | None, kv_capacity: int | None, json_file: Path | None
) -> None:
    """Show what a trace holds and what a prefix cache could hit.

    Reads Weka (hash_ids or hash_runs), Mooncake, Azure and mini-SWE-agent traces, gzipped or not, and directories of them.

    \b
    loadgen inspect traces/agentic.jsonl --kv-capacity 2.4M
    loadgen inspect mooncake.jsonl.gz --json shape.json
    """
    try:
        sessions = read_trace(trace, trace_format, gaps)
    except TraceError as error:
        raise click.ClickException(str(error)) from None
    if max_context is not None:
        sessions = limit_context(sessions, max_context)
        if not sessions:
            raise click.UsageError(f"no session has a step within {max_context:,} tokens")
    _show_shape(sessions, kv_capacity, json_file)


def _show_shape(sessions: list[Any], kv_capacity: int | None, json_file: Path | None) -> None:
    shape = inspect_trace(sessions, kv_capacity)
    Console().print(shape_table(shape))
    write_json(json_file, shape.to_json())


@main.command(name="replay", context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--url", "urls", multiple=True, default=["http://127.0.0.1:8000"], help="Root of the server to ask; repeatable, for several gateways."
)
@click.option("--spread", type=click.Choice(get_args(Spread)), default="request", help="Several gateways: what goes to one at random.")
@click.option("--model", help="Model to ask for; by default the server's first.")
@click.option("--policy", help="Routing policies to set at the gateway and play in turn, e.g. warm or warm,random.")
@click.option("--compare", help="More policies to play after --policy (or after warm), e.g. round-robin.")
@click.option("--mode", type=click.Choice(["closed", "open"]), default="closed", help="Who sets the pace: answers or the clock.")
@click.option("--sessions", type=click.IntRange(1), default=32, help="Closed loop: sessions that are alive at a time.")
@click.option("--requests", type=click.IntRange(1), help="End after this many requests. Sessions start over when the trace is through.")
@click.option(
    "--duration", type=click.FloatRange(0, min_open=True), help="Send nothing after this many seconds; answers under way are awaited."
)
@click.option("--warmup", type=click.IntRange(0), default=0, help="First requests that are sent but not measured.")
@click.option("--time-scale", type=click.FloatRange(0), default=1.0, help="Gaps are multiplied by this.")
@click.option("--max-gap", type=click.FloatRange(0), default=300.0, help="Cut longer gaps to this many seconds, before scaling.")
@click.option("--ramp", type=click.FloatRange(0), default=10.0, help="Closed loop: start the sessions over this many seconds.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Open loop: sessions a second (Poisson), not the trace's times.")
@click.option("--speedup", type=click.FloatRange(0, min_open=True), default=1.0, help="Open loop: divide the trace's times.")
@click.option("--dialect", type=click.Choice(get_args(Dialect)), default="chat", help="Endpoint to ask.")
@click.option("--api-key", "api_key_variable", metavar="ENV", help="Name of the environment variable that holds the key.")
@click.option("--session-header/--no-session-header", default=True, help="Send x-session-id.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Ask the engine for answers of the recorded length.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds until a request has failed.")
@click.option("--seed", type=int, default=0, help="For drawn gaps and arrivals.")
@format_option
@gaps_option
@max_context_option
@kv_capacity_option
@json_option
def replay_command(
    trace: Path,
    urls: tuple[str, ...],
    policy: str | None,
    compare: str | None,
    sessions: int,
    duration: float | None,
    max_gap: float,
    ramp: float,
    api_key_variable: str | None,
    timeout: float,
    trace_format: TraceFormat,
    gaps: Gaps,
    kv_capacity: int | None,
    json_file: Path | None,
    seed: int,
    **same_named: Any,
) -> None:
    """Play a trace against a server and measure what its users see.

    By default sessions play in a closed loop: the next turn goes out when the answer has come and the tool's or user's gap has passed.
    Hit rates are the server's own (usage.prompt_tokens_details.cached_tokens), next to what an infinite cache would have hit. The text
    of prompts is made from the trace's block ids; every run has its own, so that no run is warmed by an earlier one.

    \b
    loadgen replay traces/agentic.jsonl --requests 500
    loadgen replay traces/agentic.jsonl --compare round-robin --duration 60 --time-scale 0.1
    loadgen replay mooncake.jsonl.gz --mode open --speedup 10 --url http://10.0.0.5:8000 --json result.json
    loadgen replay traces/agentic.jsonl --url http://10.0.0.5:8000 --url http://10.0.0.6:8000 --spread request
    """
    if (same_named["rate"] is not None or same_named["speedup"] != 1.0) and same_named["mode"] != "open":
        raise click.UsageError("--rate and --speedup are for --mode open")
    if api_key_variable is not None and api_key_variable not in os.environ:
        raise click.UsageError(f"--api-key names an environment variable, and {api_key_variable} is not set")
    policies = tuple(dict.fromkeys([*_names(policy or ("warm" if compare else None)), *_names(compare)]))
    roots = [url.rstrip("/").removesuffix("/v1") for url in urls]
    try:
        options = ReplayOptions(
            trace=read_trace(trace, trace_format, gaps, seed),
            url=roots[0],
            more_urls=tuple(roots[1:]),
            policies=policies,
            live_sessions=sessions,
            duration_s=duration,
            max_gap_s=max_gap,
            ramp_s=ramp,
            api_key=os.environ[api_key_variable] if api_key_variable else None,
            timeout_s=timeout,
            kv_capacity_tokens=kv_capacity,
            seed=seed,
            **same_named,
        )
        result = (uvloop or asyncio).run(_replay(options))
    except (ReplayError, TraceError) as error:
        raise click.ClickException(str(error)) from None
    console = Console()
    console.print(result_table(result))
    for line in error_lines(result):
        console.print(line, markup=False, highlight=False)
    write_json(json_file, result.to_json())
    if any(run.requests and run.errors == run.requests for run in result.runs.values()):
        raise click.ClickException("every request failed")


async def _replay(options: ReplayOptions) -> ReplayResult:
    """Replay with live progress; the first interrupt ends the run and keeps what was measured."""
    gc.collect()
    gc.freeze()  # the trace's many objects would make every full collection a pause of milliseconds
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        with ProgressView(Console(stderr=True)) as view:
            return await replay(options, view, stop)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


for command in (simulate_command, sweep_command, frontier_command, recommend_command, calibrate_command):
    main.add_command(command)
