"""A real vLLM through `warmroute worker launch`: ready, killed, back, stopped, nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine.engines import free_port

pytestmark = pytest.mark.engine

PROFILE = Path(__file__).parent.parent.parent / "deploy" / "profiles" / "tiny-cpu.yaml"
COMMAND = [sys.executable, "-c", "from workers.launchcli import launch_command; launch_command()"]


class Launcher:
    """The launcher's process; its output is read as it comes."""

    def __init__(self, python: Path, model: Path):
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        changes = {
            "model": model,
            "kv_events.endpoint": f"tcp://*:{self.events}",
            "kv_events.replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
            "env.VLLM_LOGGING_LEVEL": "WARNING",
            "max_model_len": 4096,
        }
        settings = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        command = [*COMMAND, str(PROFILE), "--python", str(python), "--port", str(self.port), *settings]
        command += ["--backoff", "0.1", "--startup-timeout", "240"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return
        raise AssertionError(f"{pattern!r} never came:\n" + "\n".join(self.lines[-60:]))

    def engine(self) -> list[int]:
        """The engine's processes, the API server first."""
        children = _children(self.process.pid)
        return children + [pid for child in children for pid in _descendants(child)]

    def close(self) -> None:
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                try:
                    self.process.wait(40)
                except subprocess.TimeoutExpired:
                    continue
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _children(pid: int) -> list[int]:
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in listing.read_text().split()]
    return found


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return children + [deeper for child in children for deeper in _descendants(child)]


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def launcher(vllm_python: Path, tiny_model: Path) -> Iterator[Launcher]:
    launcher = Launcher(vllm_python, tiny_model)
    yield launcher
    launcher.close()


def test_an_engine_is_started_brought_back_and_stopped_without_a_trace(launcher: Launcher) -> None:
    launcher.until("ready after")
    first = launcher.engine()
    assert len(first) > 1, "the engine core has a process of its own"
    body = {"model": "tiny", "prompt": "def f(x):\n    return " * 40, "max_tokens": 4}
    answers = [httpx.post(f"{launcher.url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    sources = httpx.get(f"{launcher.url}/kv_event_sources").json()
    assert sources["0"]["replay_endpoint"] == f"tcp://127.0.0.1:{launcher.replay}"

    os.kill(first[0], signal.SIGKILL)
    launcher.until(r"killed by SIGKILL.*restart 1 of")
    assert [pid for pid in first if _exists(pid)] == []
    launcher.until("ready after")
    assert httpx.get(f"{launcher.url}/health").status_code == 200

    second = launcher.engine()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.process.stdout is not None
    launcher.lines += launcher.process.stdout.read().splitlines()
    assert launcher.process.wait(60) == 0
    assert launcher.lines[-1] == "warmroute: vllm stopped"
    assert [pid for pid in second if _exists(pid)] == []
    for port in (launcher.port, launcher.events, launcher.replay):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
