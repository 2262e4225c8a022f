from __future__ import annotations

import asyncio
import io
import os
import signal
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from loadgen import cli
from loadgen.progress import ProgressView
from loadgen.replay import Progress
from tests.loadgen.fake_worker import FakeWorker


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    result = invoke("generate", "-o", tmp_path / "t.jsonl", "--sessions", 3, "--max-context", "20k", "--seed", 5)
    assert result.exit_code == 0, result.output
    return tmp_path / "t.jsonl"


async def invoke_in_thread(*arguments: str | Path) -> Result:
    """For commands that ask a server running in this thread's loop."""
    return await asyncio.to_thread(invoke, *arguments)


def test_generate_writes_the_trace_and_its_shape(tmp_path: Path) -> None:
    for name in ("a", "b"):
        result = invoke("generate", "-o", tmp_path / f"{name}.jsonl", "--sessions", 2, "--json", tmp_path / "shape.json")
        assert result.exit_code == 0, result.output
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert orjson.loads((tmp_path / "shape.json").read_bytes())["sessions"] == 2


def test_inspect_shows_bounds(trace: Path, tmp_path: Path) -> None:
    result = invoke("inspect", trace, "--kv-capacity", "1.5M", "--json", tmp_path / "shape.json")
    assert result.exit_code == 0, result.output
    shape = orjson.loads((tmp_path / "shape.json").read_bytes())
    assert 0.8 < shape["hit_bound_lru"] <= shape["hit_bound"] < 1
    assert shape["context_tokens"]["p100"] <= 20_000
    assert f"{shape['hit_bound']:.1%}" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["inspect", "absent.jsonl"], "no such file"),
        (["replay", "absent.jsonl"], "no such file"),
        (["replay", "absent.jsonl", "--rate", "3"], "--rate and --speedup are for --mode open"),
        (["replay", "absent.jsonl", "--api-key", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        (["replay", "absent.jsonl", "--kv-capacity", "lots"], "write 600000, 600k or 2.4M"),
        (["generate", "-o", "x.jsonl", "--max-context", "100"], "at least 4096"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert complaint in result.output


def test_every_command_shows_examples_in_its_help() -> None:
    for command in ("generate", "replay", "inspect"):
        assert f"loadgen {command} " in invoke(command, "--help").output.partition("Options:")[0].partition("\n\n")[2]


def test_replay_compares_policies_in_a_table_and_json(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_replay", cli.replay)  # signal handlers need the main thread
    monkeypatch.setenv("COLUMNS", "120")

    async def scenario() -> tuple[Result, FakeWorker]:
        async with FakeWorker() as worker:
            arguments = ["replay", trace, "--url", f"{worker.url}/v1", "--compare", "round-robin", "--requests", "12"]
            result = await invoke_in_thread(*arguments, "--time-scale", "0", "--ramp", "0", "--json", tmp_path / "r.json")
            return result, worker

    result, worker = asyncio.run(scenario())
    assert result.exit_code == 0, result.output
    assert len(worker.seen) == 24
    figures = orjson.loads((tmp_path / "r.json").read_bytes())
    assert list(figures) == ["warm", "round-robin"]
    assert figures["warm"]["requests"] == 12
    assert figures["warm"]["hit_rate"] > 0.3
    assert "round-robin" in result.output
    assert "TTFT p50 / p90 / p99" in result.output


def test_replay_over_several_gateways_says_so(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_replay", cli.replay)

    async def scenario() -> Result:
        async with FakeWorker() as one, FakeWorker() as other:
            urls = ["--url", one.url, "--url", f"{other.url}/v1/", "--spread", "session"]
            return await invoke_in_thread("replay", trace, *urls, "--requests", "12", "--time-scale", "0", "--ramp", "0")

    result = asyncio.run(scenario())
    assert result.exit_code == 0, result.output
    assert "spread over 2 gateways by session" in result.output


def test_replay_fails_when_every_request_does(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_replay", cli.replay)

    async def scenario() -> Result:
        async with FakeWorker(fail_every=1) as worker:
            return await invoke_in_thread("replay", trace, "--url", worker.url, "--requests", "3", "--ramp", "0")

    result = asyncio.run(scenario())
    assert result.exit_code == 1
    assert "HTTP 503: overloaded" in result.output
    assert "every request failed" in result.output


async def test_an_interrupt_ends_the_run_and_keeps_its_figures(trace: Path) -> None:
    async with FakeWorker() as worker:
        options = cli.ReplayOptions(trace, worker.url, ramp_s=0.0, max_gap_s=0.01)
        task = asyncio.create_task(cli._replay(options))
        await worker.until_seen(3)
        os.kill(os.getpid(), signal.SIGINT)
        result = await task
    assert result.runs["current"].interrupted
    assert result.runs["current"].requests >= 1


def test_a_replay_whose_time_is_up_says_what_it_waits_for() -> None:
    shown = io.StringIO()
    with ProgressView(Console(file=shown)) as view:
        view(Progress("warm", 90, None, 61.0, 60.0, 0, 0.9, 0.95, 0.1, in_flight=7))
    assert "time is up, 7 answers awaited" in shown.getvalue()
