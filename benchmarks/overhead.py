"""What a gateway adds: CPU per request and per streamed chunk, latency and memory, for several gateways in one run.

Targets take turns within every round, so that a ratio between two of them holds where the machine's speed drifts. CPU is what
the target's whole process tree spent, read from /proc, so that other processes' load moves it little. All targets stand before
the same four mock workers (`mock_worker.py`).

Loads
  short    1 KB chat, answered whole, 32 connections
  agentic  sessions whose body grows from 20 KB to about 250 KB turn by turn, answered whole, 8 sessions at a time
  stream   1 KB chat, 64 events 20 ms apart, 64 connections
  alone    1 KB chat, one connection: the latency that the gateway adds to the worker's own

Targets: warmroute, and what is installed of nginx, haproxy and sglang-router (policy cache_aware).
--target NAME=COMMAND adds one: it must listen on {port} in front of {workers} (comma-separated URLs).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import uvloop

WORKERS = 4
CHUNKS = 64  # events of a stream, as mock_worker.py sends them
AGENTIC_LAPS = 6
AGENTIC_TURNS = 12

NGINX = """worker_processes 1; daemon off; pid {scratch}/nginx.pid; error_log {scratch}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_buffer_size 2m; client_max_body_size 64m; keepalive_requests 100000000;
  upstream workers {{ {servers} keepalive 512; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""
HAPROXY = """global
  nbthread 1
  maxconn 8000
defaults
  mode http
  option http-no-delay
  timeout client 60s
  timeout server 60s
  timeout connect 5s
frontend gateway
  bind 127.0.0.1:{port}
  default_backend workers
backend workers
  http-reuse always
{servers}
"""


# --- processes ---


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program in its own process group, ended on exit."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def process_tree(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [descendant for child in children.read_text().split() for descendant in process_tree(int(child))]
        except OSError:
            continue  # ended meanwhile
    return found


def cpu_s(pid: int) -> float:
    """Seconds on a CPU of a process tree. schedstat counts nanoseconds, where stat only counts ticks of 10 ms."""
    nanoseconds = 0
    for process in process_tree(pid):
        for stat in Path(f"/proc/{process}/task").glob("*/schedstat"):
            try:
                nanoseconds += int(stat.read_text().split()[0])
            except OSError:
                continue
    return nanoseconds / 1e9


def resident_mb(pid: int) -> float:
    kilobytes = 0
    for process in process_tree(pid):
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return kilobytes / 1024


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


# --- loads ---


def chat(content: str, stream: bool = False) -> bytes:
    return body([{"role": "user", "content": content}], stream)


def body(messages: list[dict[str, object]], stream: bool = False) -> bytes:
    return json.dumps({"model": "mock", "stream": stream, "max_tokens": CHUNKS, "messages": messages}).encode()


def agentic_session(rng: random.Random) -> list[bytes]:
    """One session's bodies: each is the one before plus a tool call and its result."""

    def text(length: int) -> str:
        return " ".join(f"{rng.choice(('read', 'edit', 'test', 'value', 'return'))}_{rng.randrange(400)}" for _ in range(length // 9))

    rules = " ".join(f"rule_{number % 97}" for number in range(2_300))
    messages: list[dict[str, object]] = [{"role": "system", "content": rules}, {"role": "user", "content": text(2_000)}]
    bodies = []
    for turn in range(AGENTIC_TURNS):
        bodies.append(body(messages))
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "bash", "arguments": text(600)}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": text(20_000)})
    return bodies


def loads(seed: int) -> dict[str, list[list[bytes]]]:
    """Load -> for each connection the bodies that it sends, one after another."""
    rng = random.Random(seed)
    sessions = [[one for _ in range(AGENTIC_LAPS) for one in agentic_session(rng)] for _ in range(8)]
    short, streamed = chat("x" * 900), chat("x" * 900, stream=True)
    return {"short": [[short] * 125] * 32, "agentic": sessions, "stream": [[streamed] * 6] * 64, "alone": [[short] * 400]}


class Connection(asyncio.Protocol):
    """Sends its bodies one after another and times each answer. `done` gets the number of answers other than 200."""

    def __init__(self, bodies: Sequence[bytes], done: asyncio.Future[int], times: list[float]) -> None:
        self._bodies = iter(bodies)
        self._done = done
        self._times = times
        self._errors = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the target closed a connection: {exc}"))

    def _next(self) -> None:
        data = next(self._bodies, None)
        if data is None:
            self._done.set_result(self._errors)
            self._transport.close()
            return
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._tail = b""
        self._missing: int | None = None  # bytes still to come; None before the head, or where the end is a last chunk
        self._begun = False
        self._started = time.perf_counter()
        self._transport.write(head % len(data) + data)

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            data = self._tail + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._tail = data
                return
            self._begun = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._errors += 1
            head = data[:end].lower()
            at = head.find(b"content-length:")
            if at >= 0:
                self._missing = int(head[at + 15 :].split(b"\r\n", 1)[0])
            data = data[end + 4 :]
        if self._missing is not None:
            self._missing -= len(data)
            complete = self._missing <= 0
        else:
            self._tail = (self._tail + data)[-8:]
            complete = self._tail.endswith(b"0\r\n\r\n")
        if complete:
            self._times.append(time.perf_counter() - self._started)
            self._next()


async def play(port: int, connections: Sequence[Sequence[bytes]]) -> tuple[list[float], int]:
    """(sorted times, errors) of all requests."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    waits: list[asyncio.Future[int]] = []
    for bodies in connections:
        done: asyncio.Future[int] = loop.create_future()
        waits.append(done)
        await loop.create_connection(lambda b=bodies, d=done: Connection(b, d, times), "127.0.0.1", port)  # type: ignore[misc]
    errors = sum(await asyncio.gather(*waits))
    return sorted(times), errors


@dataclass
class Run:
    """One load against one target in one round."""

    cpu_us: float  # a request
    p50_ms: float
    p99_ms: float
    errors: int
    rss_mb: float = 0.0


def measure(port: int, pid: int | None, connections: Sequence[Sequence[bytes]]) -> Run:
    before = cpu_s(pid) if pid else 0.0
    times, errors = uvloop.run(play(port, connections))
    used = cpu_s(pid) - before if pid else 0.0
    count = len(times)
    return Run(used / count * 1e6, times[count // 2] * 1e3, times[int(count * 0.99)] * 1e3, errors, resident_mb(pid) if pid else 0.0)


# --- targets ---


@dataclass
class Place:
    """Where a target stands."""

    port: int
    worker_ports: list[int]
    scratch: Path
    workers: str = field(init=False)

    def __post_init__(self) -> None:
        self.workers = ",".join(f"http://127.0.0.1:{port}" for port in self.worker_ports)


def warmroute(place: Place) -> list[str]:
    return [sys.executable, "-m", "gateway.cli", "serve", "--port", str(place.port), "--workers", place.workers]


def nginx(place: Place) -> list[str] | None:
    program = shutil.which("nginx")
    servers = " ".join(f"server 127.0.0.1:{port};" for port in place.worker_ports)
    file = place.scratch / "nginx.conf"
    file.write_text(NGINX.format(scratch=place.scratch, port=place.port, servers=servers))
    return [program, "-c", str(file)] if program else None


def haproxy(place: Place) -> list[str] | None:
    program = shutil.which("haproxy")
    servers = "\n".join(f"  server w{port} 127.0.0.1:{port}" for port in place.worker_ports)
    file = place.scratch / "haproxy.cfg"
    file.write_text(HAPROXY.format(port=place.port, servers=servers))
    return [program, "-f", str(file)] if program else None


def sglang_router(place: Place) -> list[str] | None:
    if importlib.util.find_spec("sglang_router") is None:
        return None
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--policy", "cache_aware", "--log-level", "warn",
        "--host", "127.0.0.1", "--port", str(place.port), "--worker-urls", *place.workers.split(","),
    ]  # fmt: skip


BUILT_IN: dict[str, Callable[[Place], list[str] | None]] = {
    "warmroute": warmroute, "nginx": nginx, "haproxy": haproxy, "sglang-router": sglang_router,
}  # fmt: skip


def wait_ready(port: int, process: subprocess.Popen[bytes], name: str) -> None:
    """Return once a chat request is answered with 200."""
    until = time.monotonic() + 60
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", chat("ready?"), {"content-type": "application/json"})
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{name} did not answer on port {port}")


def run(targets: dict[str, list[str]], place: Place, rounds: int) -> dict[str, dict[str, list[Run]]]:
    """Target -> load -> one run for each round. "direct" is a worker without anything in front, for `alone` only."""
    results: dict[str, dict[str, list[Run]]] = {name: {} for name in ("direct", *targets)}
    with ExitStack() as stack:
        for port in place.worker_ports:
            command = [sys.executable, str(Path(__file__).with_name("mock_worker.py")), str(port)]
            wait_ready(port, stack.enter_context(running(command)), "a mock worker")
        for number in range(rounds):
            rows = loads(number)
            results["direct"].setdefault("alone", []).append(measure(place.worker_ports[0], None, rows["alone"]))
            for name, command in targets.items():
                with running(command) as process:
                    wait_ready(place.port, process, name)
                    measure(place.port, process.pid, [[chat("warm up")] * 200] * 4)
                    for load, connections in rows.items():
                        results[name].setdefault(load, []).append(measure(place.port, process.pid, connections))
    return results


def summarize(results: dict[str, dict[str, list[Run]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds; errors are summed."""
    table = {}
    for name in results.keys() - {"direct"}:
        runs = results[name]

        def median(load: str, key: str, runs: dict[str, list[Run]] = runs) -> float:
            return statistics.median(getattr(one, key) for one in runs[load])

        added = [one.p50_ms - direct.p50_ms for one, direct in zip(runs["alone"], results["direct"]["alone"], strict=True)]
        table[name] = {
            "short_cpu_us": median("short", "cpu_us"), "agentic_cpu_us": median("agentic", "cpu_us"),
            "chunk_cpu_us": median("stream", "cpu_us") / CHUNKS, "added_p50_ms": statistics.median(added),
            "short_p99_ms": median("short", "p99_ms"), "agentic_p99_ms": median("agentic", "p99_ms"),
            "rss_mb": median("agentic", "rss_mb"), "errors": sum(one.errors for load in runs.values() for one in load),
        }  # fmt: skip
    return {name: table[name] for name in results if name in table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", default=[], metavar="NAME=COMMAND", help="another target; repeatable")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated targets to run")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the table shows medians (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        port, *worker_ports = free_ports(1 + WORKERS)
        place = Place(port, worker_ports, Path(scratch))
        targets = {name: command for name, make in BUILT_IN.items() if (command := make(place))}
        for given in options.target:
            name, equals, command = given.partition("=")
            if not equals:
                parser.error(f"--target {given!r} is not NAME=COMMAND")
            targets[name] = shlex.split(command.format(port=port, workers=place.workers, dir=scratch))
        if options.only:
            unknown = set(options.only.split(",")) - targets.keys()
            if unknown:
                parser.error(f"--only: not installed or unknown: {', '.join(sorted(unknown))}; there are {', '.join(targets)}")
            targets = {name: targets[name] for name in options.only.split(",")}
        table = summarize(run(targets, place, options.rounds))

    print(f"{'':16} {'CPU us':>8} {'CPU us':>8} {'CPU us':>8} {'added p50':>9} {'p99 ms':>8} {'p99 ms':>8} {'RSS':>5} {'':>6}")
    print(f"{'target':16} {'short':>8} {'agentic':>8} {'a chunk':>8} {'ms':>9} {'short':>8} {'agentic':>8} {'MB':>5} {'errors':>6}")
    for name, row in table.items():
        print(
            f"{name:16} {row['short_cpu_us']:8.1f} {row['agentic_cpu_us']:8.1f} {row['chunk_cpu_us']:8.1f} {row['added_p50_ms']:9.2f} "
            f"{row['short_p99_ms']:8.2f} {row['agentic_p99_ms']:8.2f} {row['rss_mb']:5.0f} {row['errors']:6.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
