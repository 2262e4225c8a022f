"""The HTTP server: uvicorn, with a protocol that adds limits on heads and a notice when the client's connection is lost."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.config import Listen
from gateway.outbox import BatchedTransport, outbox

logger = logging.getLogger("warmroute.server")


def _closing(length: int) -> bytes:
    return b"content-length: %d\r\nconnection: close\r\n\r\n" % length


def protocol_class(listen: Listen) -> type[HttpToolsProtocol]:
    """uvicorn's httptools protocol with this gateway's limits."""
    max_head = int(listen.max_header_kb * 1024)
    header_timeout_s, body_timeout_s = listen.header_timeout_s, listen.body_timeout_s

    class GatewayProtocol(HttpToolsProtocol):
        """One client connection. `on_lost`, set by the application while it serves a request, is called when the client leaves."""

        on_lost: Callable[[], None] | None = None
        _head_bytes = 0
        _in_head = True
        receiving_since: float | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:  # type: ignore[override]
            super().connection_made(transport)  # type: ignore[arg-type]
            self.transport = BatchedTransport(self.transport, outbox())  # type: ignore[assignment]
            self.receiving_since = self.loop.time()

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                # counted before parsing: the parser itself would collect headers without end
                self._head_bytes += len(data)
                if self.receiving_since is None:
                    self.receiving_since = self.loop.time()
            super().data_received(data)
            if self._in_head and self._head_bytes > max_head and not self.transport.is_closing():
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                )
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_bytes = 0
            self.scope["extensions"] = {"warmroute.connection": self}
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head = True
            self.receiving_since = None
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            on_lost, self.on_lost = self.on_lost, None
            if on_lost is not None:
                on_lost()

        def take_body(self) -> bytes | None:
            """The request's body where all of it has come and no `receive` was called; None otherwise."""
            cycle = self.cycle
            if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
                return None
            body, cycle.body = bytes(cycle.body), bytearray()
            cycle.message_event.clear()
            self.flow.resume_reading()
            return body

        def respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
            """Send a whole response at once, past ASGI. Header names are lower case, and the length is added here."""
            cycle = self.cycle
            if cycle.disconnected or cycle.response_started:
                return
            lines = [STATUS_LINE[status]]
            for name, value in cycle.default_headers:
                lines += (name, b": ", value, b"\r\n")
            for name, value in headers:
                if name == b"connection":
                    cycle.keep_alive = False  # the only value this gateway sends is "close"
                else:
                    lines += (name, b": ", value, b"\r\n")
            lines.append(b"content-length: %d\r\n\r\n" % len(body) if cycle.keep_alive else _closing(len(body)))
            lines.append(body)
            cycle.response_started = cycle.response_complete = True
            self.transport.write(b"".join(lines))
            cycle.message_event.set()
            if not cycle.keep_alive:
                self.transport.close()
            cycle.on_response()

        def chunk_writer(self) -> Callable[[bytes], None]:
            """For a chunked response that has started: a function that sends bytes which are framed as chunks, past ASGI."""
            transport = self.transport
            transport.flush()  # type: ignore[attr-defined]
            return transport.write_now  # type: ignore[attr-defined,no-any-return]

        async def drained(self) -> None:
            """Wait until the client has taken most of what was written (or is gone)."""
            await self.flow.drain()

        def is_overdue(self, now: float) -> bool:
            """Whether this client takes too long in all to send a request (an inactivity limit would not stop a slow drip)."""
            if self.receiving_since is None:
                return False
            return now - self.receiving_since > (header_timeout_s if self._in_head else body_timeout_s)

    return GatewayProtocol


class Server(uvicorn.Server):
    """uvicorn's server, which also cuts clients that are too slow to send and can tell its port."""

    def __init__(self, app: Any, listen: Listen, *, on_started: Callable[[str], None] | None = None, grace_s: float = 30.0):
        config = uvicorn.Config(
            app, host=listen.host, port=listen.port, http=protocol_class(listen), ws="none", loop="uvloop", lifespan="on",
            access_log=False, log_config=None, server_header=False, timeout_keep_alive=75, backlog=4096,
            timeout_graceful_shutdown=int(grace_s), proxy_headers=False,
        )  # fmt: skip
        super().__init__(config)
        self._on_started = on_started
        self._sweeper: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.port = port
            self._sweeper = asyncio.create_task(self._sweep(), name="slow clients")
            if self._on_started is not None:
                self._on_started(f"http://{'[' + host + ']' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().shutdown(sockets)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for connection in list(self.server_state.connections):
                if getattr(connection, "is_overdue", lambda _: False)(now):
                    connection.transport.close()  # type: ignore[union-attr]
