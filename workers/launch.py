"""Starts an engine and keeps it running: readiness, restarts with backoff, a stop that leaves nothing behind.

An engine is several processes: API server, scheduler, one worker for each accelerator. They run in a process group of their own, and it
is the group that is stopped. Killing the API server alone would leave the others with the accelerators' memory and the ports.

A life ends with the first process. An engine that lives but answers nothing is the gateway's business: it routes around it.

On Linux orphans come back to the supervisor even if they left the group (MPI launchers do), and the API server gets SIGTERM if the
supervisor itself is killed. Elsewhere a supervisor that is killed leaves its engine running.
"""

from __future__ import annotations

import asyncio
import codecs
import ctypes
import errno
import os
import random
import re
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from workers.engines.command import Command

EXIT_STOPPED = 0  # as asked
EXIT_CRASH_LOOP = 1  # it kept failing
EXIT_CANNOT_START = 3  # the program is not there
EXIT_PORT_IN_USE = 4  # before the first start, by another program

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_HEALTH_EVERY_S = 0.25
_PROGRESS_EVERY_S = 10.0
_PORT_WAIT_S = 30.0
_KILL_WAIT_S = 30.0
_LAST_LINES = 30
_LINE_END = re.compile(r"\r\n|\n|\r")
_LONGEST_LINE = 65_536


