"""A small HTTP/1.1 server protocol for the simulated engine: requests read whole, answers whole or as a stream of events.

Raw asyncio and httptools, since several simulated engines share a machine with the gateway they are there to test.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, cast

import httptools

# Seconds an idle connection is kept, as uvicorn and thus vLLM do.
KEEP_ALIVE_S = 5.0

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(slots=True)
class HttpRequest:
    """A request read whole; `path` is without its query."""

    method: str
    path: str
    body: bytes
    keep_alive: bool


class Work(Protocol):
    """What a connection's current request is waiting for; told when the client goes away or can take more."""

    def disconnected(self) -> None: ...

    def writable(self) -> None: ...


class Connection(asyncio.Protocol):
    """One client connection. Its requests are answered in order, one at a time."""

    def __init__(self, handle: Callable[[HttpRequest, Connection], None], connections: set[Connection]) -> None:
        self._handle = handle
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[HttpRequest] = deque()
        self._current: HttpRequest | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._body: list[bytes] = []
        self._expects_continue = False
        self.transport: asyncio.Transport
        self.work: Work | None = None
        self.paused = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._stop_idle_timer()
        self._queue.clear()
        work, self.work = self.work, None
        if work is not None:
            work.disconnected()

    def data_received(self, data: bytes) -> None:
        self._stop_idle_timer()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self.work is not None:
            self.work.writable()

    # httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = []
        self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True

    def on_headers_complete(self) -> None:
        if self._expects_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0].decode("latin-1")
        request = HttpRequest(self._parser.get_method().decode(), path, b"".join(self._body), self._parser.should_keep_alive())
        self._body = []
        self._queue.append(request)
        self._next()

    # Answers

    @property
    def open(self) -> bool:
        """Whether something can still be written."""
        return not self.transport.is_closing()

    @property
    def local(self) -> bool:
        """Whether the client is on this machine."""
        peer = self.transport.get_extra_info("peername")
        return isinstance(peer, tuple) and peer[0] in ("127.0.0.1", "::1", "::ffff:127.0.0.1")

    def respond(self, status: int, body: bytes = b"", content_type: str = "application/json") -> None:
        """Answer whole."""
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._done()

    def start_stream(self) -> None:
        """Answer 200 and leave the body open for events."""
        self.transport.write(_STREAM_HEAD)

    def send_events(self, events: bytes, last: bool = False) -> None:
        """Write events in one piece; `last` ends the answer."""
        if last:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events))
            self._done()
        else:
            self.transport.write(b"%x\r\n%b\r\n" % (len(events), events))

    def reset(self) -> None:
        """End the connection as a crash would: with a TCP reset."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _next(self) -> None:
        if self._current is None and self._queue and self.open:
            self._current = self._queue.popleft()
            self._handle(self._current, self)

    def _done(self) -> None:
        self.work = None
        request, self._current = self._current, None
        if request is not None and not request.keep_alive:
            self.transport.close()
        elif self._queue:
            self._loop.call_soon(self._next)
        else:
            self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self.transport.close)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
