"""Evaluators and sweeps for the tests of sweeps. In a module of their own, so that worker processes can import them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import yaml

from loadgen.results import Figures, Run
from loadgen.sweep.evaluate import Task


def measured(task: Task) -> Run:
    """A run whose figures follow from its arm: `speed` makes users fast and GPUs idle."""
    speed = float(str(task.arm.get("load.live_sessions", 1)))
    figures = Figures(duration_s=10, requests=5, prompt_tokens=100, cached_tokens=50, output_tokens=int(100 * speed), ttft_p90_s=speed)
    figures.user_tokens_per_s = 100 / speed
    return Run(task.arm, task.seed, figures, trace="t.jsonl", setup=task.setup)


def plain() -> Any:
    return measured


def slow() -> Any:
    def evaluate(task: Task) -> Run:
        time.sleep(0.3)  # nothing to wait for: it makes the runs last, so that the interrupt comes in their middle
        return measured(task)

    return evaluate


def crashing() -> Any:
    """Seed 1 kills its process, seed 2 has a fault in its program."""

    def evaluate(task: Task) -> Run:
        if task.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if task.seed == 2:
            raise ZeroDivisionError("three by nothing")
        return measured(task)

    return evaluate


def unable_to_start() -> Any:
    raise ValueError("the trace is not there")


def write_sweep(directory: Path, **changes: Any) -> Path:
    """A small sweep over a trace of that directory; a change to None leaves a field out."""
    data: dict[str, Any] = {
        "trace": "t.jsonl",
        "base": {"pools": [{"count": 2, "profile": {"kv_capacity_tokens": 200_000}}]},
        "axes": {"load.live_sessions": [1, 2, 4], "policy": ["warm", "round-robin"]},
    }
    data |= changes
    file = directory / "sweep.yaml"
    file.write_text(yaml.safe_dump({name: value for name, value in data.items() if value is not None}, sort_keys=False))
    return file
