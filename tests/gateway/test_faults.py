"""Faults that were found by looking for them: races at the ends of connections, and clients and workers that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import tracemalloc

import orjson
import pytest

from gateway.body import BodyReader
from gateway.dialects import CHAT as CHAT_DIALECT
from gateway.outbox import Outbox
from gateway.upstream import Pool
from kvindex.chain import identity_seed
from tests.gateway.spoken import CHAT
from tests.stack import ScriptedWorker, WorkerRequest, config, gateway_with, running, until


async def _answers(request: WorkerRequest) -> None:
    request.stream(*CHAT.whole("fine"))


async def test_a_write_to_a_connection_that_was_lost_takes_no_other_writes_with_it() -> None:
    loop = asyncio.get_running_loop()
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    lost, _ = await loop.create_connection(asyncio.Protocol, *address)
    kept, _ = await loop.create_connection(asyncio.Protocol, *address)
    outbox = Outbox(loop)
    lost.abort()
    outbox.put(lost, b"late")
    outbox.put(kept, b"in time")
    await until(lambda: b"in time" in got, "the other connection's bytes")
    kept.close()
    server.close()


async def test_a_worker_that_accepts_and_resets_at_once_costs_a_move_not_an_error() -> None:
    async with gateway_with(_answers, _answers, policy="round-robin", upstream={"probe_interval_s": 30.0}) as (stack, workers):
        port = workers[0].port
        await workers[0].stop()
        listener = socket.create_server(("127.0.0.1", port))
        listener.setblocking(False)

        async def resets() -> None:
            while True:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()

        resetting = asyncio.ensure_future(resets())
        await until(lambda: not stack.gateway.fleet.pools[workers[0].id].open_connections)
        for _ in range(8):
            assert (await stack.post(CHAT.path, CHAT.body())).status_code == 200
        resetting.cancel()
        listener.close()


@pytest.mark.replaces
async def test_a_connection_lost_before_its_request_is_a_failure_of_the_worker() -> None:
    """The handshake's success is learned a turn of the loop later; the reset may come between."""
    async with ScriptedWorker(_answers) as worker, running(config(worker.url)) as stack:
        pool = stack.gateway.fleet.pools[worker.id]
        connect = Pool.connect
        broken = 1

        async def loses(self: Pool) -> object:
            nonlocal broken
            connection = await connect(self)
            if broken:
                broken -= 1
                assert connection.transport is not None
                connection.transport.abort()
                await until(lambda: connection.transport is None)
            return connection

        pool.connect = loses.__get__(pool)  # type: ignore[method-assign]
        response = await stack.post(CHAT.path, CHAT.body())
        assert response.status_code in (200, 502), response.text  # never the gateway's own 500
        assert (await stack.post(CHAT.path, CHAT.body())).status_code == 200


async def test_leaving_ends_a_pipelined_request_that_has_others_behind_it() -> None:
    async def script(request: WorkerRequest) -> None:
        if b"first" in request.body:
            request.stream(*CHAT.whole("one"))
        else:
            request.start_stream()
            request.chunk(CHAT.preamble + CHAT.content("two"))

    async with gateway_with(script) as (stack, [worker]):
        client = await stack.connect()
        for text in ("first", "second", "third"):
            client.send(CHAT.path, CHAT.body(text))
        await client.until_contains(CHAT.content("two"))
        client.abort()
        await until(worker.requests[1].closed.is_set, "the end of the second request")
        await stack.until_idle()
        assert len(worker.requests) == 2


@pytest.mark.parametrize("models", [b'{"data":null}', b'{"data":7}', b"[]", b"null", b"{"])
async def test_a_worker_that_describes_itself_badly_does_not_keep_the_gateway_from_starting(models: bytes) -> None:
    class Odd(ScriptedWorker):
        async def handle(self, request: WorkerRequest) -> None:
            if request.path == "/v1/models":
                request.respond(models)
            else:
                await super().handle(request)

    odd = Odd(metrics="sglang:max_total_num_tokens NaN\nsglang:num_running_reqs +Inf\nsglang:max_total_num_tokens +Inf\n")
    async with gateway_with(odd, _answers) as (stack, _):
        assert (await stack.post(CHAT.path, CHAT.body())).status_code == 200
        await until(lambda: all(worker.up for worker in stack.router.workers.values()))


async def test_a_worker_that_says_it_is_ill_is_taken_out_though_it_answers() -> None:
    """An engine that died behind its server: /health says so, and requests fail at once, which looks like an idle worker."""

    async def fails(request: WorkerRequest) -> None:
        request.respond(b'{"error":{"message":"engine dead"}}', 500)

    async with gateway_with(fails, _answers, policy="round-robin") as (stack, [ill, _]):
        ill.healthy = False
        for _ in range(200):
            assert (await stack.post(CHAT.path, CHAT.body())).status_code == 200
            if not stack.router.workers[ill.id].up:
                break
            await asyncio.sleep(0.01)
        assert not stack.router.workers[ill.id].up
        ill.script, ill.healthy = _answers, True
        await until(lambda: stack.router.workers[ill.id].up, "the worker's return")


async def test_what_was_routed_long_ago_counts_as_evicted() -> None:
    async with gateway_with(_answers, index={"ttl_s": 0.2}, upstream={"keepalive_s": 0.2}) as (stack, _):
        await stack.post(CHAT.path, CHAT.body("a long prompt " * 1000))
        await until(lambda: len(stack.router.index) > 0)
        await until(lambda: len(stack.router.index) == 0, "an empty index")


