"""The HTTP server: uvicorn, with a protocol that adds limits on heads and a notice when the client's connection is lost."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import Listen

logger = logging.getLogger("warmroute.server")


class _OneWrite:
    """A client transport on which a response's head waits for its first body bytes: one system call instead of two."""

    __slots__ = ("_head", "_transport", "write_out")

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._head = b""
        self.write_out = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n") and not data.startswith(b"HTTP/1.1 100"):
            self._head = data
            return
        self.write_out(data)

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._transport.close()


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
            self.transport = _OneWrite(self.transport)  # type: ignore[assignment]
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

        def write_chunk(self, framed: bytes) -> bool:
            """Send body bytes that are already framed as chunks, past ASGI: for a chunked response that has started.

            False when the client is slower than the worker: await `drained` before more.
            """
            if not self.cycle.disconnected:
                self.transport.write_out(framed)  # type: ignore[attr-defined]
            return not self.flow.write_paused

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
