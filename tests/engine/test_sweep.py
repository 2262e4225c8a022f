"""A live sweep on real vLLM engines: launched, measured and stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from loadgen.generate import generate
from loadgen.results import read_runs
from loadgen.sweep.config import load_sweep
from loadgen.sweep.live import LiveRuns
from loadgen.sweep.runner import run_sweep
from loadgen.trace import write_trace
from tests.engine.engines import DTYPE, PROFILE

pytestmark = pytest.mark.engine


def test_a_configuration_is_measured_on_a_launched_engine(tmp_path: Path, vllm_python: Path, tiny_model: Path) -> None:
    write_trace(tmp_path / "t.jsonl", generate(4, 1, 6_000))
    data = {
        "trace": "t.jsonl",
        "mode": "live",
        "engines": {"launch": str(PROFILE), "python": str(vllm_python), "startup_timeout_s": 240},
        "base": {"pools": [{"profile": {"model": str(tiny_model), "dtype": DTYPE, "env": {"VLLM_LOGGING_LEVEL": "WARNING"}}}]},
        "load": {"requests": 6, "warmup": 2, "ramp_s": 0, "time_scale": 0, "live_sessions": 2},
        "axes": {"profile.max_num_seqs": [8]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(data))
    sweep = load_sweep(tmp_path / "sweep.yaml")
    summary = run_sweep(sweep, tmp_path / "r.jsonl", LiveRuns(sweep, print))
    assert summary.failures == []
    runs = read_runs(tmp_path / "r.jsonl")
    assert [(run.arm["profile.max_num_seqs"], run.error) for run in runs] == [(8, None)]
    for run in runs:
        assert run.figures.requests == 6 and run.figures.errors == 0
        assert run.figures.hit_rate is not None and run.figures.hit_rate > 0.3
        assert run.figures.ttft_p50_s and run.figures.user_tokens_per_s
