"""A client connection: uvicorn's protocol with limits on what clients send and a short way for inference requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.config import Listen
from gateway.dialects import DIALECTS
from gateway.outbox import BatchedTransport, outbox


class DirectCycle(RequestResponseCycle):
    """One inference request on a client connection, with as little as possible around it.

    An ASGI cycle like uvicorn's (`receive`, `send`), which starts when the body is there, and which the application may go past:
    it is also the scope's extension `warmroute.connection`.
    """

    def __init__(self, protocol: GatewayProtocol, keep_alive: bool):
        # what uvicorn's protocol and cycle read of a cycle; its __init__ would make an event, a logger and more per request
        self.scope = {"method": "POST"}  # type: ignore[typeddict-item]
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.default_headers = protocol.server_state.default_headers
        self.on_response = protocol.on_direct_response
        self.message_event = _NO_EVENT  # type: ignore[assignment]
        self.access_log = False
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = False
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding = None
        self.expected_content_length = 0
        self.parts: list[bytes] = []
        self.size = 0
        self.received = False
        self.task: asyncio.Task[None] | None = None
        self.on_lost: Callable[[], None] | None = None  # set by the application: called when the client leaves
        self.on_paused: Callable[[], None] | None = None  # the same for a client that takes its answer too slowly

    async def receive(self) -> Any:
        """The body, whole; then nothing but the client's leaving."""
        if not self.received:
            self.received = True
            return {"type": "http.request", "body": self.take_body(), "more_body": False}
        gone = asyncio.Event()
        self.on_lost = gone.set
        if not self.disconnected:
            await gone.wait()
        return {"type": "http.disconnect"}

    def take_body(self) -> bytes:
        """The request's body. It is the caller's from now on."""
        parts, self.parts = self.parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def respond(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole response at once, past ASGI. Header names are lower case, and the length is added here."""
        if self.disconnected or self.response_started:
            return
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
        self.response_complete = True
        self.transport.write(head + body)
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def start_chunked(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of a chunked response; `send` (or `chunk_writer`) goes on from there."""
        if not self.disconnected and not self.response_started:
            self.chunked_encoding = True
            self.transport.write(self._head(status, headers, b"transfer-encoding: chunked\r\n"))

    def _head(self, status: int, headers: list[tuple[bytes, bytes]], framing: bytes) -> bytes:
        self.response_started = True
        lines = [STATUS_LINE[status]]
        for name, value in self.default_headers:
            lines += (name, b": ", value, b"\r\n")
        for name, value in headers:
            if name == b"connection":
                self.keep_alive = False  # the only value this gateway sends is "close"
            else:
                lines += (name, b": ", value, b"\r\n")
        lines += (framing, b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        return b"".join(lines)

    def chunk_writer(self) -> Callable[[bytes], None]:
        """For a chunked response that has started: a function that sends bytes which are framed as chunks, past ASGI."""
        transport = self.transport
        transport.flush()  # type: ignore[attr-defined]
        return transport.write_now  # type: ignore[attr-defined]


class _NoEvent:
    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass


_NO_EVENT = _NoEvent()


class GatewayProtocol(HttpToolsProtocol):
    """One client connection: uvicorn's httptools protocol with limits, and a short way for inference requests."""

    direct: DirectCycle | None = None  # the inference request under way
    _head_bytes = 0
    _in_head = True
    receiving_since: float | None = None
    idle_since: float | None = None
    _running: RequestResponseCycle | None = None  # the last cycle that went through ASGI; `cycle` may be one queued behind it
    _untaken = (0, 0.0)  # bytes that the client has not taken, and since when they are so many

    def __init__(self, *args: Any, limits: Listen, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.listen = limits
        self.max_head = int(limits.max_header_kb * 1024)
        self.max_body = int(limits.max_body_mb * (1 << 20))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport = BatchedTransport(self.transport, outbox())  # type: ignore[assignment]
        self.receiving_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            # counted before parsing: the parser itself would collect headers without end
            self._head_bytes += len(data)
            if self.receiving_since is None:
                self.receiving_since = self.loop.time()
                self.idle_since = None
        super().data_received(data)
        if self._in_head and self._head_bytes > self.max_head and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        parser = self.parser
        path, _, query = self.url.partition(b"?")
        route = _ROUTES.get(path)
        # a client that does not take its answers is served by way of `send`, which waits for it
        busy = self.flow.write_paused or (self.cycle is not None and not self.cycle.response_complete)
        if route is None or busy or parser.get_method() != b"POST" or parser.should_upgrade():
            url, headers, expects = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.headers, self.expect_100_continue = url, headers, expects
            self.scope["headers"] = headers
            super().on_headers_complete()
            return
        cycle = self.cycle = self.direct = DirectCycle(self, parser.should_keep_alive() and parser.get_http_version() != "1.0")
        self.scope = {  # type: ignore[typeddict-item]
            "type": "http",
            "method": "POST",
            "path": route,
            "query_string": query,
            "headers": self.headers,
            "client": self.client,
            "extensions": {"warmroute.connection": cycle},  # type: ignore[dict-item]
        }
        if self.expect_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if type(cycle) is not DirectCycle:
            super().on_body(body)
        elif cycle.more_body:
            cycle.parts.append(body)
            cycle.size += len(body)
            if cycle.size > self.max_body:
                self._start_direct(cycle)  # to be refused; the rest is not kept

    def on_message_complete(self) -> None:
        self._in_head = True
        self.receiving_since = None
        cycle = self.cycle
        if type(cycle) is not DirectCycle:
            super().on_message_complete()
        elif cycle.more_body:
            self._start_direct(cycle)

    def _start_direct(self, cycle: DirectCycle) -> None:
        cycle.more_body = False
        cycle.task = self.loop.create_task(self.app(self.scope, cycle.receive, cycle.send))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_direct_response(self) -> None:
        """A direct cycle has sent its response: read on, or serve what was pipelined behind it."""
        self.direct = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self.idle_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        cycle, self.direct = self.direct, None
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            if cycle.on_lost is not None:
                cycle.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.direct is not None and self.direct.on_paused is not None:
            self.direct.on_paused()

    def is_overdue(self, now: float) -> bool:
        """Whether this client takes too long in all to send a request (an inactivity limit would not stop a slow drip)."""
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            return False  # what came behind a request under way may be a mere line break
        if self.receiving_since is not None:
            limit = self.listen.header_timeout_s if self._in_head else self.listen.body_timeout_s
            return now - self.receiving_since > limit
        return self.idle_since is not None and now - self.idle_since > self.timeout_keep_alive

    def takes_nothing(self, now: float) -> bool:
        """Whether bytes have waited for this client for too long without any being taken. Also after a graceful close."""
        size = self.transport.get_write_buffer_size()
        if not size or size != self._untaken[0]:
            self._untaken = (size, now)
            return False
        return now - self._untaken[1] > self.listen.write_timeout_s


_ROUTES = {path.encode(): path for path in DIALECTS}
