"""A worker that costs next to nothing, so that what is measured is what stands in front of it.

    python benchmarks/mock_worker.py PORT

Answers every inference request with one fixed body or a fixed stream, and every information route that routers ask for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

MODEL = "mock"
CHUNKS = 64
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
GAP_S = 0.02  # between the events of a stream: 50 tokens/s


def _whole(body: object, content_type: str = "application/json") -> bytes:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def _event(delta: dict[str, str], finish: str | None = None, **more: object) -> bytes:
    choices = [] if "usage" in more else [{"index": 0, "delta": delta, "finish_reason": finish}]
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": choices, **more}
    return _chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_USAGE = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
_MESSAGE = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
COMPLETION = _whole(
    {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [_MESSAGE], "usage": _USAGE}
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = _event({"content": " tok"})
LAST = _event({}, "stop")
LAST_USAGE = _event({}, usage=_USAGE)
END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

INFORMATION = {
    "/health": _whole({}),
    "/health_generate": _whole({}),
    "/v1/models": _whole({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "max_model_len": 1_048_576}]}),
    "/metrics": _whole("".join(f'vllm:{name}{{model_name="{MODEL}"}} 0\n' for name in GAUGES), "text/plain"),
}
# what sglang-router asks for under several names
OTHER = _whole({"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "max_total_num_tokens": 1_000_000, "tp_size": 1})


class Worker(asyncio.Protocol):
    """One connection; one request at a time, as routers send them."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._left = 0
        self._usage = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._received[:end].lower()
        if b"transfer-encoding: chunked" in head:
            if not self._received.endswith(b"0\r\n\r\n"):
                return
        else:
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
        path = self._received.split(b" ", 2)[1].split(b"?")[0].decode()
        body = bytes(self._received[end + 4 :])
        self._received.clear()
        self._answer(path, body)

    def _answer(self, path: str, body: bytes) -> None:
        if path in INFORMATION:
            self._transport.write(INFORMATION[path])
        elif not path.startswith("/v1/"):
            self._transport.write(OTHER)
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._left, self._usage = CHUNKS, b"include_usage" in body
            self._transport.write(STREAM_HEAD)
            self._next_token()
        else:
            self._transport.write(COMPLETION)

    def _next_token(self) -> None:
        if not self._left:
            self._transport.write(LAST + (LAST_USAGE if self._usage else b"") + END)
            return
        self._left -= 1
        self._transport.write(TOKEN)
        self._timer = asyncio.get_running_loop().call_later(GAP_S, self._next_token)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", port, backlog=4096)
    async with server:
        print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
