"""Gateways and workers for tests: the real gateway on a free port, simulated engines, and scripted workers on raw sockets.

A scripted worker does exactly what its test says, byte for byte: its faults are what is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeVar

import httptools
import httpx
import orjson

from gateway.app import Gateway
from gateway.config import Config, WorkerConfig
from gateway.server import Server

PATIENCE_S = 20.0  # how long a test waits for what must come; never reached when all is well


async def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Return once `condition()` holds; fails the test when it never does."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true") from None


T = TypeVar("T")


async def soon(awaitable: Awaitable[T], what: str = "it") -> T:
    """The result of `awaitable`; fails the test when it never comes."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"{what} did not happen") from None


# --- workers ---


class WorkerRequest:
    """One inference request as a scripted worker got it, and the means to answer it."""

    def __init__(self, connection: _WorkerConnection, path: str, headers: dict[str, str], body: bytes):
        self.connection = connection
        self.path = path
        self.headers = headers
        self.body = body

    @property
    def json(self) -> dict[str, Any]:
        return orjson.loads(self.body)  # type: ignore[no-any-return]

    @property
    def closed(self) -> asyncio.Event:
        """Set when the gateway has closed the connection."""
        return self.connection.closed

    def write(self, data: bytes) -> None:
        self.connection.transport.write(data)

    def start_stream(self) -> None:
        self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.write(b"0\r\n\r\n")

    def stream(self, *events: bytes) -> None:
        """A whole stream."""
        self.start_stream()
        for event in events:
            self.chunk(event)
        self.end()

    def respond(self, body: bytes, status: int = 200, headers: bytes = b"content-type: application/json\r\n") -> None:
        self.write(b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body))

    def reset(self) -> None:
        """End the connection the way a crash does."""
        sock = self.connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.transport.abort()

    def close(self) -> None:
        self.connection.transport.close()


Script = Callable[[WorkerRequest], Awaitable[None]]


