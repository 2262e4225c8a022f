"""Streams: what the worker sent is what the client gets, however it was cut, and what happens when a stream breaks."""

from __future__ import annotations

import asyncio
import re

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects import CHAT as CHAT_DIALECT
from tests.gateway.spoken import ALL, CHAT, MESSAGES, USAGE, Spoken, event, every_dialect
from tests.stack import ScriptedWorker, Stack, WorkerRequest, config, gateway_with, running, soon


@every_dialect
async def test_a_stream_arrives_byte_for_byte(spoken: Spoken) -> None:
    events = spoken.whole("Hel", "lo", " wörld ☃")

    async def script(request: WorkerRequest) -> None:
        request.stream(*events)

    async with gateway_with(script) as (stack, _):
        response = await stack.post(spoken.path, spoken.body(stream_options={"include_usage": True}))
        assert response.status_code == 200
        assert response.content == b"".join(events)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"


@every_dialect
@pytest.mark.parametrize("framing", ["one-read", "byte-by-byte", "extensions", "trailers", "upper-case", "http10"])
async def test_any_framing_of_a_stream_gives_the_same_bytes(spoken: Spoken, framing: str) -> None:
    events = spoken.whole("Hel", "lo", "x" * 300, "y" * 5000)

    async def script(request: WorkerRequest) -> None:
        if framing == "http10":
            request.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(events))
            request.close()
            return
        request.start_stream()
        size = b"%X" if framing == "upper-case" else b"%x"
        extension = b";name=value" if framing == "extensions" else b""
        data = b"".join((size + b"%b\r\n%b\r\n") % (len(e), extension, e) for e in events)
        data += b"0\r\nx-trailer: 1\r\n\r\n" if framing == "trailers" else b"0\r\n\r\n"
        if framing != "byte-by-byte":
            request.write(data)
            return
        for at in range(400):
            request.write(data[at : at + 1])
            await asyncio.sleep(0)
        request.write(data[400:])

    async with gateway_with(script) as (stack, _):
        for _ in range(2):
            response = await stack.post(spoken.path, spoken.body(stream_options={"include_usage": True}))
            assert response.content == b"".join(events)


@every_dialect
@pytest.mark.parametrize("cut", [1, 2, 3, 4, -1, -2, -3, -4, -5])
async def test_a_read_may_end_anywhere_in_a_chunk(spoken: Spoken, cut: int) -> None:
    events = spoken.whole("Hel", "lo", "x" * 300, "z")

    async def script(request: WorkerRequest) -> None:
        request.start_stream()
        for one in events:
            chunk = b"%x\r\n%b\r\n" % (len(one), one)
            request.write(chunk[:cut])
            await asyncio.sleep(0.002)  # so that the parts are read one by one
            request.write(chunk[cut:])
            await asyncio.sleep(0.002)
        request.write(b"0\r\n\r\n")

    async with gateway_with(script) as (stack, _):
        response = await stack.post(spoken.path, spoken.body(stream_options={"include_usage": True}))
        assert response.content == b"".join(events)


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[Spoken, list[bytes], list[bytes]]:
    """A dialect, its events, and the worker's bytes in the pieces that it writes."""
    spoken = draw(st.sampled_from(ALL))
    texts = draw(st.lists(st.text(max_size=40) | st.sampled_from(['"usage"', 'x_tokens": 3', "\n\n", "data: [DONE]"]), max_size=6))
    events = spoken.whole("first", *texts)
    if spoken is CHAT:
        events = [*events[:-1], event({"choices": [], "usage": USAGE}), events[-1]]
    stream = b"".join(events)
    # HTTP chunks that need not end where events do, and reads that need not end where chunks do
    cuts = sorted(draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)) | set(draw(st.sampled_from([[], _ends(events)]))))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    wire = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    cuts = sorted(draw(st.sets(st.integers(1, len(wire) - 1), max_size=12)))
    return spoken, events, [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]