@pytest.mark.replaces
async def test_a_worker_that_goes_down_during_the_handshake_gets_no_request() -> None:
    """What is declared down interrupts the requests it has; one that is just connecting must not be left waiting there."""

    async def silent(request: WorkerRequest) -> None:
        pass

    async with gateway_with(silent, silent, policy="round-robin", upstream={"probe_interval_s": 30.0}) as (stack, workers):
        connect = Pool.connect
        fleet = stack.gateway.fleet
        first: list[str] = []

        async def slow(self: Pool) -> object:
            connection = await connect(self)
            if not first:
                first.append(next(i for i, p in fleet.pools.items() if p is self))
                good = next(w for w in workers if w.id != first[0])
                good.script = _answers
                await fleet.monitor.mark_down(fleet.endpoints[first[0]], "test")
            return connection

        for pool in fleet.pools.values():
            pool.connect = slow.__get__(pool)  # type: ignore[method-assign]
        response = await stack.post(CHAT.path, CHAT.body())
        assert response.status_code == 200 and response.headers["x-warmroute-worker"] != first[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["large", "pipelined"])
async def test_a_client_that_takes_nothing_of_any_answer_is_cut(way: str) -> None:
    async def large(request: WorkerRequest) -> None:
        if b"small" in request.body:
            request.respond(b'{"ok":true}')
        else:
            request.respond(b"x" * (24 << 20))

    async with gateway_with(large, listen={"write_timeout_s": 0.5}) as (stack, [worker]):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", stack.port))
        content = orjson.dumps(CHAT.body(stream=False))
        small = orjson.dumps(CHAT.body("small", stream=False))

        def request(body: bytes) -> bytes:
            return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.path.encode(), len(body), body)

        sent = request(small) + request(content) if way == "pipelined" else request(content)
        await asyncio.get_running_loop().sock_sendall(client, sent)
        await worker.until_requests(2 if way == "pipelined" else 1)
        await until(lambda: len(stack.server.server_state.connections) == 1)
        await until(lambda: not stack.server.server_state.connections, "the end of the connection")
        client.close()
        await stack.until_idle()


async def test_answers_that_are_not_taken_do_not_pile_up() -> None:
    async def large(request: WorkerRequest) -> None:
        request.respond(b"x" * 900_000)

    async with gateway_with(large) as (stack, _):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", stack.port))
        content = orjson.dumps(CHAT.body(stream=False))
        for _ in range(20):
            await loop.sock_sendall(
                client, b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.path.encode(), len(content), content)
            )
            await asyncio.sleep(0.02)
        [connection] = stack.server.server_state.connections
        assert connection.transport.get_write_buffer_size() < 8_000_000
        client.close()
        await stack.until_idle()


def test_what_stands_before_the_conversation_counts_in_the_memory_of_known_prefixes() -> None:
    reader = BodyReader(512, max_bytes=4 << 20)
    messages = [{"role": "user", "content": "x" * 20_000}]
    for number in range(10):
        reader.read(CHAT_DIALECT, orjson.dumps({"model": "m", "note": f"{number}" + "y" * (1 << 20), "messages": messages}))
    kept = sum(len(orjson.dumps(checkpoint.head_fields)) for checkpoint in reader._checkpoints.values())
    assert kept <= reader.max_bytes
    # and it stays counted when the conversation goes on
    before = reader.kept_bytes
    messages += [{"role": "assistant", "content": "z" * 20_000}]
    reader.read(CHAT_DIALECT, orjson.dumps({"model": "m", "note": "9" + "y" * (1 << 20), "messages": messages}))
    assert reader.kept_bytes > min(before, 3 << 20)


async def test_a_reset_is_no_end_of_an_answer_without_a_length() -> None:
    async def script(request: WorkerRequest) -> None:
        request.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + CHAT.preamble + CHAT.content("half"))
        await asyncio.wait_for(seen.wait(), 10)
        request.reset()

    seen = asyncio.Event()
    async with gateway_with(script) as (stack, _):
        client = await stack.connect()
        client.send(CHAT.path, CHAT.body())
        await client.until_contains(CHAT.content("half"))
        seen.set()
        await client.until_contains(CHAT.error_mark)
        await client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_status_that_is_none_is_a_failure_of_the_worker(stream: bool) -> None:
    async def script(request: WorkerRequest) -> None:
        request.respond(b"odd", 777)

    async with gateway_with(script) as (stack, _):
        response = await stack.post(CHAT.path, CHAT.body(stream=stream))
        assert response.status_code == 502
        await stack.until_idle()


async def test_a_line_break_after_the_body_does_not_cut_the_answer() -> None:
    """Old clients end a body with an extra line break, which is no begun request."""

    async def script(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(CHAT.preamble + CHAT.content("a"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(request.closed.wait(), 2.5)
        request.chunk(CHAT.last)
        request.end()

    async with gateway_with(script, listen={"header_timeout_s": 0.2}) as (stack, _):
        client = await stack.connect()
        client.send(CHAT.path, CHAT.body())
        await client.until_contains(CHAT.content("a"))
        client.writer.write(b"\r\n")
        await client.until_contains(CHAT.done)
        await client.close()


def test_long_names_that_clients_send_are_not_kept() -> None:
    identity_seed.cache_clear()
    reader = BodyReader(512, max_bytes=1 << 20)
    tracemalloc.start()
    for number in range(40):
        name = f"{number}" + "m" * 500_000
        reader.read(CHAT_DIALECT, orjson.dumps({"model": name, "cache_salt": name, "messages": [{"role": "user", "content": "x"}]}))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 5_000_000


async def test_a_worker_host_that_vanishes_is_noticed_by_its_connections() -> None:
    """Nothing resets such a stream, and it is not moved once its client has seen output: TCP has to ask."""
    async with gateway_with(_answers) as (stack, [worker]):
        await stack.post(CHAT.path, CHAT.body())
        [connection] = stack.gateway.fleet.pools[worker.id].connections
        assert connection.transport is not None
        assert connection.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
