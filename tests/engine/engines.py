"""Real vLLM engines on the CPU for tests, and a forwarder that loses their KV events on demand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import zmq
import zmq.asyncio

from workers.engines import engine_command
from workers.launchprofile import load_launch_profile

START_S = 180.0
BLOCK = 32  # the least that vLLM's CPU attention takes
# A CPU that cannot compute in bfloat16 emulates it, at half the speed of float32; a token takes 512 bytes of KV cache, or twice that.
_HAS_BFLOAT16 = any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16"))
DTYPE, TOKEN_BYTES = ("bfloat16", 512) if _HAS_BFLOAT16 else ("float32", 1024)
PROFILE = Path(__file__).parents[2] / "deploy" / "profiles" / "tiny-cpu.yaml"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Engine:
    """One vLLM engine. Restarting keeps its ports."""

    def __init__(self, python: Path, model: Path, *, core: int, kv_tokens: int = 131_072, max_len: int = 32_768):
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        changes = {
            "model": model, "port": self.port, "dtype": DTYPE, "kv_cache_bytes": kv_tokens * TOKEN_BYTES, "max_model_len": max_len,
            "tool_parser": "hermes",
            "kv_events.endpoint": f"tcp://*:{self.events_port}", "kv_events.replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
            "kv_events.topic": "kv", "env.VLLM_LOGGING_LEVEL": "WARNING",
        }  # fmt: skip
        profile = load_launch_profile(PROFILE, tuple(f"{key}={value}" for key, value in changes.items()))
        self._command = engine_command(profile, str(python))
        self._core = core
        self.log = Path(tempfile.mkstemp(prefix="vllm-", suffix=".log")[1])
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start without waiting; in a process group of its own, because its core survives the API server."""
        cores = sorted(os.sched_getaffinity(0))
        # the render route tells the tokens of a chat; taskset: two engines on one core each disturb each other least
        argv = [*self._command.argv(""), "--enable-scale-out"]
        argv = ["taskset", "-c", str(cores[self._core % len(cores)]), *argv]
        environment = os.environ | dict(self._command.env)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)

    async def ready(self) -> None:
        """Return once the engine answers. One that ends before is started once more: engines that start at the same time may choose the
        same port for what their processes tell each other."""
        end = time.monotonic() + START_S
        again = True
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() < end:
                if self.process is None or self.process.poll() is not None:
                    assert again, f"the engine ended:\n{self.last_words()}"
                    again = False
                    print(f"an engine ended while it started, and is started again:\n{self.last_words()}")
                    self.kill()
                    self.start()
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health", timeout=2)).status_code == 200:
                        return
                await asyncio.sleep(0.25)
        raise AssertionError(f"the engine was not ready within {START_S:g} s:\n{self.last_words()}")

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)
        self.log.unlink(missing_ok=True)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def last_words(self) -> str:
        """What it said of errors, and the end of it all."""
        said = self.log.read_text(errors="replace")
        errors = [line for line in said.splitlines() if "Error" in line]
        return "\n".join((*errors[:20], "...", said[-3000:]))


class LossyForwarder:
    """Passes an engine's events on, but for those it is told to lose."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.port = free_port()
        self.lose = False
        self.lost = 0
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> LossyForwarder:
        self._source = self._context.socket(zmq.SUB)
        self._source.connect(f"tcp://127.0.0.1:{self.engine.events_port}")
        self._source.subscribe(b"")
        self._sink = self._context.socket(zmq.PUB)
        self._sink.bind(f"tcp://127.0.0.1:{self.port}")
        self._task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        while True:
            frames: Any = await self._source.recv_multipart()
            if self.lose:
                self.lost += 1
            else:
                await self._sink.send_multipart(frames)

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._source.close(0)
        self._sink.close(0)
        self._context.term()