def _ends(events: list[bytes]) -> list[int]:
    ends, at = [], 0
    for one in events[:-1]:
        at += len(one)
        ends.append(at)
    return ends


def test_however_a_stream_is_cut_the_client_gets_it_whole_and_usage_is_read() -> None:
    pieces: list[bytes] = []

    async def script(request: WorkerRequest) -> None:
        request.start_stream()
        for piece in pieces:
            request.write(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def run(stack: Stack, spoken: Spoken, shown: bool) -> bytes:
        extra = {"stream_options": {"include_usage": True}} if shown else {}
        return (await stack.post(spoken.path, spoken.body(**extra))).content

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack_context = gateway_with(script)
        stack, _ = runner.run(stack_context.__aenter__())

        @settings(max_examples=150, deadline=None)
        @given(cut_streams(), st.booleans())
        def check(cut: tuple[Spoken, list[bytes], list[bytes]], shown: bool) -> None:
            spoken, events, pieces[:] = cut
            expected = [e for e in events if shown or not (spoken is CHAT and b'"usage"' in e and b'"choices":[]' in e)]
            stack.gateway.metrics.series.clear()
            assert runner.run(run(stack, spoken, shown)) == b"".join(expected)
            assert _tokens(stack) == 100

        try:
            check()
        finally:
            runner.run(stack_context.__aexit__(None, None, None))


def _tokens(stack: Stack) -> float:
    """Prompt tokens accounted so far."""
    return sum(series.prompt_tokens for series in stack.gateway.metrics.series.values())


@every_dialect
async def test_a_stream_that_breaks_after_content_ends_with_an_in_band_error(spoken: Spoken) -> None:
    """Not with silence, which SDKs take for an empty finished answer, nor with what says that it was complete."""
    sent = spoken.preamble + spoken.content("a") + spoken.content("b")

    async def script(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(spoken.preamble)
        request.chunk(spoken.content("a"))
        request.chunk(spoken.content("b"))
        request.chunk(spoken.content("cut")[:20])  # half an event
        await asyncio.sleep(0.02)  # a reset overtakes what the kernel has not delivered
        request.reset()

    async with gateway_with(script, None) as (stack, workers):
        workers[1].script = script
        response = await stack.post(spoken.path, spoken.body())
        assert response.status_code == 200
        assert response.content.startswith(sent + spoken.error_mark)
        assert response.content.endswith(b"\n\n") and spoken.done not in response.content
        assert b"invalid_request" not in response.content  # of a class that clients try again
        assert len(workers[0].requests) + len(workers[1].requests) == 1
        await stack.until_idle()


@every_dialect
async def test_a_worker_that_dies_after_the_preamble_is_replaced_and_the_preamble_comes_once(spoken: Spoken) -> None:
    async def dies(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(spoken.preamble)
        await asyncio.sleep(0.02)
        request.reset()

    async def answers(request: WorkerRequest) -> None:
        request.stream(*spoken.whole("fine"))

    async with gateway_with(None, None, policy="round-robin") as (stack, workers):
        workers[0].script, workers[1].script = dies, answers
        for _ in range(2):
            response = await stack.post(spoken.path, spoken.body())
            assert response.content == b"".join(spoken.whole("fine"))
        assert workers[0].requests
        await stack.until_idle()


@pytest.mark.parametrize(
    "preamble",
    [
        event({"choices": [], "prompt_filter_results": []}),
        event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}),
        event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}),
    ],
    ids=["no-choices", "role-only", "null-content"],
)  # fmt: skip
async def test_other_spellings_of_a_preamble_are_held_back_too(preamble: bytes) -> None:
    async def dies(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(preamble)
        await asyncio.sleep(0.02)
        request.reset()

    async def answers(request: WorkerRequest) -> None:
        request.stream(preamble, *CHAT.whole("fine")[1:])

    async with gateway_with(None, None, policy="round-robin") as (stack, workers):
        workers[0].script, workers[1].script = dies, answers
        for _ in range(2):
            response = await stack.post(CHAT.path, CHAT.body())
            assert response.content == b"".join([preamble, *CHAT.whole("fine")[1:]])
        assert workers[0].requests


@every_dialect
async def test_workers_that_all_die_before_content_give_a_real_5xx(spoken: Spoken) -> None:
    async def dies(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(spoken.preamble)
        await asyncio.sleep(0.02)
        request.reset()

    async with gateway_with(dies, dies) as (stack, workers):
        response = await stack.post(spoken.path, spoken.body())
        assert response.status_code >= 500
        spoken.error_of(response.content)
        assert len(workers[0].requests) == len(workers[1].requests) == 1
        await stack.until_idle()


async def test_a_complete_responses_stream_needs_no_done_marker() -> None:
    [_, responses, _] = ALL

    async def script(request: WorkerRequest) -> None:
        request.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(responses.whole("hi")))
        request.close()

    async with gateway_with(script) as (stack, _):
        response = await stack.post(responses.path, responses.body())
        assert response.status_code == 200 and response.content == b"".join(responses.whole("hi"))


@every_dialect
async def test_a_silent_worker_is_bridged_by_keepalives_before_and_after_the_first_token(spoken: Spoken) -> None:
    async def script(request: WorkerRequest) -> None:
        await soon(release.wait())
        request.start_stream()
        request.chunk(spoken.preamble)
        request.chunk(spoken.content("a"))
        await soon(release_again.wait())
        request.chunk(spoken.last)
        request.end()

    release, release_again = asyncio.Event(), asyncio.Event()
    async with gateway_with(script, upstream={"keepalive_s": 0.1}) as (stack, _):
        client = await stack.connect()
        client.send(spoken.path, spoken.body())
        await client.until_contains(spoken.keepalive_mark)
        release.set()
        await client.until_contains(spoken.content("a"))
        await client.until_contains(spoken.keepalive_mark)
        release_again.set()
        rest = await client.until_contains(b"0\r\n\r\n")
        assert spoken.done in rest
        await client.close()


async def test_after_keepalives_another_worker_can_still_take_over() -> None:
    async def dies(request: WorkerRequest) -> None:
        await soon(kept.wait())
        request.reset()

    async def answers(request: WorkerRequest) -> None:
        request.stream(*MESSAGES.whole("fine"))

    kept = asyncio.Event()
    async with gateway_with(None, None, policy="round-robin", upstream={"keepalive_s": 0.1}) as (stack, workers):
        workers[0].script, workers[1].script = dies, answers
        client = await stack.connect()
        client.send(MESSAGES.path, MESSAGES.body())
        await client.until_contains(b"event: ping")
        kept.set()
        assert MESSAGES.content("fine") in await client.until_contains(b"0\r\n\r\n")
        await client.close()


async def test_a_slow_client_pauses_its_worker_and_loses_nothing() -> None:
    """The gateway must not hold in memory what the client has not taken."""
    text = "z" * 4000
    count = 4000  # 16 MB
    written = 0

    async def script(request: WorkerRequest) -> None:
        nonlocal written
        request.start_stream()
        request.chunk(CHAT.preamble)
        for number in range(count):
            request.chunk(CHAT.content(f"{number}:{text}"))
            written = number
            while request.connection.transport.get_write_buffer_size() > 1 << 20:
                await asyncio.sleep(0.001)
        request.chunk(CHAT.last)
        request.end()

    async with gateway_with(script) as (stack, _):
        client = await stack.connect()
        client.send(CHAT.path, CHAT.body())
        await client.head()
        # nothing is read until the worker's side stands still
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.2)
        assert written < count - 1, "everything was taken from the worker although the client had read nothing"
        numbers = []
        parts = []
        while data := await client.chunk():
            parts.append(data)
        numbers = [int(n) for n in re.findall(rb'"content":"(\d+):', b"".join(parts))]
        assert numbers == list(range(count))
        await stack.until_idle()
        await client.close()