class _WorkerConnection(asyncio.Protocol):
    def __init__(self, worker: ScriptedWorker):
        self.worker = worker
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.worker.connections.add(self)
        self.worker.accepted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.worker.connections.discard(self)
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""
        self._headers: dict[str, str] = {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        request = WorkerRequest(self, self._url.decode(), self._headers, self._body)
        task = asyncio.ensure_future(self.worker.handle(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_started: dict[str, ScriptedWorker] = {}  # by id


class ScriptedWorker:
    """A worker that answers probes like an engine and inference requests by `script`. `async with` starts it on a free port."""

    def __init__(self, script: Script | None = None, *, models: tuple[str, ...] = ("m",), metrics: str = ""):
        self.script = script
        self.models = models
        self.metrics = metrics
        self.healthy = True
        self.silent = False  # accept and never answer, probes included
        self.requests: list[WorkerRequest] = []
        self.connections: set[_WorkerConnection] = set()
        self.accepted = 0
        self.probes = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _WorkerConnection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        _started[self.id] = self

    async def stop(self) -> None:
        _started.pop(self.id, None)
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def until_requests(self, count: int) -> WorkerRequest:
        """The `count`-th inference request, once it has come."""
        await until(lambda: len(self.requests) >= count, f"request {count} of {self.id}")
        return self.requests[count - 1]

    async def handle(self, request: WorkerRequest) -> None:
        if request.path in ("/health", "/v1/models", "/metrics"):
            self.probes += 1
        if self.silent:
            return
        if request.path == "/health":
            request.respond(b"", 200 if self.healthy else 503)
        elif request.path == "/v1/models":
            request.respond(orjson.dumps({"data": [{"id": model, "max_model_len": 100_000} for model in self.models]}))
        elif request.path == "/metrics":
            request.respond(self.metrics.encode())
        elif request.path in ("/kv_event_sources", "/server_info"):
            request.respond(b"{}", 404)
        else:
            self.requests.append(request)
            if self.script is not None:
                await self.script(request)


# --- the gateway ---


class Stack:
    """A running gateway in this process."""

    def __init__(self, gateway: Gateway, server: Server, client: httpx.AsyncClient):
        self.gateway = gateway
        self.server = server
        self.client = client
        self.port: int = server.port
        self.router = gateway.fleet.router

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        return await soon(self.client.post(path, content=content, headers={"content-type": "application/json", **(headers or {})}))

    async def state(self) -> dict[str, Any]:
        return (await self.client.get("/admin/state")).json()  # type: ignore[no-any-return]

    async def until_up(self) -> None:
        """Return once all configured workers that are healthy are in use: the first probe may have met a process busy with other tests."""
        configured = [w for w in self.router.workers.values() if (s := _started.get(w.id)) and s.healthy and not s.silent]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S / 4):
                while not all(worker.up for worker in configured):
                    await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        """Return once no reservation and no active upstream connection is left, as /admin/state tells it."""

        async def idle() -> None:
            while True:
                state = await self.state()
                if not state["reservations"] and not state["upstream_active"]:
                    return
                await asyncio.sleep(0.01)

        await soon(idle(), "an idle gateway")

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        return Client(reader, writer)


def config(*urls: str, **sections: Any) -> Config:
    """A gateway configuration with fast probes; `sections` override (listen={...}, upstream={...}, ...)."""
    listen = {"port": 0, **sections.pop("listen", {})}
    upstream = {"probe_interval_s": 0.1, "probe_timeout_s": 1.0, "probe_failures": 2, **sections.pop("upstream", {})}
    workers = [WorkerConfig(url=url) for url in urls] + sections.pop("workers", [])
    return Config(listen=listen, upstream=upstream, workers=workers, **sections)


@asynccontextmanager
async def running(settings: Config) -> AsyncIterator[Stack]:
    """The gateway with these settings, on a free port of this process."""
    gateway = Gateway(settings)
    server = Server(gateway, settings.listen, grace_s=5.0)
    # what `serve` does, without its signal handlers and its loop, which looks only every 0.1 s whether to end
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    assert server.started, "the gateway did not start"
    await server.on_tick(0)
    url = f"http://127.0.0.1:{server.port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, verify=False) as client:
            stack = Stack(gateway, server, client)
            await stack.until_up()
            yield stack
    finally:
        for listening in server.servers:
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        assert server._sweeper is not None
        server._sweeper.cancel()
        await soon(server.lifespan.shutdown(), "the gateway's end")


@asynccontextmanager
async def gateway_with(*scripts: Script | ScriptedWorker | None, **sections: Any) -> AsyncIterator[tuple[Stack, list[ScriptedWorker]]]:
    """A gateway in front of scripted workers, one for each script."""
    async with AsyncExitStack() as stack:
        workers = [s if isinstance(s, ScriptedWorker) else ScriptedWorker(s) for s in scripts]
        for worker in workers:
            await stack.enter_async_context(worker)
        started = await stack.enter_async_context(running(config(*(w.url for w in workers), **sections)))
        yield started, workers


# --- raw clients ---


class Answer:
    """A response read off a raw connection."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes):
        self.status = status
        self.headers = headers
        self.body = body


class Client:
    """A raw client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer

    def send(self, path: str, body: Any, headers: str = "") -> None:
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
        self.writer.write(head.encode("latin-1") + content)

    async def head(self) -> tuple[int, dict[str, str]]:
        text = (await soon(self.reader.readuntil(b"\r\n\r\n"), "a response head")).decode("latin-1")
        lines = text.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk's data; b"" for the last one. Raises IncompleteReadError when the connection ends."""
        size = int((await soon(self.reader.readuntil(b"\r\n"), "a chunk")).strip(), 16)
        data = await soon(self.reader.readexactly(size + 2), "a chunk")
        return data[:-2]

    async def answer(self) -> Answer:
        """A whole response."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            parts = []
            while data := await self.chunk():
                parts.append(data)
            return Answer(status, headers, b"".join(parts))
        body = await soon(self.reader.readexactly(int(headers.get("content-length", 0))), "a body")
        return Answer(status, headers, body)

    async def until_contains(self, text: bytes) -> bytes:
        """Everything up to and including `text`."""
        return await soon(self.reader.readuntil(text), f"{text!r}")

    def abort(self) -> None:
        """Leave with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None:  # None and an error: the gateway has closed it already
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
