"""`loadgen calibrate`: a latency model from a live engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import time_ns
from typing import Any, get_args

import click
import httpx
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from loadgen.calibrate.fit import Calibration, Error, fit
from loadgen.calibrate.oracle import fit_oracle
from loadgen.calibrate.probe import CalibrationError, Measured, ProbeOptions, measure
from loadgen.client import StreamClient
from loadgen.conversation import Dialect
from loadgen.options import TOKENS, write_json


@click.command("calibrate", context_settings={"show_default": True})
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option("--model", help="Model to ask for; by default the server's first.")
@click.option("--max-context", type=TOKENS, default=16_384, help="Longest prompt measured, in tokens (at least 512).")
@click.option("--max-batch", type=click.IntRange(2), default=16, help="Largest number of sequences decoding at once.")
@click.option("--chunk", type=TOKENS, default=8192, help="The engine's token budget of a step (max_num_batched_tokens).")
@click.option("--tokens-per-step", type=click.FloatRange(1), default=1.0, help="With speculation: output tokens a sequence gains per step.")
@click.option("--repeat", type=click.IntRange(1), default=3, help="Measurements of each point, of which the median counts.")
@click.option(
    "--pause", type=click.FloatRange(0, 60), default=0.2, help="Mean seconds of rest before a prompt, as between an agent's turns."
)
@click.option("--dialect", type=click.Choice(get_args(Dialect)), default="completions", help="Endpoint to ask.")
@click.option("--api-key", "api_key_variable", metavar="ENV", help="Name of the environment variable that holds the key.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds until a request has failed.")
@click.option("--oracle", type=(str, str, str), metavar="MODEL SYSTEM BACKEND", help="Ask aiconfigurator-core instead of an engine.")
@click.option("--tp", type=click.IntRange(1), default=1, help="With --oracle: tensor parallel size.")
@click.option(
    "--attention-dp", type=click.IntRange(1), default=1, help="With --oracle: attention data-parallel size (experts spread over all)."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the YAML to this file too.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write points, coefficients and errors as JSON."
)
def calibrate_command(
    urls: tuple[str, ...],
    model: str | None,
    max_context: int,
    max_batch: int,
    chunk: int,
    tokens_per_step: float,
    repeat: int,
    pause: float,
    dialect: Dialect,
    api_key_variable: str | None,
    timeout: float,
    oracle: tuple[str, str, str] | None,
    tp: int,
    attention_dp: int,
    output: Path | None,
    json_file: Path | None,
) -> None:
    """Fit a latency model to the engine at URL and print it as `latency:` of a worker's profile.

    The engine should be idle: it gets cold prompts of several lengths, new tokens on cached prompts, and batches that decode together. The
    error is told of points that the fit has not seen. Several URLs of equal engines are measured at the same time, as they will be busy
    together, and give one fit: for engines that share a machine.

    \b
    loadgen calibrate http://10.0.0.5:8000 -o latency.yaml
    loadgen calibrate http://127.0.0.1:8001 --max-context 100k --max-batch 64 --chunk 16384 --json points.json
    loadgen calibrate --oracle Qwen/Qwen3-32B-FP8 h200_sxm vllm --tp 2
    """
    if bool(urls) == bool(oracle):
        raise click.UsageError("give the URL of an engine, or --oracle with a model, a system and a backend")
    if api_key_variable is not None and api_key_variable not in os.environ:
        raise click.UsageError(f"--api-key names an environment variable, and {api_key_variable} is not set")
    if max_context < 512:
        raise click.UsageError("--max-context must be at least 512 tokens")
    measured: list[Measured] = []
    try:
        if oracle:
            calibration = fit_oracle(*oracle, tp=tp, attention_dp=attention_dp)
        else:
            options = ProbeOptions(max_context, max_batch, repeat=repeat, pause_s=pause, dialect=dialect)
            key = os.environ[api_key_variable] if api_key_variable else None
            roots = [url.rstrip("/").removesuffix("/v1") for url in urls]
            name, longest = _served(roots[0], model, key)
            if longest is not None and max_context > longest - 2048:
                options = replace(options, max_context=max(512, longest - 2048))
            measured = asyncio.run(_measure(roots, name, options, key, timeout))
            points = [point for each in measured for point in each.prefills], [point for each in measured for point in each.decodes]
            calibration = fit(*points, chunk=chunk, tokens_per_step=tokens_per_step, source=f"loadgen calibrate, {name}")
    except (CalibrationError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    for note in dict.fromkeys(note for each in measured for note in each.notes):
        click.echo(f"note: {note}", err=True)
    text = as_yaml(calibration)
    click.echo(text, nl=False)
    if output is not None:
        try:
            output.write_text(text)
        except OSError as error:
            raise click.ClickException(f"{output}: cannot be written: {error}") from None
    data = asdict(calibration) | {"latency": calibration.latency.model_dump(), "measured": [asdict(each) for each in measured]}
    write_json(json_file, data)


def as_yaml(calibration: Calibration) -> str:
    """The coefficients, ready to be pasted into a profile, with the errors as comments."""
    values = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in calibration.latency.model_dump(exclude={"source"}).items()
    }
    values["source"] = calibration.latency.source
    return (
        f"# prefill: {_told(calibration.prefill_error)} of {calibration.prefills} points\n"
        f"# decode:  {_told(calibration.decode_error)} of {calibration.decodes} points\n"
        + yaml.safe_dump({"latency": values}, sort_keys=False)
        + f"# of a simulated fleet: overhead_s: {calibration.overhead_s:.4g}, overhead_token_s: {calibration.overhead_token_s:.3g}\n"
    )


def _told(error: Error) -> str:
    if error.median is None or error.p90 is None:
        return "error not known, too few points;"
    return f"error median {error.median:.1%}, p90 {error.p90:.1%}, of every fourth point, not seen by the fit;"


def _served(url: str, model: str | None, key: str | None) -> tuple[str, int | None]:
    """The model to ask for, and its longest context where the server tells. Raises CalibrationError."""
    try:
        response = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"} if key else {}, trust_env=False)
        served = response.json()["data"]
        found = next((entry for entry in served if model in (None, entry["id"])), {"id": model})
        longest = found.get("max_model_len")
        return str(found["id"]), longest if isinstance(longest, int) else None
    except httpx.InvalidURL as error:
        raise CalibrationError(f"{url!r} is not a URL: {error}") from None
    except httpx.HTTPError as error:
        raise CalibrationError(f"nothing answers at {url} ({error or type(error).__name__})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        if model is None:
            raise CalibrationError(f"{url}/v1/models names no model; pass --model") from None
        return model, None


async def _measure(urls: list[str], model: str, options: ProbeOptions, key: str | None, timeout: float) -> list[Measured]:
    seed = time_ns() & 0xFFFF_FFFF  # an engine keeps the prompts of the run before in its cache
    clients = [StreamClient(url, api_key=key, timeout_s=timeout) for url in urls]
    try:
        with _bars() as bars:
            runs = []
            for number, client in enumerate(clients):
                task = bars.add_task(urls[number], total=None, what="")

                def tell(done: int, total: int, what: str, task: Any = task) -> None:
                    bars.update(task, completed=done, total=total, what=what)

                runs.append(measure(client, model, replace(options, seed=seed + number), tell))
            return list(await asyncio.gather(*runs))
    finally:
        for client in clients:
            client.close()


@contextmanager
def _bars() -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield bars