async def test_the_usage_event_that_only_the_gateway_asked_for_is_hidden() -> None:
    async def script(request: WorkerRequest) -> None:
        assert request.json["stream_options"]["include_usage"] is True
        asked.append(request.json["stream_options"])
        request.stream(*CHAT.whole("a")[:-1], event({"choices": [], "usage": USAGE}), CHAT.last)

    asked: list[dict[str, bool]] = []
    async with gateway_with(script) as (stack, _):
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False, "x": 1}}, {"stream_options": {}}):
            hidden = await stack.post(CHAT.path, CHAT.body(**options))
            assert hidden.content == b"".join(CHAT.whole("a")), options
        assert asked[2]["x"] == 1
        shown = await stack.post(CHAT.path, CHAT.body(stream_options={"include_usage": True}))
        assert orjson.dumps(USAGE) in shown.content
        metrics = (await stack.client.get("/metrics")).text
        assert 'warmroute_cached_tokens_total{' in metrics and _tokens(stack) == 500


async def test_usage_hidden_from_a_stream_with_crlf_lines() -> None:
    async def script(request: WorkerRequest) -> None:
        request.stream(*(e.replace(b"\n", b"\r\n") for e in (*CHAT.whole("a")[:-1], event({"choices": [], "usage": USAGE}), CHAT.last)))

    async with gateway_with(script) as (stack, _):
        response = await stack.post(CHAT.path, CHAT.body())
        assert b"prompt_tokens" not in response.content and b"[DONE]" in response.content


