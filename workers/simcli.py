"""`warmroute worker sim`: simulated engines from the command line."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import click
from click.core import ParameterSource
from pydantic import ValidationError

from workers.latency import LATENCY_MODELS
from workers.profile import WorkerProfile
from workers.simfaults import Faults
from workers.simlike import Described, LikeError, described_workers
from workers.simserver import SimServer

_SAID_BY_FILE = (
    "host", "port", "count", "latency", "kv_capacity", "max_num_seqs", "scheduling_policy", "long_prefill_token_threshold", "settings",
)  # fmt: skip
_EPILOG = """\b
Examples:
  One worker on port 8001, as Qwen3-32B on two H100 would answer:
    warmroute worker sim --port 8001
\b
  Four workers on ports 8001 to 8004, ten times faster, each with room for 600,000 tokens of KV cache:
    warmroute worker sim --port 8001 --count 4 --speed 10 --kv-capacity 600000
\b
  Another engine: latency by name, everything else of a worker's profile by key:
    warmroute worker sim --latency gpt-oss-120b-h200 --profile max_num_batched_tokens=16384 --profile block_size=64
\b
  An engine that serves lower priorities first and lets a cold prompt take half of each step:
    warmroute worker sim --scheduling-policy priority --long-prefill-token-threshold 4096
\b
  One for every worker of a gateway's configuration, on its port and with its profile:
    warmroute worker sim --like gateway.yaml
\b
  Make a running worker fail, look at it, and heal it:
    curl -X POST localhost:8001/sim/faults -d '{"freeze": true}'
    curl localhost:8001/sim/state
    curl -X DELETE localhost:8001/sim/faults
"""


@click.command("sim", epilog=_EPILOG)
@click.option(
    "--like",
    type=click.Path(dir_okay=False, path_type=Path),
    help="One for each worker of this gateway configuration: its port, model, profile.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8001, show_default=True, type=click.IntRange(0, 65535), help="Port of the first worker; 0 takes free ones.")
@click.option("--count", default=1, show_default=True, type=click.IntRange(1), help="Workers, on consecutive ports, each its own engine.")
@click.option("--model", default="sim", show_default=True, help="Model name they serve.")
@click.option("--max-model-len", type=click.IntRange(1), help="Longest context in tokens.  [default: the KV capacity]")
@click.option("--latency", type=click.Choice(list(LATENCY_MODELS)), help="Built-in latency coefficients.")
@click.option("--kv-capacity", type=click.IntRange(1), help="KV cache in tokens.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Batch slots.")
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    help="Order of the queue: by arrival, or by `priority`.  [default: fcfs]",
)
@click.option(
    "--long-prefill-token-threshold", type=click.IntRange(0), help="Most tokens of one prompt in a step while others run or wait."
)
@click.option("--profile", "settings", multiple=True, metavar="KEY=VALUE", help="Any other field of a worker's profile; repeatable.")
@click.option("--speed", default=1.0, show_default=True, type=click.FloatRange(0, min_open=True), help="How many times faster than real.")
@click.option("--freeze", is_flag=True, help="Fault: accept connections and never answer.")
@click.option("--error-rate", default=0.0, type=click.FloatRange(0, 1), help="Fault: share of requests answered with an error.")
@click.option("--error-status", default=500, show_default=True, type=click.IntRange(400, 599), help="Fault: status of these errors.")
@click.option("--die-after-chunks", type=click.IntRange(0), help="Fault: reset each stream's connection after this many events.")
@click.option(
    "--slow-factor", default=1.0, type=click.FloatRange(0, min_open=True), help="Fault: engine steps take this many times as long."
)
@click.option("--first-token-delay", default=0.0, type=click.FloatRange(0), help="Fault: seconds a request is held before it is queued.")
@click.pass_context
def sim_command(
    context: click.Context,
    like: Path | None,
    host: str,
    port: int,
    count: int,
    model: str,
    max_model_len: int | None,
    latency: str | None,
    kv_capacity: int | None,
    max_num_seqs: int | None,
    scheduling_policy: str | None,
    long_prefill_token_threshold: int | None,
    settings: tuple[str, ...],
    speed: float,
    freeze: bool,
    error_rate: float,
    error_status: int,
    die_after_chunks: int | None,
    slow_factor: float,
    first_token_delay: float,
) -> None:
    """Run simulated LLM engines that look like vLLM servers.

    They batch, prefill in chunks, keep a prefix cache and take the time a real engine would take, but need no GPU and no model: try a
    gateway against a fleet on a laptop. Answers are made-up code of the length asked for (max_tokens, else 128 tokens). With `tools` and
    the word "call" in the newest message, or a forced tool_choice, they answer with a tool call.
    """
    options: dict[str, str | int | None] = {
        "latency": latency,
        "kv_capacity_tokens": kv_capacity,
        "max_num_seqs": max_num_seqs,
        "scheduling_policy": scheduling_policy,
        "long_prefill_token_threshold": long_prefill_token_threshold,
    }
    if like is not None:
        workers = _like(like, context)
    else:
        profile = _profile(settings, options)
        workers = [Described(host, port + number if port else 0, model, profile) for number in range(count)]
    faults = Faults(
        freeze=freeze,
        error_rate=error_rate,
        error_status=error_status,
        die_after_chunks=die_after_chunks,
        slow_factor=slow_factor,
        before_first_token_delay_s=first_token_delay,
    )
    try:
        servers = [
            SimServer(
                worker.profile,
                model=worker.model or model,
                max_model_len=max_model_len,
                speed=speed,
                faults=faults,
                host=worker.host,
                port=worker.port,
            )
            for worker in workers
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_run(servers))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


async def _run(servers: list[SimServer]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        for server in servers:
            try:
                await stack.enter_async_context(server)
            except OSError as error:
                raise click.ClickException(f"cannot listen on {server.host}:{server.port}: {error.strerror or error}") from None
            click.echo(f"simulated {server.model} on {server.url}")
        await stop.wait()


def _like(file: Path, context: click.Context) -> list[Described]:
    for name in _SAID_BY_FILE:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{'profile' if name == 'settings' else name.replace('_', '-')} is said by the file of --like")
    try:
        return described_workers(file)
    except LikeError as error:
        raise click.ClickException(str(error)) from None


def _profile(settings: tuple[str, ...], options: dict[str, str | int | None]) -> WorkerProfile:
    fields: dict[str, object] = {"engine": "sim"}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.BadParameter(f"{setting!r} is not KEY=VALUE", param_hint="--profile")
        fields[key] = value
    fields |= {key: value for key, value in options.items() if value is not None}
    try:
        profile = WorkerProfile.model_validate(fields)
        profile.latency_model()
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        raise click.BadParameter(f"{problems}. Known keys: {', '.join(WorkerProfile.model_fields)}", param_hint="--profile") from None
    except KeyError as error:
        raise click.BadParameter(str(error.args[0]), param_hint="--profile") from None
    return profile
