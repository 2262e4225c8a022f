"""The client side of the data plane: HTTP/1.1 to the workers over keep-alive connections, on asyncio protocols and httptools.

An `Exchange` is one request and its response. It is pull-based: the relay reads, and a relay that stops reading (a slow
client) stops the worker, since the connection pauses above `HIGH_WATER` unread bytes. What fails raises `UpstreamError`,
which says whether the worker may be asked again elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

from gateway.outbox import outbox
from workers.monitor import LOCAL_ERRORS

HIGH_WATER = 256 * 1024
_END_OF_EVENT = b"\n\n\r\n"  # an empty line that ends an event, and the line break that ends its chunk
# A host that vanished (power, network) resets nothing: without these a stream from it would never end.
# Probes start after 15 s of silence and give up 15 s later. The names are Linux's; others keep the system's times.
_TCP_KEEPALIVE = [
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]

clock = time.perf_counter


class UpstreamError(Exception):
    """The worker failed. `kind` is one of connect, closed, protocol; or local, where this side could not even ask it.

    `answered` is true once response bytes had come; `stale` when a pooled connection died before any: the worker had closed
    it while it lay idle and has not seen the request, so one try on a new connection is due.
    """

    def __init__(self, kind: str, detail: str, *, answered: bool = False, stale: bool = False):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.answered = answered
        self.stale = stale


class Interrupted(Exception):
    """The exchange was ended from this side: the client left (`client`), or the worker was declared down (`worker`)."""

    def __init__(self, cause: str):
        super().__init__(cause)
        self.cause = cause


class Splice:
    """Where the bytes of a stream go: straight to the client, but for the events that must be looked at."""

    __slots__ = ("deliver", "look_for", "looking", "mark", "write")

    def __init__(
        self,
        write: Callable[[bytes], None],
        mark: Callable[[float], None],
        look_for: bytes,
        deliver: Callable[[bytes], bool],
    ):
        self.write = write  # takes whole HTTP chunks
        self.mark = mark  # takes the time of each read
        self.look_for = look_for  # what marks an event that `deliver` must see
        self.looking = False  # an event that must be looked at has come in part
        self.deliver = deliver  # takes bytes without framing; False stops the flow


class Exchange:
    """One request on one connection: status and headers, then body pieces as they arrive."""

    __slots__ = (
        "_buffered", "_connection", "_failure", "_loop", "_nudged", "_parts", "_waiter", "committed", "complete", "headers", "status",
    )  # fmt: skip

    def __init__(self, connection: Connection):
        self._connection: Connection | None = connection
        self._parts: list[bytes] = []
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._loop = connection.pool.loop
        self._nudged = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.committed = False  # set by the relay: its client has seen output of this worker, so no other can take over

    # --- the relay's side ---

    async def head(self) -> int:
        """Wait for the response head; its status, or 0 after a nudge. Raises UpstreamError or Interrupted."""
        while not self.status:
            await self._wait()
            if self._nudged:
                self._nudged = False
                break
        return self.status

    async def read(self) -> bytes | None:
        """All body bytes that have come since the last call, waiting for some; b"" at the end, None after a nudge."""
        while not self._parts:
            if self.complete:
                return b""
            await self._wait()
            if self._nudged and not self._parts:
                self._nudged = False
                return None
        return self.take()

    def take(self) -> bytes:
        """The body bytes that have come and were not read yet; b"" where there are none."""
        parts = self._parts
        if not parts:
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._buffered > HIGH_WATER and self._connection is not None:
            self._connection.resume()
        self._buffered = 0
        return data

    async def pipe(self, splice: Splice) -> bool:
        """Let body bytes flow through `splice` as they arrive, without a task switch for each. `take` what is unread first.

        Ends when the body ends, when the client is slower than the worker, or after a nudge; true in the last case. Raises
        UpstreamError or Interrupted.
        """
        connection = self._connection
        if connection is not None:
            connection.splice_to(splice)
        try:
            await self._wait()
            return self._nudged
        finally:
            if connection is not None:
                connection.splice_to(None)
            self._nudged = False

    def stop_piping(self) -> None:
        """Let `pipe` return: the client is slower than the worker."""
        connection = self._connection
        if connection is not None and connection.splice is not None:
            connection.splice_to(None)
            self._wake()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def unread(self) -> bool:
        """Whether body bytes have come that were not read yet."""
        return bool(self._parts)

    @property
    def waiting(self) -> bool:
        """Whether the relay is waiting for the worker now (and not for its client)."""
        return self._waiter is not None

    def heard(self) -> None:
        """Note that the worker is alive: what is piped is not looked at read by read."""
        if self._connection is not None:
            self._connection.pool.heard_at = self._loop.time()

    def nudge(self) -> None:
        """Let a waiting relay look up: its `head` returns 0, its `read` None."""
        if self._waiter is not None and not self._waiter.done():
            self._nudged = True
            self._waiter.set_result(None)

    def interrupt(self, cause: str) -> None:
        """End the exchange from this side: close its connection and make the pending read raise Interrupted(cause)."""
        if not self.complete and self._failure is None:
            self._fail(Interrupted(cause))
        self.close()

    def close(self) -> None:
        """Let go of the connection; one that is in the middle of a response is closed, so that the worker stops working."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.exchange is self:
            connection.abandon()

    # --- the connection's side ---

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(failure)


