"""A client that leaves takes its work with it: the worker sees it within a second, and nothing stays reserved."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.gateway.spoken import CHAT, Spoken, every_dialect
from tests.stack import Client, ScriptedWorker, Stack, WorkerRequest, config, gateway_with, running, soon, until
from workers.profile import WorkerProfile
from workers.simserver import SimServer

WITHIN_S = 1.0


async def _seen_within_a_second(request: WorkerRequest, left: float) -> None:
    await soon(request.closed.wait(), "the end of the worker's connection")
    assert time.perf_counter() - left < WITHIN_S


@every_dialect
@pytest.mark.parametrize("way", ["reset", "close"])
async def test_leaving_in_the_middle_of_a_stream_ends_the_workers_request(spoken: Spoken, way: str) -> None:
    async def script(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(spoken.preamble)
        for _ in range(3):
            request.chunk(spoken.content("x"))
        # and then nothing: only the disconnect can end it

    async with gateway_with(script) as (stack, [worker]):
        client = await stack.connect()
        client.send(spoken.path, spoken.body())
        await client.head()
        await client.chunk()
        await _leave(client, way)
        await _seen_within_a_second(worker.requests[0], time.perf_counter())
        await stack.until_idle()


@every_dialect
@pytest.mark.parametrize("way", ["reset", "close"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("head_sent", [True, False], ids=["head-sent", "nothing-sent"])
async def test_leaving_before_the_first_token_ends_the_workers_request(spoken: Spoken, way: str, stream: bool, head_sent: bool) -> None:
    async def script(request: WorkerRequest) -> None:
        if head_sent:
            request.start_stream()

    async with gateway_with(script) as (stack, [worker]):
        client = await stack.connect()
        client.send(spoken.path, spoken.body(stream=stream))
        request = await worker.until_requests(1)
        assert (await stack.state())["reservations"] == 1
        await _leave(client, way)
        await _seen_within_a_second(request, time.perf_counter())
        await stack.until_idle()
        assert len(worker.requests) == 1  # nobody else was asked to do it


async def test_leaving_while_the_body_is_still_being_sent_reserves_nothing() -> None:
    async with gateway_with(None) as (stack, [worker]):
        client = await stack.connect()
        client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await client.writer.drain()
        client.abort()
        other = await stack.connect()  # the gateway goes on
        other.send(CHAT.path, CHAT.body())
        await worker.until_requests(1)
        await _leave(other, "reset")
        await stack.until_idle()


@pytest.mark.replaces
async def test_leaving_while_the_gateway_waits_for_a_new_connection_after_a_stale_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves between the two tries of one worker: the second try must not be started for nobody."""
    connecting, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: WorkerRequest) -> None:
        if len(worker.requests) == 1:
            request.stream(*CHAT.whole("a"))
        elif len(worker.requests) == 2:
            request.reset()  # on a pooled connection and before any byte: what a connection that had gone stale looks like

    async with ScriptedWorker(script) as worker, running(config(worker.url)) as stack:
        await stack.post(CHAT.path, CHAT.body())
        [pool] = stack.gateway.fleet.pools.values()
        connect = pool.connect

        async def slow_connect() -> object:
            connecting.set()
            await soon(go_on.wait())
            return await connect()

        monkeypatch.setattr(pool, "connect", slow_connect)
        client = await stack.connect()
        client.send(CHAT.path, CHAT.body())
        await soon(connecting.wait())
        client.abort()
        await until(lambda: any(relay.gone for relay in stack.gateway.inference.active), "the client's leaving")
        go_on.set()
        await stack.until_idle()


async def test_two_hundred_aborted_requests_leave_nothing_behind() -> None:
    """Every kind of abort, against simulated engines: before the first token, in the middle of a stream, without a stream."""
    profile = WorkerProfile(engine="sim", max_num_seqs=256)
    servers = [SimServer(profile, speed=5.0, model="m") for _ in range(2)]
    for server in servers:
        await server.start()
    try:
        async with running(config(*(s.url for s in servers))) as stack:
            for _ in range(5):
                await asyncio.gather(*(_abort_one(stack, number) for number in range(40)))
            left = time.perf_counter()
            await stack.until_idle()
            state = await stack.state()
            assert state["reservations"] == 0 and state["upstream_active"] == 0
            await until(lambda: not any(s.engine.running or s.engine.waiting for s in servers), "idle engines")
            assert time.perf_counter() - left < WITHIN_S
            assert sum(s.requests_total for s in servers) >= 100
            assert sum(s.aborted_total for s in servers) > 50
            response = await stack.post(CHAT.path, CHAT.body(max_tokens=3))
            assert response.status_code == 200
    finally:
        for server in servers:
            await server.stop()


async def _abort_one(stack: Stack, number: int) -> None:
    client = await stack.connect()
    kind = number % 4
    client.send(CHAT.path, CHAT.body(f"question {number} " + "words " * 400, stream=kind != 0, max_tokens=5000))
    await client.writer.drain()
    if kind == 1:
        await client.head()
    elif kind == 2:
        await client.head()
        await client.chunk()
    elif kind == 0:
        await until(lambda: any(worker.in_flight for worker in stack.router.workers.values()), "a reservation")
    await _leave(client, "reset" if number % 2 else "close")


async def test_a_request_that_follows_an_abort_is_served_as_ever() -> None:
    """Claude Code aborts a stream and posts the same again without streaming, at once."""

    async def script(request: WorkerRequest) -> None:
        if request.json["stream"]:
            request.start_stream()
            request.chunk(CHAT.preamble + CHAT.content("a"))
        else:
            request.respond(b'{"choices":[],"usage":{"prompt_tokens":3}}')

    async with gateway_with(script) as (stack, _):
        for _ in range(50):
            client = await stack.connect()
            client.send(CHAT.path, CHAT.body())
            await client.head()
            client.abort()
            assert (await stack.post(CHAT.path, CHAT.body(stream=False))).status_code == 200
        await stack.until_idle()


@every_dialect
async def test_refused_requests_hold_no_slot(spoken: Spoken) -> None:
    async def script(request: WorkerRequest) -> None:
        if b"user2" in request.body:
            request.respond(b'{"error":{"message":"bad role"}}', 400)
        else:
            request.respond(b"{}")

    async with gateway_with(script) as (stack, _):
        for _ in range(5):
            assert (await stack.post(spoken.path, spoken.body("user2"))).status_code == 400
            unknown = await stack.post(spoken.path, spoken.body(model="nope"))
            assert unknown.status_code == 404
            spoken.error_of(unknown.content)
            assert "m" in spoken.error_of(unknown.content)["message"]
            assert unknown.headers["x-should-retry"] == "false"
        assert (await stack.state())["reservations"] == 0
        assert (await stack.post(spoken.path, spoken.body(stream=False))).status_code == 200


async def _leave(client: Client, way: str) -> None:
    if way == "reset":
        client.abort()
    else:
        await client.close()


