"""`warmroute serve --processes N`: several real gateway processes behind one port."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metrics import GAUGES, Metrics, exposition, merge_gauges
from loadgen.local import Program
from tests.gateway.spoken import CHAT
from tests.redis_server import redis_server
from tests.stack import Answer, Client, ScriptedWorker, WorkerRequest, gateway_with, soon, until

N = 3
SECRET = "a secret of these tests"


async def reply(request: WorkerRequest) -> None:
    request.respond(orjson.dumps({"usage": {"prompt_tokens": 10, "completion_tokens": 1}}))


class Processes:
    """A running `warmroute serve --processes 3`."""

    def __init__(self, program: Program, url: str):
        self.program = program
        self.url = url
        self.port = httpx.URL(url).port or 0
        self.clients: list[Client] = []

    @property
    def children(self) -> set[int]:
        """The process ids of those that serve."""
        return {int(pid) for pid in Path(f"/proc/{self.program.pid}/task/{self.program.pid}/children").read_text().split()}

    async def connect(self) -> Client:
        client = Client(*await soon(asyncio.open_connection("127.0.0.1", self.port), "a connection"))
        self.clients.append(client)
        return client

    async def connect_to_all(self) -> dict[int, Client]:
        """A connection to every process, by process id."""
        found: dict[int, Client] = {}
        while found.keys() < self.children:
            client = await self.connect()
            found.setdefault(await self.server_of(client), client)
        return found

    async def server_of(self, client: Client) -> int:
        """The process that holds the other end of this connection, once it has accepted it."""
        port = client.writer.get_extra_info("sockname")[1]
        owner: list[int] = []

        def accepted() -> bool:
            owner[:] = [pid for pid in self.children if port in client_ports(pid)]
            return bool(owner)

        await until(accepted, "an accepted connection")
        return owner[0]

    async def get(self, path: str) -> Any:
        """A response's JSON, over a connection of its own."""
        return json.loads((await ask(await self.connect(), "GET", path)).body)

    async def counted(self) -> dict[str, float]:
        """The metrics without labels, and all answered requests as `answered`, over a connection of its own."""
        text = (await ask(await self.connect(), "GET", "/metrics")).body.decode()
        numbers = {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.M)}
        answered = re.findall(r'^warmroute_requests_total\{.*status="200".*\} (\S+)$', text, re.M)
        return {**numbers, "answered": sum(map(float, answered))}


