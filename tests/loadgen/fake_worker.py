"""A small stand-in for an OpenAI-compatible server: remembers every prompt, reports what a prefix cache would have hit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self

import orjson


def shared_prefix(a: str, b: str) -> int:
    """How many leading characters are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


@dataclass
class Seen:
    """One request as it arrived, and when its answer was complete."""

    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    policy: str | None
    arrived_at: float
    answered_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(message["content"] for message in self.body["messages"])

    @property
    def session(self) -> str:
        return self.headers["x-session-id"].split(".")[0]


@dataclass
class FakeWorker:
    """Set the fields to make it misbehave; `seen` holds the inference requests in order of arrival."""

    fail_every: int = 0  # every n-th request is answered 503
    cut_every: int = 0  # every n-th answer loses its connection in the middle
    tokens_per_event: int = 1
    report_cached: bool = True
    refuse_admin: bool = False
    close_after_answer: bool = False  # close the connection although it was promised to stay
    hold: asyncio.Event | None = None  # answers wait for this
    seen: list[Seen] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    connections: int = 0
    most_in_flight: int = 0
    url: str = ""
    _in_flight: int = 0
    _arrival: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def until_seen(self, count: int) -> None:
        """Return once `count` inference requests have arrived."""
        while len(self.seen) < count:
            self._arrival.clear()
            await self._arrival.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(method, path, headers, raw, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict[str, str], raw: bytes, writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/models":
            return await self._json(writer, 200, {"data": [{"id": "fake"}]})
        if path == "/admin/policy":
            if self.refuse_admin:
                return await self._json(writer, 404, {"detail": "Not Found"})
            self.policies.append(orjson.loads(raw)["policy"])
            return await self._json(writer, 200, {})
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return await self._infer(headers, raw, writer)
        finally:
            self._in_flight -= 1

    async def _infer(self, headers: dict[str, str], raw: bytes, writer: asyncio.StreamWriter) -> bool:
        body = orjson.loads(raw)
        seen = Seen(headers, body, raw, self.policies[-1] if self.policies else None, perf_counter())
        cached = max((shared_prefix(seen.text, other.text) for other in self.seen), default=0) // 256 * 64
        self.seen.append(seen)
        self._arrival.set()
        number = len(self.seen)
        if self.hold is not None:
            await self.hold.wait()
        if self.fail_every and number % self.fail_every == 0:
            return await self._json(writer, 503, {"error": {"message": "overloaded"}})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-warmroute-worker: w1\r\n\r\n")
        events = max(1, body["max_tokens"] // self.tokens_per_event)
        self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
        for place in range(min(events, 4)):
            if place == 2 and self.cut_every and number % self.cut_every == 0:
                writer.transport.abort()
                return False
            self._event(writer, {"choices": [{"delta": {"content": f'w{place} "usage":{{ data: [DONE]'}}]})
            await writer.drain()
        tokens = len(seen.text) // 4
        usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": min(events, 4) * self.tokens_per_event}
        if self.report_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": min(cached, tokens - 1)}
        self._event(writer, {"choices": [], "usage": usage})
        seen.answered_at = perf_counter()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return not self.close_after_answer

    @staticmethod
    def _event(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        event = b"data: " + orjson.dumps(data) + b"\n\n"
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))

    @staticmethod
    async def _json(writer: asyncio.StreamWriter, status: int, data: dict[str, Any]) -> bool:
        body = orjson.dumps(data)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return True