class Connection(asyncio.Protocol):
    """One connection to a worker; serves one exchange at a time and returns to its pool after each."""

    __slots__ = (
        "_between_chunks", "_body", "_done", "_headers", "_keep_alive", "_look_for", "_loop", "_mark", "_pass_on", "_paused", "answered",
        "exchange", "idle_since", "parser", "pool", "splice", "transport", "used",
    )  # fmt: skip

    def __init__(self, pool: Pool):
        self.pool = pool
        self.exchange: Exchange | None = None
        self.splice: Splice | None = None
        self._pass_on: Callable[[bytes], None] | None = None  # the splice's `write`, while whole events may go there unseen
        self._loop = pool.loop
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.idle_since = 0.0
        self.used = False
        self.answered = False
        self._paused = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._done = False
        self._between_chunks = False
        self._keep_alive = False

    def splice_to(self, splice: Splice | None) -> None:
        """Send the body to `splice` from now on; None: keep it for the exchange."""
        self.splice = splice
        self._pass_on = None
        if splice is not None:
            self._mark, self._look_for = splice.mark, splice.look_for
            if self._between_chunks and not splice.looking:
                self._pass_on = splice.write

    def start(self, head: bytes, body: bytes) -> Exchange:
        """Send a request; the connection must be idle."""
        exchange = self.exchange = Exchange(self)
        self.answered = False
        self._between_chunks = False
        self._headers = []
        transport = self.transport
        assert transport is not None
        self.pool.outbox.put(transport, head)
        if body:
            self.pool.outbox.put(transport, body)
        return exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.pool.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is None:  # lost already
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        # Every token passes here, so: nothing but the unavoidable. A read that ends with an event and its chunk, and holds nothing
        # to be looked at, is whole chunks as it came: it needs no parser and is passed on as it is.
        pass_on = self._pass_on
        if pass_on is not None and data[-4:] == _END_OF_EVENT and self._look_for not in data:
            self._mark(clock())
            pass_on(data)
            return
        exchange = self.exchange
        if exchange is None:  # bytes on an idle connection belong to nobody
            self._drop()
            return
        self.answered = True
        self.pool.heard_at = self._loop.time()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(UpstreamError("protocol", "the worker switched protocols", answered=True))
            return
        except httptools.HttpParserError as error:
            self._fail(UpstreamError("protocol", f"the worker's response is not valid HTTP: {error}", answered=True))
            return
        if data[-4:] != _END_OF_EVENT:
            self._between_chunks = False  # a part of the next size line may have come, which the parser does not tell
        splice = self.splice
        if splice is not None and not self._done:
            body, self._body = b"".join(self._body), []
            if not body or splice.deliver(body):
                self.splice_to(splice)
            else:
                exchange.stop_piping()
            return
        if self._body:
            exchange._parts += self._body
            exchange._buffered += len(data)
            self._body = []
            if exchange._buffered > HIGH_WATER and not self._done:
                self._pause()
        if self._done:
            self._finish()
        if exchange._parts or exchange.complete or exchange.status:
            exchange._wake()

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, exchange = self.parser, self.exchange
        assert exchange is not None
        status = parser.get_status_code()
        if status < 200:  # 100 Continue and its kind precede the response
            self._headers = []
            return
        if status > 599:  # the parser takes it for an error of the response
            raise ValueError(f"status {status}")
        exchange.status = status
        exchange.headers = self._headers
        self._keep_alive = parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self.exchange is not None and self.exchange.status:
            self._done = True

    def _finish(self) -> None:
        exchange, self.exchange = self.exchange, None
        self._done = False
        if exchange is not None:
            exchange.complete = True
            exchange._connection = None
        if self._keep_alive:
            self.resume()
            self.used = True
            self.pool.give_back(self)
        else:
            self._drop()

    def eof_received(self) -> bool:
        return False  # close our side as well

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.connections.discard(self)
        self.pool.idle_discard(self)
        self.transport = None
        exchange = self.exchange
        if exchange is None:
            return
        if exc is None and exchange.status and not self._length_known():
            # A response without a length ends with its connection (but a reset is no end).
            self._keep_alive = False
            self._finish()
            exchange._wake()
            return
        reason = str(exc) if exc else "the worker closed the connection"
        self._fail(UpstreamError("closed", reason, answered=self.answered, stale=self.used and not self.answered))

    def _length_known(self) -> bool:
        return any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()) for name, value in self._headers
        )

    def _fail(self, failure: UpstreamError) -> None:
        exchange, self.exchange = self.exchange, None
        self._drop()
        if exchange is not None:
            exchange._connection = None
            exchange._fail(failure)

    def abandon(self) -> None:
        """The exchange let go in the middle: the only way to stop the worker is to close."""
        self.exchange = None
        self._drop()

    def _drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _pause(self) -> None:
        if not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()


