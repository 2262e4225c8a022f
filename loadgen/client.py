"""A streaming HTTP client that costs little per token: raw asyncio protocols, httptools, and events scanned instead of parsed.

Times are `time.perf_counter()` seconds, because the event loop's own clock is only good to a millisecond.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

import httptools
import orjson

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_CONTENT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)"\s*:\s*"(?!")|"tool_calls"\s*:\s*\[\s*\{')
_ERROR = re.compile(rb'^data:\s*\{\s*"error"|^event:\s*error')
_IDLE_S = 3.0  # below the keep-alive time of common servers (uvicorn: 5 s), so that they do not close what we are about to use
_ERROR_BYTES = 4096


@dataclass(slots=True)
class Answer:
    """What came back for one request, and when."""

    sent_at: float = 0.0
    first_at: float = 0.0  # first content, 0 when there was none
    ended_at: float = 0.0
    status: int = 0
    worker: str | None = None  # the gateway's x-warmroute-worker
    gaps: list[tuple[float, int]] = field(default_factory=list)  # seconds since the content before; content events that came together
    content_events: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    connected: bool = True  # False: no connection could be made at all

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.sent_at

    @property
    def e2e_s(self) -> float:
        return self.ended_at - self.sent_at


class StreamClient:
    """Posts bodies to one server and reads the streamed answers. One connection per request in flight; idle ones are used again."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """`url` is the server's root, e.g. http://127.0.0.1:8000. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []  # most recently used last
        self._open: set[_Connection] = set()
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\ncontent-type: application/json\r\naccept: text/event-stream\r\n"
        if api_key:
            self._headers += f"authorization: Bearer {api_key}\r\n"

    async def post(self, path: str, body: bytes, session_id: str | None = None) -> Answer:
        """Send one request and read its whole answer. Failures are in the answer's `error`, not raised."""
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n"
        if session_id is not None:
            head += f"x-session-id: {session_id}\r\n"
        message = f"{head}\r\n".encode() + body
        answer = Answer()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._take_idle()
                if connection is not None and not await connection.exchange(message, answer):
                    # The server closed the idle connection just as we used it. Nothing of an answer came, so ask again.
                    answer, connection = Answer(), None
                if connection is None:
                    connection = await self._connect()
                    await connection.exchange(message, answer)
        except TimeoutError:
            answer.error = f"no complete answer within {self._timeout_s:g} s"
        except OSError as error:
            answer.error = f"cannot connect: {error}"
            answer.connected = False
        finally:
            if connection is not None:
                if connection.reusable:
                    connection.idle_since = perf_counter()
                    self._idle.append(connection)
                else:
                    connection.abort()
        answer.ended_at = answer.ended_at or perf_counter()
        return answer

    def close(self) -> None:
        """Drop every connection."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def _take_idle(self) -> _Connection | None:
        now = perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.idle_since < _IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._open), self._host, self._port, ssl=self._ssl)
        return connection


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one exchange at a time."""

    def __init__(self, open_connections: set[_Connection]) -> None:
        self._open = open_connections
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[bool] | None = None
        self._answer = Answer()
        self._now = 0.0
        self._last_content_at = 0.0
        self._events_in_read = 0
        self._rest = b""  # an event's beginning, until its end arrives
        self._body = bytearray()  # of an answer that is not a stream
        self._streams = False
        self._ended = False  # the stream said so ([DONE])
        self._length_known = False
        self._parser = httptools.HttpResponseParser(self)
        self.reusable = False
        self.idle_since = 0.0

    async def exchange(self, message: bytes, answer: Answer) -> bool:
        """Send a request and fill `answer`. False when the connection was lost before any byte of an answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._last_content_at = 0.0
        self._rest, self._streams, self._ended, self._length_known = b"", False, False, False
        self._body.clear()
        self._parser = httptools.HttpResponseParser(self)
        self.reusable = False
        answer.sent_at = perf_counter()
        if self._transport is None or self._transport.is_closing():
            answer.error = "connection closed before an answer"
            return False
        self._transport.write(message)
        return await self._done

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        self._events_in_read = 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._answer.error = f"not an HTTP answer: {error}"
            self.abort()
        if self._events_in_read:
            self._content_arrived()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self.reusable = False
        if self._done is None or self._done.done():
            return
        answer = self._answer
        if answer.status and not self._length_known and exc is None:
            self.on_message_complete()  # a body without a length ends with its connection
            return
        if answer.error is None:
            answer.error = "connection lost during the answer" if answer.status else "connection closed before an answer"
        answer.ended_at = perf_counter()
        self._done.set_result(answer.status != 0)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"x-warmroute-worker":
            self._answer.worker = value.decode("latin-1")
        elif name == b"content-type":
            self._streams = value.startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._length_known = True

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._streams or self._answer.status != 200:
            self._body += body
            return
        data = self._rest + body if self._rest else body
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop()
        for event in events:
            self._event(event)

    def on_message_complete(self) -> None:
        answer = self._answer
        answer.ended_at = perf_counter()
        if answer.status != 200:
            answer.error = f"HTTP {answer.status}: {_error_text(bytes(self._body[:_ERROR_BYTES]))}"
        elif self._streams:
            if self._rest:
                self._event(self._rest)
            if not self._ended and answer.error is None:
                answer.error = "the stream ended without [DONE]"
        else:
            answer.first_at = answer.ended_at
            self._take_usage(bytes(self._body))
        self.reusable = self._length_known and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(True)

    # Events

    def _event(self, event: bytes) -> None:
        if _CONTENT.search(event):
            self._events_in_read += 1
        if _USAGE.search(event):
            self._take_usage(event[event.index(b"{") :])
        elif event.startswith(b"data:") and event[5:].strip() == b"[DONE]":
            self._ended = True
        elif _ERROR.search(event):
            self._answer.error = f"error in the stream: {_error_text(event.partition(b'data:')[2])}"

    def _content_arrived(self) -> None:
        answer = self._answer
        if self._last_content_at:
            answer.gaps.append((self._now - self._last_content_at, self._events_in_read))
        else:
            answer.first_at = self._now
        answer.content_events += self._events_in_read
        self._last_content_at = self._now

    def _take_usage(self, data: bytes) -> None:
        answer = self._answer
        try:
            usage = orjson.loads(data).get("usage")
            if usage:
                answer.prompt_tokens = usage.get("prompt_tokens")
                answer.output_tokens = usage.get("completion_tokens")
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except (orjson.JSONDecodeError, AttributeError):
            answer.error = answer.error or "the answer's usage cannot be read"


def _error_text(body: bytes) -> str:
    """The message of an error body in any of the usual shapes, in one line."""
    try:
        error = orjson.loads(body)
        if isinstance(error, dict):
            error = error.get("error", error)
        if isinstance(error, dict):
            error = error.get("message", error)
        text = str(error)
    except orjson.JSONDecodeError:
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())[:300]