def client_ports(pid: int) -> set[int]:
    """The remote ports of the TCP connections that a process holds."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if found := re.match(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                inodes.add(found[1])
        except OSError:  # closed in the meantime
            pass
    fields = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(field[2].partition(":")[2], 16) for field in fields if field[9] in inodes}


async def ask(client: Client, method: str, path: str, body: Any = None) -> Answer:
    content = b"" if body is None else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    client.writer.write(head.encode() + content)
    return await client.answer()


async def answered(client: Client, text: str = "hello") -> int:
    client.send(CHAT.path, CHAT.body(text, stream=False))
    return (await client.answer()).status


@pytest.fixture
async def redis(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async with redis_server() as server:
        monkeypatch.setenv("WARMROUTE_INDEX__BACKEND", "redis")
        monkeypatch.setenv("WARMROUTE_INDEX__REDIS__URL", server.url)
        monkeypatch.setenv("WARMROUTE_POOL_SECRET", SECRET)
        yield


@asynccontextmanager
async def processes(tmp_path: Path, *workers: ScriptedWorker) -> AsyncIterator[Processes]:
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--processes", str(N)]
    program = Program("gateways", [*command, "--workers", ",".join(worker.url for worker in workers)], tmp_path / "gateways.log")
    running = None
    try:
        (url,) = await asyncio.to_thread(program.wait_for, r"listening on (http://\S+) ")
        running = Processes(program, url)
        yield running
    finally:
        for client in running.clients if running else ():
            client.abort()
        await asyncio.to_thread(program.stop)


@pytest.mark.slow
async def test_all_serve_one_port_and_any_tells_what_all_count(tmp_path: Path, redis: None) -> None:
    async with ScriptedWorker(reply) as worker, processes(tmp_path, worker) as gateways:
        clients = [await gateways.connect() for _ in range(64)]
        assert await asyncio.gather(*map(answered, clients)) == [200] * 64
        ports = {client.writer.get_extra_info("sockname")[1] for client in clients}
        assert len(gateways.children) == N and all(client_ports(process) & ports for process in gateways.children)
        for client in (await gateways.connect_to_all()).values():
            text = (await ask(client, "GET", "/metrics")).body.decode()
            assert f'warmroute_requests_total{{model="m",status="200",tier="standard",worker="{worker.id}"}} 64.0' in text
            assert f'warmroute_e2e_seconds_count{{model="m",tier="standard",worker="{worker.id}"}} 64.0' in text
            assert f'warmroute_worker_up{{worker="{worker.id}"}} 1.0' in text
            assert "\nwarmroute_processes 3.0\n" in text and "\nwarmroute_processes_silent 0.0\n" in text
            assert json.loads((await ask(client, "GET", "/ready")).body)["ready"]
        assert gateways.program.log.read_text().count("listening on") == 1


@pytest.mark.slow
async def test_admin_routes_speak_for_all(tmp_path: Path, redis: None) -> None:
    held: list[WorkerRequest] = []

    async def hold(request: WorkerRequest) -> None:
        held.append(request)

    async with ScriptedWorker(hold) as worker, processes(tmp_path, worker) as gateways:
        clients = await gateways.connect_to_all()
        for client in clients.values():
            client.send(CHAT.path, CHAT.body(stream=False))
        await until(lambda: len(held) == N, "a request from each")
        state = await gateways.get("/admin/state")
        assert (state["reservations"], state["upstream_active"], state["processes"]) == (N, N, N)
        load = (await gateways.get("/admin/workers"))[worker.id]
        assert load["prefilling"] + load["decoding"] == N and load["up"] == 1.0 and load["cache_known_by"] == "memory"
        for request in held:
            await reply(request)
        assert {(await client.answer()).status for client in clients.values()} == {200}
        assert (await ask(await gateways.connect(), "PUT", "/admin/policy", {"policy": "round-robin"})).status == 200
        for client in clients.values():
            assert json.loads((await ask(client, "GET", "/admin/policy")).body) == {"policy": "round-robin"}


@pytest.mark.slow
async def test_one_that_is_killed_fails_nobody_elses_requests_and_is_back(tmp_path: Path, redis: None) -> None:
    held: list[WorkerRequest] = []

    async def hold(request: WorkerRequest) -> None:
        held.append(request)

    async with ScriptedWorker(reply) as worker, processes(tmp_path, worker) as gateways:
        assert await asyncio.gather(*[answered(await gateways.connect()) for _ in range(30)]) == [200] * 30
        assert (await ask(await gateways.connect(), "PUT", "/admin/policy", {"policy": "least-loaded"})).status == 200
        assert (await gateways.counted())["answered"] == 30
        worker.script = hold
        clients = await gateways.connect_to_all()
        for client in clients.values():
            client.send(CHAT.path, CHAT.body(stream=False))
        await until(lambda: len(held) == N, "a request from each")
        before = gateways.children
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: victim not in gateways.children, "its end")
        worker.script = reply
        assert await asyncio.gather(*[answered(await gateways.connect()) for _ in range(30)]) == [200] * 30
        assert (await gateways.counted())["answered"] >= 30, "a counter that fell looks like a restart to Prometheus"
        await until(lambda: sum(request.closed.is_set() for request in held) == 1, "the end of the request that the dead one had")
        for request in held:
            if not request.closed.is_set():
                await reply(request)
        del clients[victim]
        assert {(await client.answer()).status for client in clients.values()} == {200}
        await until(lambda: len(gateways.children) == N, "a process in its place")
        (new,) = gateways.children - before
        client = (await gateways.connect_to_all())[new]
        assert await answered(client) == 200
        assert json.loads((await ask(client, "GET", "/admin/policy")).body) == {"policy": "least-loaded"}
        for client in (await gateways.connect_to_all()).values():
            text = (await ask(client, "GET", "/metrics")).body.decode()
            assert "\nwarmroute_processes 3.0\n" in text
        assert (await gateways.counted())["answered"] == 30 + 30 + 2 + 1


@pytest.mark.slow
async def test_one_that_is_frozen_is_counted_as_silent_and_keeps_its_counters(tmp_path: Path, redis: None) -> None:
    async with ScriptedWorker(reply) as worker, processes(tmp_path, worker) as gateways:
        clients = await gateways.connect_to_all()
        for client in clients.values():
            assert await answered(client) == 200
        assert (await gateways.counted())["answered"] == N
        frozen, client = clients.popitem()
        os.kill(frozen, signal.SIGSTOP)
        try:
            for other in clients.values():
                text = (await ask(other, "GET", "/metrics")).body.decode()
                assert "\nwarmroute_processes 2.0\n" in text and "\nwarmroute_processes_silent 1.0\n" in text
                assert f'warmroute_requests_total{{model="m",status="200",tier="standard",worker="{worker.id}"}} 3.0' in text
                refused = await ask(other, "PUT", "/admin/policy", {"policy": "random"})
                assert refused.status == 503 and b"1 of 3 processes" in refused.body
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert await answered(client) == 200
        assert (await ask(next(iter(clients.values())), "PUT", "/admin/policy", {"policy": "random"})).status == 200
        assert json.loads((await ask(client, "GET", "/admin/policy")).body) == {"policy": "random"}
        assert (await gateways.counted())["answered"] == N + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"])
async def test_a_signal_ends_all_after_the_requests_under_way(number: signal.Signals, tmp_path: Path, redis: None) -> None:
    held: list[WorkerRequest] = []

    async def hold(request: WorkerRequest) -> None:
        held.append(request)

    async with ScriptedWorker(hold) as worker, processes(tmp_path, worker) as gateways:
        clients = await gateways.connect_to_all()
        children = gateways.children
        for client in clients.values():
            client.send(CHAT.path, CHAT.body(stream=False))
        await until(lambda: len(held) == N, "a request from each")
        gateways.program.send_signal(number)  # to the whole group, as a terminal does

        def refused() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", gateways.port)) != 0

        await until(refused, "no process that takes connections")
        for request in held:
            await reply(request)
        assert [(await client.answer()).status for client in clients.values()] == [200] * N
        status = await asyncio.to_thread(gateways.program.wait)
        # 0 where SIGINT was ignored before: a shell starts its background jobs so
        assert status == -number if number == signal.SIGTERM else status in (0, 1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)
        assert "started again" not in gateways.program.log.read_text()


@pytest.mark.slow
async def test_children_end_with_a_parent_that_was_killed(tmp_path: Path, redis: None) -> None:
    async with ScriptedWorker(reply) as worker, processes(tmp_path, worker) as gateways:
        children = gateways.children
        os.kill(gateways.program.pid, signal.SIGKILL)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the children's end")


@pytest.mark.slow
async def test_what_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(*options: str) -> tuple[int, str]:
        program = Program("gateways", [sys.executable, "-m", "gateway.cli", "serve", "--processes", "2", *options], tmp_path / "log")
        try:
            return await asyncio.to_thread(program.wait), program.log.read_text()
        finally:
            program.stop()

    status, said = await ended("--workers", "127.0.0.1:1", "--port", "0")
    assert status == 2 and "set index.backend to redis" in said
    monkeypatch.setenv("WARMROUTE_INDEX__BACKEND", "redis")
    status, said = await ended("--workers", "127.0.0.1:1", "--port", "0")
    assert status == 1 and "Error: index.backend redis needs a secret" in said and "Traceback" not in said
    monkeypatch.setenv("WARMROUTE_POOL_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = await ended("--workers", "127.0.0.1:1", "--port", str(port))
        assert status == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
    (tmp_path / "tokenizer.json").write_text("{")
    file = tmp_path / "warmroute.yaml"
    file.write_text(f"workers: [{{url: 'http://127.0.0.1:1'}}]\nmodels: [{{name: m, tokenizer: '{tmp_path}'}}]\n")
    status, said = await ended("--config", str(file), "--port", "0")
    assert status == 1 and "tokenizer" in said and "listening" not in said


# --- merging ---

LABELS = st.tuples(st.sampled_from(["m", "n"]), st.just("standard"), st.sampled_from(["w1", "w2"]))
EVENTS = st.lists(st.tuples(st.integers(0, 2), LABELS, st.sampled_from([200, 502]), st.integers(0, 40)))


@given(EVENTS)
def test_counts_of_processes_add_up_to_what_one_would_have_counted(events: list[tuple[int, tuple[str, str, str], int, int]]) -> None:
    one, several, total = Metrics(), [Metrics() for _ in range(3)], Metrics()
    for process, labels, status, amount in events:
        for metrics in (one, several[process]):
            series = metrics.of(*labels)
            series.prompt_tokens += amount
            series.ttft.observe(amount / 4)
            series.itl.observe_gaps(0.0, [0.25, 1.0 + amount])
            series.statuses[status] = series.statuses.get(status, 0) + 1
            series.reasons["warm", "cold"] = series.reasons.get(("warm", "cold"), 0) + 1
            metrics.disconnects += amount
            metrics.retries["worker_lost"] = metrics.retries.get("worker_lost", 0) + 1
            metrics.rejected["chat", str(status)] = metrics.rejected.get(("chat", str(status)), 0) + 1
    for metrics in several:
        total.add(orjson.loads(orjson.dumps(metrics.report())))
    assert sorted(exposition(total, []).splitlines()) == sorted(exposition(one, []).splitlines())


def test_gauges_are_summed_averaged_or_the_largest_as_they_mean() -> None:
    def gauges(up: float, prefilling: float, scale: float | None) -> list[Any]:
        return [("worker_up", "", {"w": up}), ("worker_prefilling", "", {"w": prefilling}), ("worker_prefill_scale", "", {"w": scale})]

    merged = {name: values for name, _, values in merge_gauges([gauges(1.0, 2.0, 1.5), gauges(0.0, 3.0, 0.5), gauges(1.0, 0.0, None)])}
    assert merged == {"worker_up": {"w": 1.0}, "worker_prefilling": {"w": 5.0}, "worker_prefill_scale": {"w": 1.0}}


async def test_every_gauge_has_a_rule() -> None:
    async with gateway_with(reply) as (stack, _):
        assert {name for name, _, _ in stack.gateway.fleet.gauges()} <= GAUGES.keys()