class Pool:
    """Keep-alive connections to one worker.

    `idle_s` stays below the worker's own keep-alive (5 s for uvicorn, so for vLLM and SGLang): a connection that both
    sides may close at the same moment is the classic source of 502s.
    """

    def __init__(self, url: str, *, connect_timeout_s: float = 2.0, idle_s: float = 4.0):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url}")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.connect_timeout_s = connect_timeout_s
        self.idle_s = idle_s
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.outbox = outbox()
        self.rtt_s = connect_timeout_s
        self.heard_at = 0.0  # loop time of the last byte from this worker
        self._idle: deque[Connection] = deque()
        self._clock: Callable[[], float] = self.loop.time

    @property
    def open_connections(self) -> int:
        return len(self.connections)

    @property
    def active_connections(self) -> int:
        """Connections with a response under way."""
        return sum(1 for c in self.connections if c.exchange is not None)

    def _pooled(self) -> Connection | None:
        fresh_enough = self._clock() - self.idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is None or connection.transport.is_closing():
                continue
            if connection.idle_since >= fresh_enough:
                return connection
            connection._drop()
        return None

    async def send(self, head: bytes, body: bytes, *, fresh: bool = False) -> Exchange:
        """Send a request over a pooled or a new connection. Raises UpstreamError when none can be made."""
        connection = None if fresh else self._pooled()
        if connection is None:
            connection = await self.connect()
        if connection.transport is None or connection.transport.is_closing():  # accepted and reset at once
            raise UpstreamError("closed", f"{self.host}:{self.port} closed the connection before it was used")
        return connection.start(head, body)

    async def connect(self) -> Connection:
        started = self._clock()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self),
                    self.host,
                    self.port,
                    ssl=self.tls,
                    server_hostname=self.host if self.tls else None,
                )
        except TimeoutError as error:
            raise UpstreamError("connect", f"no connection to {self.host}:{self.port} within {self.connect_timeout_s:g} s") from error
        except OSError as error:
            # without file descriptors or ports of our own, no worker is to blame
            kind = "local" if error.errno in LOCAL_ERRORS else "connect"
            raise UpstreamError(kind, f"cannot connect to {self.host}:{self.port}: {error}") from error
        # the fastest handshake seen of late is the network's round trip; slower ones met a busy worker
        self.rtt_s = min(self._clock() - started, 1.1 * self.rtt_s)
        return connection

    def give_back(self, connection: Connection) -> None:
        connection.idle_since = self._clock()
        self._idle.append(connection)

    def idle_discard(self, connection: Connection) -> None:
        try:
            self._idle.remove(connection)
        except ValueError:
            pass

    def drop_stale(self) -> None:
        """Close connections that lay idle too long (called once a second)."""
        fresh_enough = self._clock() - self.idle_s
        while self._idle and self._idle[0].idle_since < fresh_enough:
            self._idle.popleft()._drop()

    def interrupt_all(self) -> int:
        """End what another worker can still do (this one was declared down); returns how many exchanges that were."""
        ended = 0
        for connection in list(self.connections):
            exchange = connection.exchange
            if exchange is not None and not exchange.committed:
                exchange.interrupt("worker")
                ended += 1
        return ended

    def close(self) -> None:
        for connection in list(self.connections):
            connection._drop()
        self._idle.clear()
