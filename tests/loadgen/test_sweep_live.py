"""Sweeps on programs: simulated workers behind a real gateway, and a Ray cluster."""

from __future__ import annotations

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadgen.generate import generate
from loadgen.local import Program
from loadgen.results import read_runs
from loadgen.sweep.config import SweepError, load_sweep
from loadgen.sweep.configuration import CannotRun
from loadgen.sweep.evaluate import SimulatedRuns
from loadgen.sweep.live import LiveRuns, _free_ports, live_configuration
from loadgen.sweep.runner import run_sweep
from loadgen.sweepcli import sweep_command
from loadgen.trace import write_trace
from tests.loadgen import sweep_samples as samples
from tests.loadgen.sweep_samples import write_sweep

PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"


def live(directory: Path, **changes: Any) -> Path:
    write_trace(directory / "t.jsonl", generate(6, 1, 20_000))
    return write_sweep(
        directory,
        **{
            "mode": "live",
            "engines": {"speed": 20},
            "base": {"pools": [{"count": 2, "profile": {"kv_capacity_tokens": 300_000, "tp": 2}}]},
            "load": {"requests": 15, "warmup": 5, "ramp_s": 0, "time_scale": 0, "live_sessions": 3},
            **changes,
        },
    )


@pytest.mark.slow
def test_live_configurations_start_measure_and_end(tmp_path: Path) -> None:
    sweep = load_sweep(live(tmp_path, axes={"policy": ["warm", "round-robin"], "profile.latency": ["gpt-oss-120b-h200"]}, seeds=2))
    said: list[str] = []
    summary = run_sweep(sweep, tmp_path / "r.jsonl", LiveRuns(sweep, said.append))
    assert summary.failures == [] and sum("2 workers ready" in line for line in said) == 2, "the seeds share their engines"
    runs = read_runs(tmp_path / "r.jsonl")
    assert [(run.arm["policy"], run.seed) for run in runs] == [("warm", 0), ("warm", 1), ("round-robin", 0), ("round-robin", 1)]
    for run in runs:
        assert (run.source, run.gpus, run.kv_capacity_tokens) == ("live", 4, 600_000)
        figures = run.figures
        assert figures.requests == 15 and figures.errors == 0 and figures.output_tokens > 0
        assert figures.user_tokens_per_s and figures.ttft_mean_s and figures.e2e_mean_s and run.output_per_gpu > 0
        assert figures.hit_rate is not None and figures.hit_bound is not None and 0 < figures.hit_rate < figures.hit_bound + 0.01


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_a_line_with_its_reason(tmp_path: Path) -> None:
    engines = {"launch": str(PROFILES / "tiny-cpu.yaml"), "python": str(tmp_path / "no-python"), "startup_timeout_s": 20}
    axes = {"profile.max_num_seqs": [4]}
    sweep = load_sweep(live(tmp_path, engines=engines, base={"pools": [{"profile": {"model": "m"}}]}, axes=axes))
    run_sweep(sweep, tmp_path / "r.jsonl", LiveRuns(sweep, lambda text: None))
    (run,) = read_runs(tmp_path / "r.jsonl")
    assert run.source == "live" and "cannot run" in str(run.error)


def test_accelerators_are_counted_and_launch_profiles_checked(tmp_path: Path) -> None:
    engines = {"launch": str(PROFILES / "qwen3-32b-fp8-tp2.yaml"), "devices": 8}
    axes = {"profile.tp": [1, 2, 4], "count": [1, 2, 4]}
    sweep = load_sweep(live(tmp_path, engines=engines, base={}, axes=axes, load={"live_sessions_per_gpu": 2}))
    made = live_configuration(sweep, {"profile.tp": 4, "count": 2})
    assert made.gpus == 8 and made.load["live_sessions"] == 16 and "advance" not in made.load
    with pytest.raises(CannotRun, match="need 16 accelerators"):
        live_configuration(sweep, {"profile.tp": 4, "count": 4})
    with pytest.raises(SweepError, match="unknown key"):
        live_configuration(load_sweep(live(tmp_path, engines=engines, base={}, axes={"profile.tpp": [1]})), {"profile.tpp": 1})


def test_without_a_cluster_ray_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = live(tmp_path, mode=None, engines=None)
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(sweep_command, [str(file), "--ray", "-o", str(tmp_path / "r.jsonl")])
    assert result.exit_code == 1 and "pip install 'warmroute[ray]'" in result.output


@pytest.mark.slow
def test_runs_spread_over_a_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    port, scratch = _free_ports(1), tempfile.mkdtemp(prefix="ray-")  # a short path: it holds sockets
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    options = ["--head", "--port", str(port), "--num-cpus", "2", "--include-dashboard=false", "--temp-dir", scratch, "--block"]
    head = Program("ray", [ray, "start", "--node-ip-address", "127.0.0.1", *options], tmp_path / "ray.log")
    try:
        head.wait_for(r"(Ray runtime started)", timeout_s=120)
        from loadgen.sweep.rayrun import RayRuns

        sweep = load_sweep(live(tmp_path, mode=None, engines=None, load={"requests": 10}))
        summary = run_sweep(sweep, tmp_path / "ray.jsonl", RayRuns(partial(SimulatedRuns, sweep)))
        assert summary.failures == [] and len(summary.runs) == 6
        run_sweep(sweep, tmp_path / "here.jsonl", _Here(SimulatedRuns(sweep)))
        here = {run.id: run.figures for run in read_runs(tmp_path / "here.jsonl")}
        assert {run.id: run.figures for run in read_runs(tmp_path / "ray.jsonl")} == here, "the same figures as on this machine"

        crashing = load_sweep(write_sweep(tmp_path, axes={"load.live_sessions": [1, 2]}, seeds=3))
        summary = run_sweep(crashing, tmp_path / "crash.jsonl", RayRuns(samples.crashing))
        assert len(read_runs(tmp_path / "crash.jsonl")) == 2
        assert sum("its actor died" in failure for failure in summary.failures) == 2
        assert sum("three by nothing" in failure for failure in summary.failures) == 2
    finally:
        head.stop()
        shutil.rmtree(scratch, ignore_errors=True)


class _Here:
    def __init__(self, evaluate: Any) -> None:
        self._evaluate = evaluate

    def run(self, tasks: Any) -> Any:
        from loadgen.sweep.processes import Outcome, attempt

        return (Outcome(task, *attempt(self._evaluate, task)) for task in tasks)

    def close(self) -> None:
        pass
