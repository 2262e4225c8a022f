"""Workers that freeze, die, refuse, restart and misbehave; what clients see of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter

import httpx
import pytest

from gateway.config import WorkerConfig
from tests.gateway.spoken import CHAT, Spoken, every_dialect
from tests.stack import ScriptedWorker, Stack, WorkerRequest, config, gateway_with, running, soon, until
from workers.profile import WorkerProfile
from workers.simfaults import Faults
from workers.simserver import SimServer


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_frozen_worker_costs_the_others_requests_nothing_and_its_own_move(stream: bool) -> None:
    """One of four accepts everything and answers nothing. Rounds of sessions run before and during: same times for the others."""
    profile = WorkerProfile(engine="sim")
    servers = [SimServer(profile, speed=20.0, model="m") for _ in range(4)]
    for server in servers:
        await server.start()
    frozen = servers[0]
    try:
        async with running(config(*(s.url for s in servers))) as stack:
            name = frozen.url.removeprefix("http://")
            slower = []
            for trial in range(3):  # one pause of a busy machine falls into one of them
                healthy = await _sessions(stack, f"a{trial}-", stream)
                frozen.set_faults(Faults(freeze=True))
                during = await _sessions(stack, f"b{trial}-", stream)
                assert all(status == 200 for status, _, _ in [*healthy, *during])
                assert name not in {worker for _, worker, _ in during}, "an answer of a frozen worker"
                untouched = sorted(took for _, _, took in during)[: len(during) * 3 // 5]
                usual = sorted(took for _, _, took in healthy)
                slower.append(untouched[len(untouched) // 2] / usual[len(usual) // 2])
                await until(lambda: not stack.router.workers[name].up, "the frozen worker to be given up")
                if slower[-1] < 2.0:
                    break
                frozen.set_faults(Faults())
                await until(lambda: stack.router.workers[name].up, "the worker's return before another trial")
            # those that never met the frozen worker take what they took before
            assert min(slower) < 2.0, slower
            again = await _sessions(stack, "c", stream)
            assert {status for status, _, _ in again} == {200}
            await stack.until_idle()

            frozen.set_faults(Faults())
            await until(lambda: stack.router.workers[name].up, "the worker's return")
            back = await _sessions(stack, "d", stream)
            assert name in {worker for _, worker, _ in back}
    finally:
        for server in servers:
            await server.stop()


async def _sessions(stack: Stack, name: str, stream: bool) -> list[tuple[int, str, float]]:
    """24 one-turn sessions at once: (status, worker, seconds) of each."""

    async def one(number: int) -> tuple[int, str, float]:
        started = time.perf_counter()
        text = f"{name}{number} " + "def handler(request): pass\n" * 60
        response = await stack.post(CHAT.path, CHAT.body(text, stream=stream, max_tokens=20))
        if stream:
            assert response.content.endswith(CHAT.done), response.content[-300:]
        return response.status_code, response.headers.get("x-warmroute-worker", ""), time.perf_counter() - started

    return await asyncio.gather(*(one(number) for number in range(24)))


@pytest.mark.slow
@pytest.mark.parametrize("head_sent", [True, False], ids=["head-sent", "nothing-sent"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_requests_stuck_at_a_worker_move_once_probes_give_up(stream: bool, head_sent: bool) -> None:
    async def stuck(request: WorkerRequest) -> None:
        if head_sent:
            request.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            request.chunk(CHAT.preamble)

    async def answers(request: WorkerRequest) -> None:
        if stream:
            request.stream(*CHAT.whole("fine"))
        else:
            request.respond(b'{"id":"fine"}')

    async with gateway_with(stuck, stuck) as (stack, workers):
        asked = asyncio.ensure_future(stack.post(CHAT.path, CHAT.body(stream=stream)))
        await until(lambda: bool(workers[0].requests or workers[1].requests))
        bad, good = workers if workers[0].requests else workers[::-1]
        good.script, bad.silent = answers, True
        response = await asked
        assert response.status_code == 200 and b"fine" in response.content
        assert response.content.count(CHAT.preamble) == int(stream)
        await soon(bad.requests[0].closed.wait(), "the end of the stuck request")
        await stack.until_idle()


async def test_a_busy_worker_that_is_slow_to_a_probe_is_not_given_up() -> None:
    """An engine in a long step may answer no probe for seconds while its streams flow."""

    async def flows(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(CHAT.preamble)
        worker.silent = True
        while not enough.is_set():
            request.chunk(CHAT.content("x"))
            await asyncio.sleep(0.02)
        request.chunk(CHAT.last)
        request.end()

    enough = asyncio.Event()
    settings = {"keepalive_s": 0.2, "probe_timeout_s": 0.25}
    async with ScriptedWorker(flows) as worker, running(config(worker.url, upstream=settings)) as stack:
        asked = asyncio.ensure_future(stack.post(CHAT.path, CHAT.body()))
        await worker.until_requests(1)
        [endpoint] = stack.gateway.fleet.endpoints.values()
        probes = worker.probes
        # several times what it takes to give up on a silent one
        await asyncio.sleep(3 * stack.gateway.config.upstream.probe_failures * stack.gateway.config.upstream.probe_timeout_s)
        assert endpoint.up, f"given up after {worker.probes - probes} probes"
        enough.set()
        assert (await asked).content.endswith(CHAT.done)


@every_dialect
async def test_refused_connections_take_a_worker_out_at_once(spoken: Spoken) -> None:
    async def answers(request: WorkerRequest) -> None:
        request.stream(*spoken.whole("fine"))

    async with gateway_with(answers, answers, policy="round-robin", upstream={"probe_interval_s": 30.0}) as (stack, workers):
        await workers[0].stop()
        for _ in range(4):
            response = await stack.post(spoken.path, spoken.body())
            assert response.status_code == 200
        assert not stack.router.workers[workers[0].id].up
        assert len(workers[1].requests) == 4


async def test_a_worker_comes_back_by_probe_and_no_worker_is_a_503_that_says_when() -> None:
    async def answers(request: WorkerRequest) -> None:
        request.stream(*CHAT.whole("fine"))

    async with gateway_with(answers) as (stack, [worker]):
        await worker.stop()
        await until(lambda: not stack.gateway.fleet.ready, "the worker's end to be noticed")
        response = await stack.post(CHAT.path, CHAT.body())
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert CHAT.error_of(response.content)["type"] == "service_unavailable_error"
        overloaded = await stack.post("/v1/messages", {"model": "m", "max_tokens": 1, "messages": []})
        assert overloaded.status_code == 529 and overloaded.json()["error"]["type"] == "overloaded_error"
        assert (await stack.client.get("/ready")).status_code == 503
        assert (await stack.client.get("/health")).status_code == 200
        await worker.start()
        await until(lambda: stack.gateway.fleet.ready, "the worker's return")
        assert (await stack.post(CHAT.path, CHAT.body())).status_code == 200


async def test_client_errors_do_not_count_against_the_worker() -> None:
    async def script(request: WorkerRequest) -> None:
        if b"too long" in request.body:
            request.respond(b'{"error":{"message":"maximum context length","code":"context_length_exceeded"}}', 400)
        else:
            request.stream(*CHAT.whole("fine"))

    async with gateway_with(script) as (stack, [worker]):
        for _ in range(20):
            response = await stack.post(CHAT.path, CHAT.body("too long"))
            assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
        assert len(worker.requests) == 20  # and nobody else is asked the same again
        assert (await stack.post(CHAT.path, CHAT.body())).status_code == 200


async def test_a_5xx_is_tried_on_one_other_worker_and_then_passed_on_as_it_is() -> None:
    async def fails(request: WorkerRequest) -> None:
        request.respond(b'{"error":{"message":"CUDA out of memory"}}', 500)

    async with gateway_with(fails, fails, fails) as (stack, workers):
        response = await stack.post(CHAT.path, CHAT.body())
        assert response.status_code == 500 and response.content == b'{"error":{"message":"CUDA out of memory"}}'
        assert sum(len(w.requests) for w in workers) == 2
        assert all(worker.up for worker in stack.router.workers.values())
        await stack.until_idle()


async def test_a_pooled_connection_that_went_stale_is_replaced_unnoticed() -> None:
    async def script(request: WorkerRequest) -> None:
        connection = request.connection
        if connection in served:
            request.reset()  # closed in the same moment in which the request came
            return
        served.add(connection)
        request.respond(b'{"ok":true}')

    served: set[object] = set()
    async with gateway_with(script) as (stack, [worker]):
        for _ in range(5):
            assert (await stack.post(CHAT.path, CHAT.body(stream=False))).json() == {"ok": True}
        assert all(w.up for w in stack.router.workers.values())
        assert stack.gateway.metrics.retries["stale_connection"] == 4
        assert len(worker.requests) == 9


async def test_connections_are_kept_and_closed_before_the_worker_would() -> None:
    async def script(request: WorkerRequest) -> None:
        connections.add(request.connection)
        request.respond(b"{}")

    connections: set[object] = set()
    async with gateway_with(script, upstream={"idle_s": 0.3, "keepalive_s": 0.4}) as (stack, [worker]):
        for _ in range(5):
            await stack.post(CHAT.path, CHAT.body(stream=False))
        assert len(connections) == 1
        await soon(worker.requests[0].closed.wait(), "the end of the idle connection")


async def test_many_requests_at_once_are_all_served() -> None:
    async def script(request: WorkerRequest) -> None:
        request.respond(b"{}")

    async with gateway_with(script, script) as (stack, _):

        async def one() -> int:
            client = await stack.connect()
            client.send(CHAT.path, CHAT.body(stream=False))
            status = (await client.answer()).status
            await client.close()
            return status

        statuses = await asyncio.gather(*(one() for _ in range(1000)))
        assert Counter(statuses) == {200: 1000}
        assert all(worker.up for worker in stack.router.workers.values())
        await stack.until_idle()


async def test_running_out_of_file_descriptors_is_not_the_workers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(request: WorkerRequest) -> None:
        request.respond(b"{}")

    async with gateway_with(script, upstream={"probe_interval_s": 0.05}) as (stack, _):
        loop = asyncio.get_running_loop()
        await stack.state()  # the test's own connection is open

        async def exhausted(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(loop, "create_connection", exhausted, raising=False)
            response = await stack.post(CHAT.path, CHAT.body(stream=False))
            assert response.status_code in (502, 503)
            assert all(worker.up for worker in stack.router.workers.values())
        assert (await stack.post(CHAT.path, CHAT.body(stream=False))).status_code == 200


class Process:
    """`warmroute worker sim` as a process of its own, on a fixed port."""

    def __init__(self) -> None:
        self.port = 0

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.cli", "worker", "sim", "--port", str(self.port), "--model", "m", "--speed", "5",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = (await soon(self._process.stdout.readline(), "the worker's start")).decode()
        self.port = int(line.strip().rsplit(":", 1)[1])

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.mark.slow
async def test_a_killed_worker_fails_no_request_that_had_sent_nothing_and_is_used_again_when_it_is_back() -> None:
    processes = [Process() for _ in range(3)]
    await asyncio.gather(*(p.start() for p in processes))
    try:
        settings = config(workers=[WorkerConfig(url=f"http://{p.id}") for p in processes], upstream={"probe_interval_s": 0.5})
        async with running(settings) as stack:
            stop = asyncio.Event()
            outcomes: list[tuple[float, str, bool, bool]] = []  # when asked, worker, any byte came, well ended

            async def client(number: int) -> None:
                turn = 0
                while not stop.is_set():
                    turn += 1
                    stream = (number + turn) % 3 != 0
                    text = f"session {number} turn {turn} " + "some code\n" * 300
                    asked, worker, begun, well = time.perf_counter(), "", False, False
                    body = CHAT.body(text, stream=stream, max_tokens=30)
                    try:
                        async with stack.client.stream("POST", CHAT.path, json=body) as response:
                            worker = response.headers.get("x-warmroute-worker", "")
                            begun = response.status_code == 200
                            content = await response.aread()
                            well = begun and (content.endswith(CHAT.done) if stream else content.startswith(b"{"))
                    except httpx.HTTPError:
                        pass
                    outcomes.append((asked, worker, begun, well))

            clients = [asyncio.ensure_future(client(number)) for number in range(16)]
            victim = processes[0]
            await until(lambda: {o[1] for o in outcomes} >= {p.id for p in processes}, "load on every worker")
            victim.kill()
            killed = time.perf_counter()
            done = len(outcomes)
            await until(lambda: len(outcomes) > done + 60, "requests after the kill")
            await until(lambda: time.perf_counter() - killed > 2.2, "two seconds")
            done = len(outcomes)
            await until(lambda: len(outcomes) > done + 20, "more requests")

            assert all(begun for _, _, begun, _ in outcomes), "a request failed that had sent nothing to its client"
            assert all(well for _, worker, _, well in outcomes if worker != victim.id)
            assert not [o for o in outcomes if o[0] > killed + 2.0 and o[1] == victim.id]

            await victim.end()
            await victim.start()
            back = time.perf_counter()
            await until(lambda: any(o[0] > back and o[1] == victim.id and o[3] for o in outcomes), "use of the worker that is back")
            stop.set()
            await asyncio.gather(*clients)
            await stack.until_idle()
    finally:
        await asyncio.gather(*(p.end() for p in processes))
