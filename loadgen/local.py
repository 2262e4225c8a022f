"""A gateway and simulated workers as child processes on free ports: what the demo and the end-to-end tests run against."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

_POLL_S = 0.05
_STOP_S = 10.0


class StartError(RuntimeError):
    """A program ended, or did not get ready in time; the message holds the end of what it said."""


class Program:
    """A child process in a process group of its own, so that ending it ends what it started. Its output goes to a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        """`env` is added to this process's environment."""
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **(env or {})},
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout_s)

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = 60.0) -> list[str]:
        """The first `count` matches of `pattern` (its one group) in the output. Raises StartError."""
        until = time.monotonic() + timeout_s
        while True:
            found = re.findall(pattern, self.log.read_text("utf-8", "replace"))
            if len(found) >= count:
                return found[:count]
            if not self.running:
                raise StartError(f"{self.name} ended with status {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > until:
                raise StartError(f"{self.name} was not ready within {timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(_POLL_S)

    def tail(self, lines: int = 20) -> str:
        """The last lines of the output."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the whole group; nothing happens where it has ended."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    def stop(self) -> None:
        """Ask it to end, then make it. May be called twice."""
        self.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.send_signal(signal.SIGKILL)
            self._process.wait()


class LocalFleet:
    """Use as a context manager: on entry everything is ready, on exit everything has ended.

    `worker_options` go to `warmroute worker sim`. The workers share one process. Raises StartError on entry.
    """

    def __init__(self, workers: int, worker_options: Sequence[str] = ()) -> None:
        self._count = workers
        self._worker_options = list(worker_options)
        self._scratch = tempfile.TemporaryDirectory(prefix="warmroute-")
        self._programs: list[Program] = []
        self.worker_urls: list[str] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End every program. May be called twice."""
        for program in reversed(self._programs):
            program.stop()
        self._scratch.cleanup()

    def _start(self) -> None:
        workers = self._program("workers", ["worker", "sim", "--port", "0", "--count", str(self._count), *self._worker_options])
        self.worker_urls = workers.wait_for(r"simulated \S+ on (http://\S+)", self._count)
        gateway = self._program("gateway", ["serve", "--port", "0", "--workers", ",".join(self.worker_urls)])
        (self.url,) = gateway.wait_for(r"listening on (http://\S+)")
        ready = httpx.get(f"{self.url}/ready", trust_env=False)
        if ready.status_code != 200 or not all(ready.json()["workers"].values()):
            raise StartError(f"the gateway does not reach every worker: {ready.text}")

    def _program(self, name: str, options: Sequence[str]) -> Program:
        # by module name: the gateway is another program to the load generator, never an import
        program = Program(name, [sys.executable, "-m", "gateway.cli", *options], Path(self._scratch.name, f"{name}.log"))
        self._programs.append(program)
        return program
