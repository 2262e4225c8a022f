from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.client import Answer, StreamClient
from tests.loadgen.fake_worker import FakeWorker

BODY = b'{"messages":[{"role":"user","content":"hello there, this is a prompt"}],"max_tokens":8}'
PATH = "/v1/chat/completions"


async def serve_raw(respond: Callable[[], list[bytes]]) -> tuple[asyncio.Server, str]:
    """A server that answers each connection's first request with given writes, then closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in respond():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask_raw(*parts: bytes) -> Answer:
    server, url = await serve_raw(lambda: list(parts))
    try:
        return await StreamClient(url).post(PATH, b"")
    finally:
        server.close()


async def test_an_answer_is_timed_and_counted() -> None:
    async with FakeWorker() as worker:
        client = StreamClient(worker.url)
        answer = await client.post(PATH, BODY, "my-session")
        client.close()
    assert answer.error is None
    assert answer.content_events == 4  # the role's event and what the text only looks like do not count
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (7, 0, 4)
    assert answer.worker == "w1"
    assert answer.sent_at < answer.first_at <= answer.ended_at
    assert worker.seen[0].headers["x-session-id"] == "my-session"


async def test_connections_are_used_again() -> None:
    async with FakeWorker() as worker:
        client = StreamClient(worker.url, api_key="k")
        for _ in range(3):
            assert (await client.post(PATH, BODY)).error is None
        client.close()
    assert worker.connections == 1
    assert worker.seen[0].headers["authorization"] == "Bearer k"
    assert "x-session-id" not in worker.seen[0].headers


async def test_a_connection_that_died_while_idle_costs_nothing() -> None:
    async with FakeWorker(close_after_answer=True) as worker:
        client = StreamClient(worker.url)
        answers = [await client.post(PATH, BODY) for _ in range(3)]
        client.close()
    assert [answer.error for answer in answers] == [None, None, None]
    assert len(worker.seen) == 3


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"
STREAM = (
    b'data: {"choices":[{"delta":{"content":""}}]}\r\n\r\ndata: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n: ping\r\n\r\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"b"}}]}\r\n\r\ndata: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\r\n\r\n'
    b'data: {"choices":[],"usage": {"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":null}}\r\n\r\ndata: [DONE]\r\n\r\n'
)


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=6))
@settings(max_examples=25, deadline=None)
def test_events_may_be_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    parts = [STREAM[a:b] for a, b in pairwise(edges)]
    answer = asyncio.run(ask_raw(HEAD, *parts))
    assert answer.error is None
    assert (answer.content_events, answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (3, 9, 3, None)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([HEAD + STREAM[:40]], "the stream ended without [DONE]"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"], "connection lost during the answer"),
        ([b"HTTP/1.1 429 X\r\nContent-Length: 34\r\n\r\n" + b'{"error":{"message":"too many"}}  '], "HTTP 429: too many"),
        ([b"HTTP/1.1 502 X\r\nContent-Length: 4\r\n\r\noops"], "HTTP 502: oops"),
        ([HEAD + b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n'], "error in the stream: engine died"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "not an HTTP answer"),
        ([b""], "connection closed before an answer"),
    ],
)
async def test_failures_are_told_apart(parts: list[bytes], error: str) -> None:
    assert error in str((await ask_raw(*parts)).error)


async def test_an_answer_that_is_not_a_stream_counts() -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}'
    answer = await ask_raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert (answer.error, answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (None, 5, 4, 2)
    assert answer.first_at == answer.ended_at


async def test_nobody_listening_and_no_answer() -> None:
    server, url = await serve_raw(list)
    server.close()
    await server.wait_closed()
    refused = await StreamClient(url).post(PATH, BODY)
    assert not refused.connected
    assert "cannot connect" in str(refused.error)

    async with FakeWorker(hold=asyncio.Event()) as worker:
        late = await StreamClient(worker.url, timeout_s=0.05).post(PATH, BODY)
    assert late.error == "no complete answer within 0.05 s"


def test_only_http_urls_are_taken() -> None:
    for url in ("localhost:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="not an http"):
            StreamClient(url)