@dataclass(frozen=True)
class RestartPolicy:
    """When to give up on what; all times in seconds."""

    startup_timeout_s: float = 1800.0  # large models load for many minutes
    grace_s: float = 30.0  # from SIGTERM to SIGKILL
    backoff_s: float = 1.0  # before the first restart; doubles with each failure in a row
    max_backoff_s: float = 60.0
    stable_s: float = 300.0  # ready for this long: the failures before no longer count
    max_failures: int = 5  # in a row: a crash loop

    def delay_s(self, failures: int) -> float:
        """Seconds before the restart after this many failures in a row; jittered, so that a fleet does not restart in step."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)


class Supervisor:
    """Runs one engine until it is told to stop or the engine keeps failing."""

    def __init__(self, command: Command, policy: RestartPolicy, *, name: str, say: Callable[[str], None]):
        self.command = command
        self.policy = policy
        self.name = name
        self._say = say
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._restarting = False  # whether the ports may still be held by the engine's own last life

    def stop(self) -> None:
        """Stop the engine and return from `run`; told twice, without grace."""
        if self._stop.is_set():
            self._hurry.set()
        else:
            self._tell(f"stopping; {self.policy.grace_s:g} s are left to it unless told again")
        self._stop.set()

    async def run(self) -> int:
        """Start, watch and restart the engine. Returns an exit code (EXIT_...)."""
        _adopt_orphans()
        with tempfile.TemporaryDirectory(prefix="warmroute-launch-") as directory:
            options_file = Path(directory) / "options.yaml"
            if self.command.options:
                options_file.write_text(self.command.options_text(), "utf-8")
            return await self._keep_running(self.command.argv(str(options_file)))

    async def _keep_running(self, argv: list[str]) -> int:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            if (port := await self._port_in_use()) is not None:
                if self._stop.is_set():
                    return EXIT_STOPPED
                self._tell(f"port {port} is in use by another program; stop that one or choose another with --port or --set")
                return EXIT_PORT_IN_USE
            try:
                process, output = await self._start(argv)
            except OSError as error:
                self._tell(f"cannot run {argv[0]}: {error.strerror or error}; name the interpreter that has the engine with --python")
                return EXIT_CANNOT_START
            ready_at: float | None = None
            why = "stopped"
            try:
                if await self._becomes_ready(process):
                    ready_at = loop.time()
                    await self._first(process.wait())
                    why = f"ended ({_exit_text(process.returncode)})"
                elif process.returncode is not None:
                    why = f"ended before it was ready ({_exit_text(process.returncode)})"
                else:
                    why = f"was not ready after {self.policy.startup_timeout_s:g} s"
            finally:
                await self._end(process)
                await asyncio.wait({output}, timeout=1.0)  # with the last process its end of the pipe is gone
                output.cancel()
            if self._stop.is_set():
                self._tell("stopped")
                return EXIT_STOPPED
            if ready_at is not None and loop.time() - ready_at >= self.policy.stable_s:
                failures = 0
            failures += 1
            if failures >= self.policy.max_failures:
                self._explain_crash_loop(failures, why)
                return EXIT_CRASH_LOOP
            delay_s = self.policy.delay_s(failures)
            self._tell(f"{why}; restart {failures} of {self.policy.max_failures - 1} in {delay_s:.1f} s")
            self._restarting = True
            await self._first(asyncio.sleep(delay_s))
            if self._stop.is_set():
                return EXIT_STOPPED

    async def _start(self, argv: list[str]) -> tuple[asyncio.subprocess.Process, asyncio.Task[None]]:
        """The engine's first process and the task that passes its output on.

        The pipe is not asyncio's own: `wait` would then not return before every process that holds it has ended, though the
        death of the first one is what this waits for.
        """
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | dict(self.command.env),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return process, asyncio.create_task(self._pass_on(reading))

    async def _becomes_ready(self, process: asyncio.subprocess.Process) -> bool:
        """Wait until /health answers 200. False when the engine ends, takes too long, or is told to stop."""
        loop = asyncio.get_running_loop()
        if not self.command.serves_http:
            self._tell("started; serves no HTTP itself")
            return True
        started = loop.time()
        deadline = started + self.policy.startup_timeout_s
        next_progress = started + _PROGRESS_EVERY_S
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.command.host, self.command.host)
        url = f"http://{f'[{host}]' if ':' in host else host}:{self.command.port}"
        self._tell(f"starting; waiting for {url}/health")
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            while process.returncode is None and not self._stop.is_set():
                with suppress(httpx.HTTPError):
                    if (await client.get(url + "/health")).status_code == 200:
                        self._tell(f"ready after {loop.time() - started:.1f} s at {url}")
                        return True
                if loop.time() >= deadline:
                    return False
                if loop.time() >= next_progress:
                    next_progress += _PROGRESS_EVERY_S
                    self._tell(f"starting for {loop.time() - started:.0f} s (gives up after {self.policy.startup_timeout_s:g} s)")
                await self._first(process.wait(), timeout_s=_HEALTH_EVERY_S)
        return False

    async def _pass_on(self, reading: int) -> None:
        """Copy the engine's output line by line, also what ends in a carriage return (progress bars). Closes the pipe."""
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb"))
        try:
            await self._copy_lines(stream)
        finally:
            transport.close()

    async def _copy_lines(self, stream: asyncio.StreamReader) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        while data := await stream.read(65_536):
            *lines, rest = _LINE_END.split(rest + decoder.decode(data))
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], ""
            for line in lines:
                self._line(line)
        self._line(rest)

    def _line(self, line: str) -> None:
        if line.strip():
            self._last_lines.append(line)
            self._say(f"[{self.name}] {line}")

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End every process of the engine: SIGTERM, grace, SIGKILL. Returns when none is left."""
        loop = asyncio.get_running_loop()
        _signal(process.pid, signal.SIGTERM)
        deadline = loop.time() + self.policy.grace_s
        while self._lives(process) and loop.time() < deadline and not self._hurry.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._hurry.wait()
        if self._lives(process):
            self._tell(f"has processes left {'at once' if self._hurry.is_set() else f'after {self.policy.grace_s:g} s'}: killed")
        deadline = loop.time() + _KILL_WAIT_S
        while self._lives(process):
            _signal(process.pid, signal.SIGKILL)
            if loop.time() >= deadline:
                self._tell("has processes that cannot be killed; they may hang in the accelerator's driver")
                return
            await asyncio.sleep(_POLL_S)

    @staticmethod
    def _lives(process: asyncio.subprocess.Process) -> bool:
        """Whether any process of the engine is left. Reaps orphans that have come to this process."""
        if process.returncode is None:
            return True
        _reap(process.pid)
        try:
            os.killpg(process.pid, 0)
            return True
        except ProcessLookupError:
            return any(True for _ in _children())
        except PermissionError:  # the group's number now belongs to somebody else
            return False

    async def _port_in_use(self) -> int | None:
        """A port of the engine's that somebody holds. The engine's own last life gets time to let go of them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (_PORT_WAIT_S if self._restarting else 0.0)
        while True:
            busy = next((port for port in self.command.ports if _in_use(self.command.host, port)), None)
            if busy is None or loop.time() >= deadline or self._stop.is_set():
                return busy
            await self._first(asyncio.sleep(_POLL_S))

    async def _first(self, what: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
        """Wait for something, but no longer than until the stop or a timeout."""
        tasks: set[asyncio.Task[object]] = {asyncio.create_task(what), asyncio.create_task(self._stop.wait())}
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _tell(self, text: str) -> None:
        self._say(f"warmroute: {self.name} {text}")

    def _explain_crash_loop(self, failures: int, why: str) -> None:
        self._tell(f"{why}; {failures} failures in a row, giving up. Its last lines:")
        for line in self._last_lines:
            self._say(f"    {line}")
        self._tell(
            "what to check: the first error above (later ones follow from it); memory of the accelerators (memory_share, max_model_len,"
            " another process on them); that the model's files are there and readable; that the engine's version knows every flag"
            " (--print shows the command, to be run by hand)"
        )


async def supervise(command: Command, policy: RestartPolicy, *, name: str) -> int:
    """Run an engine in the foreground until SIGTERM or SIGINT. Returns an exit code (EXIT_...)."""

    def say(text: str) -> None:
        with suppress(BrokenPipeError):
            print(text, flush=True)

    supervisor = Supervisor(command, policy, name=name, say=say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    return await supervisor.run()


def _exit_text(code: int | None) -> str:
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}" + ("; out of memory?" if -code == signal.SIGKILL else "")
    return f"killed by signal {-code}"


def _in_use(host: str, port: int) -> bool:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False  # not a name of this machine: the engine will say so
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    """In the child, before it becomes the engine: have SIGTERM sent when the supervisor dies."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _children() -> Iterator[int]:
    """Process ids of this process's children; none where the system does not list them."""
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, listing.read_text().split())


def _reap(group: int) -> None:
    """Collect the exit codes of the engine's orphans, once its first process is gone, so that they do not stay as zombies."""
    for child in {-group, *_children()}:
        with suppress(ChildProcessError):
            while os.waitpid(child, os.WNOHANG)[0]:
                pass


def _signal(group: int, number: signal.Signals) -> None:
    """Signal the engine's group, and those of its orphans that left it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for child in _children():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child) != group:
                os.kill(child, number)