@pytest.mark.parametrize(
    "events",
    [
        [event({"choices": [{"index": 0, "delta": {}}], "usage": USAGE})],
        [event({"choices": [], "usage": None}), CHAT.content("a"), event({"choices": []}), event({"choices": [], "usage": USAGE})],
        [CHAT.content("a"), event({"choices": [{"index": 0, "delta": {}, "logprobs": {"content": []}, "finish_reason": "stop"}]})],
        [event({"choices": [{"index": 0, "delta": {"reasoning_content": "r"}, "logprobs": {"content": [{"token": "r"}]}}]})],
        [
            event({"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": n, "arguments": "{}"}}]}}]})
            for n in ("a", "b")
        ],
    ],
    ids=["usage-with-choices", "empty-choices", "logprobs-finish", "reasoning-logprobs", "parallel-calls-of-index-0"],
)  # fmt: skip
async def test_unusual_chunks_pass_unchanged(events: list[bytes]) -> None:
    async def script(request: WorkerRequest) -> None:
        request.stream(CHAT.preamble, *events, CHAT.last)

    async with gateway_with(script) as (stack, _):
        response = await stack.post(CHAT.path, CHAT.body(stream_options={"include_usage": True}))
        assert response.content == b"".join([CHAT.preamble, *events, CHAT.last])


async def test_usage_that_comes_with_a_choice_is_kept_although_the_client_did_not_ask() -> None:
    usage = event({"choices": [{"index": 0, "delta": {}}], "usage": USAGE})

    async def script(request: WorkerRequest) -> None:
        request.stream(*CHAT.whole("a")[:-1], usage, CHAT.last)

    async with gateway_with(script) as (stack, _):
        assert usage in (await stack.post(CHAT.path, CHAT.body())).content
        assert _tokens(stack) == 100


def test_events_of_the_gateway_itself_end_with_line_feeds() -> None:
    for text in (CHAT_DIALECT.keepalive(), CHAT_DIALECT.stream_error("x")):
        assert b"\r" not in text and text.endswith(b"\n\n")


async def test_a_client_that_takes_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(CHAT.preamble)
        while not request.closed.is_set():
            request.chunk(CHAT.content("z" * 100_000))
            await asyncio.sleep(0.001)
        closed.set()

    closed = asyncio.Event()
    async with ScriptedWorker(script) as worker, running(config(worker.url, listen={"write_timeout_s": 0.3})) as stack:
        client = await stack.connect()
        client.send(CHAT.path, CHAT.body())
        await client.head()
        await soon(closed.wait(), "the end of the worker's stream")
        await stack.until_idle()
        client.writer.close()
