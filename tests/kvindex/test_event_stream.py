from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvindex.event_stream import EventStream

END = (-1).to_bytes(8, "big", signed=True)
SAFETY_S = 20.0  # nothing is timed; this only ends a test that hangs


class Publisher:
    """An engine's publisher: numbers its batches from 0, keeps the last ones and answers with them on its replay socket."""

    def __init__(self, name: str = "p", ports: tuple[int, int] = (0, 0), topic: str = "kv", buffer_steps: int = 10_000) -> None:
        self.name = name
        self.topic = topic.encode()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.requests: list[int] = []  # first numbers asked for
        self.answer_limit: int | None = None  # batches in one answer, which then has no end
        self.holes: set[int] = set()  # numbers left out of the next answer
        self._next = 0
        context = zmq.asyncio.Context.instance()
        self._pub = context.socket(zmq.XPUB)  # a PUB that tells of subscriptions
        self._pub.xpub_verbose = 1  # of every one
        self._pub.sndhwm = 0
        self._router = context.socket(zmq.ROUTER)
        self._router.sndhwm = 0
        self.ports = (self._bind(self._pub, ports[0]), self._bind(self._router, ports[1]))
        self._serving = asyncio.create_task(self._serve())

    @staticmethod
    def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
        socket.linger = 0
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        return int(socket.last_endpoint.rsplit(b":", 1)[1])

    @property
    def endpoints(self) -> tuple[str, str]:
        return f"tcp://127.0.0.1:{self.ports[0]}", f"tcp://127.0.0.1:{self.ports[1]}"

    async def subscribed(self) -> None:
        async with asyncio.timeout(SAFETY_S):
            while not (await self._pub.recv()).startswith(b"\x01"):
                pass

    async def publish(self, count: int = 1, sent: bool = True, kept: bool = True) -> None:
        for _ in range(count):
            await self.publish_payload(f"{self.name}{self._next}".encode(), sent, kept)

    async def publish_payload(self, payload: bytes, sent: bool = True, kept: bool = True) -> None:
        if sent:
            await self._pub.send_multipart([self.topic, self._next.to_bytes(8, "big"), payload])
        if kept:
            self.buffer.append((self._next, payload))
        self._next += 1

    def restart(self, name: str) -> None:
        """Begin again from 0 on the same connections."""
        self.name, self._next = name, 0
        self.buffer.clear()

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            peer, _, first = await self._router.recv_multipart()
            self.requests.append(int.from_bytes(first, "big"))
            due = [entry for entry in self.buffer if entry[0] >= self.requests[-1]]
            holes, self.holes = self.holes, set()
            for seq, payload in due[: self.answer_limit]:
                if seq not in holes:
                    await self._router.send_multipart([peer, b"", self.topic, seq.to_bytes(8, "big"), payload])
            if self.answer_limit is None or len(due) <= self.answer_limit:
                await self._router.send_multipart([peer, b"", b"", END, b""])

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._pub.close()
        self._router.close()
        for port in self.ports:  # ZMQ stops listening a little later
            while not _is_free(port):
                await asyncio.sleep(0.005)


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was connected may linger; who listens counts
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class Follower:
    """An EventStream and what it reported, in order: payloads as strings, resets as "!why"."""

    def __init__(self, endpoint: str, replay: str | None, topic: str = "", first_timeout_s: float = 5.0) -> None:
        self.seen: list[str] = []
        self.on_batch: Callable[[bytes], None] = lambda payload: None
        self._changed = asyncio.Event()
        self.stream = EventStream(
            endpoint, replay, topic, on_batch=self._batch, on_reset=self._reset, name="w", first_timeout_s=first_timeout_s
        )

    def _batch(self, payload: bytes) -> None:
        self.seen.append(payload.decode())
        self._changed.set()
        self.on_batch(payload)

    def _reset(self, why: str) -> None:
        self.seen.append(f"!{why}")
        self._changed.set()

    async def sees(self, *expected: str) -> None:
        """Wait until as much was reported as expected, and compare."""
        async with asyncio.timeout(SAFETY_S):
            while len(self.seen) < len(expected):
                self._changed.clear()
                await self._changed.wait()
        assert self.seen == list(expected)

    async def state(self, expected: str) -> None:
        async with asyncio.timeout(SAFETY_S):
            while self.stream.state != expected:
                await asyncio.sleep(0.002)


def batches(first: int, end: int, name: str = "p") -> list[str]:
    return [f"{name}{number}" for number in range(first, end)]


@asynccontextmanager
async def following(publisher: Publisher, replay: bool = True, **more: Any) -> AsyncIterator[Follower]:
    """Started and subscribed."""
    endpoint, replay_endpoint = publisher.endpoints
    follower = Follower(endpoint, replay_endpoint if replay else None, **more)
    try:
        await follower.stream.start()
        await publisher.subscribed()
        yield follower
    finally:
        await follower.stream.stop()


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    publisher = Publisher()
    yield publisher
    await publisher.close()


async def test_what_was_published_before_is_replayed_and_what_comes_after_follows(publisher: Publisher) -> None:
    await publisher.publish(3)
    async with following(publisher) as follower:
        assert follower.seen == batches(0, 3)  # `start` has returned
        assert follower.stream.state == "live"
        await publisher.publish(2)
        await follower.sees(*batches(0, 5))
        stream = follower.stream
        assert (stream.last_seq, stream.replayed, stream.gaps, stream.lost) == (4, 3, 0, 0)
        assert stream.last_batch_at is not None
    assert stream.state == "stopped"


async def test_a_publisher_without_batches(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        assert (follower.stream.state, follower.stream.last_seq) == ("live", None)
        await publisher.publish()
        await follower.sees("p0")


async def test_batches_published_while_the_replay_runs_come_once_and_in_order(publisher: Publisher) -> None:
    await publisher.publish(300)
    endpoint, replay = publisher.endpoints
    follower = Follower(endpoint, replay)
    starting = asyncio.create_task(follower.stream.start())
    await publisher.subscribed()
    for _ in range(30):
        await publisher.publish(10)
        await asyncio.sleep(0)
    await starting
    await publisher.publish()
    await follower.sees(*batches(0, 601))
    assert follower.stream.lost == 0
    await follower.stream.stop()


async def test_live_batches_that_the_replay_had_are_dropped(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.publish(2)
        await follower.sees(*batches(0, 2))
        await publisher.publish(1, sent=False)
        await publisher.publish(50)  # the first of these asks for the one that was not sent, and gets all
        await publisher.publish(1)
        await follower.sees(*batches(0, 54))
        assert follower.stream.gaps == 1


async def test_a_gap_is_filled_from_the_replay(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.publish(2)
        await publisher.publish(3, sent=False)
        await publisher.publish(1)
        await follower.sees(*batches(0, 6))
        assert (follower.stream.gaps, follower.stream.lost) == (1, 0)
        assert publisher.requests == [0, 1]  # on start, and from the last batch on


async def test_the_first_batches_lost_on_the_way(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.publish(2, sent=False)
        await publisher.publish(1)
        await follower.sees(*batches(0, 3))


async def test_a_gap_without_a_replay_starts_over(publisher: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with following(publisher, replay=False) as follower:
            assert follower.stream.state == "live"
            await publisher.publish(2)
            await publisher.publish(3, sent=False)
            await publisher.publish(2)
            await follower.sees("p0", "p1", "!gap of 3 batches after number 1", "p5", "p6")
            assert (follower.stream.gaps, follower.stream.lost) == (1, 3)
    assert sum("not replayed" in record.getMessage() for record in caplog.records) == 1


async def test_a_gap_that_the_publisher_has_forgotten_starts_over_with_what_it_has() -> None:
    publisher = Publisher(buffer_steps=2)
    async with following(publisher) as follower:
        await publisher.publish(2)
        await follower.sees(*batches(0, 2))
        await publisher.publish(4, sent=False)
        await publisher.publish(1)
        await follower.sees("p0", "p1", "!gap of 3 batches after number 1", "p5", "p6")
        assert follower.stream.lost == 3
    await publisher.close()


async def test_a_batch_that_is_in_no_answer_is_lost(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.publish(1)
        await publisher.publish(1, sent=False, kept=False)
        await publisher.publish(2, sent=False)
        await publisher.publish(1)
        await follower.sees("p0", "!gap of 1 batches after number 0", "p2", "p3", "p4")
        assert follower.stream.lost == 1


async def test_a_late_start_takes_what_there_is_as_the_beginning() -> None:
    publisher = Publisher(buffer_steps=3)
    await publisher.publish(10)
    async with following(publisher) as follower:
        await publisher.publish(1)
        await follower.sees(*batches(7, 11))
        assert follower.stream.lost == 0
    await publisher.close()


async def test_an_answer_with_holes_or_without_an_end_is_asked_for_again(publisher: Publisher) -> None:
    await publisher.publish(10)
    publisher.holes = {4, 5}
    async with following(publisher) as follower:
        assert follower.seen == batches(0, 10)
        assert publisher.requests == [0, 3]
    publisher.answer_limit = 4
    async with following(publisher, first_timeout_s=0.2) as follower:
        assert follower.seen == batches(0, 10)
        assert publisher.requests[2:] == [0, 3, 6]  # the first of each is the last of the one before


async def restarted(publisher: Publisher, follower: Follower, *, published: int) -> Publisher:
    """A new publisher on the old one's ports, which has published before anyone could hear it."""
    await publisher.close()
    await follower.state("stale")
    again = Publisher("q", publisher.ports)
    await again.publish(published)
    await follower.state("live")
    return again


@pytest.mark.parametrize("published", [0, 1, 2, 3, 5])
async def test_a_restarted_publisher_is_noticed_and_its_batches_recovered(published: int) -> None:
    publisher = Publisher()
    async with following(publisher) as follower:
        await publisher.publish(3)
        await follower.sees(*batches(0, 3))
        again = await restarted(publisher, follower, published=published)
        await follower.sees(*batches(0, 3), "!restart", *batches(0, published, "q"))
        await again.subscribed()
        await again.publish(2)
        await follower.sees(*batches(0, 3), "!restart", *batches(0, published + 2, "q"))
        assert follower.stream.lost == 0
        await again.close()


async def test_a_live_batch_that_arrives_before_the_news_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher()
    async with following(publisher) as follower:
        await publisher.publish(3)
        await follower.sees(*batches(0, 3))
        await publisher.close()
        await follower.state("stale")

        async def no_news(event: int) -> None:
            pass

        monkeypatch.setattr(follower.stream, "_connection_changed", no_news)
        again = Publisher("q", publisher.ports)
        await again.publish(3)
        await again.subscribed()
        await again.publish(1)  # number 3, as if nothing had happened
        await follower.sees(*batches(0, 3), "!restart", *batches(0, 4, "q"))
        await again.close()


@pytest.mark.parametrize("heard", [0, 2])
async def test_a_restart_behind_a_proxy_that_stays_connected(publisher: Publisher, heard: int) -> None:
    await publisher.publish(3)
    async with following(publisher) as follower:
        await publisher.publish(heard)
        await follower.sees(*batches(0, 3 + heard))
        publisher.restart("q")
        await publisher.publish(2)
        await follower.sees(*batches(0, 3 + heard), "!restart", "q0", "q1")


async def test_a_restart_without_a_replay_shows_in_the_numbers() -> None:
    publisher = Publisher()
    async with following(publisher, replay=False) as follower:
        await publisher.publish(3)
        await follower.sees(*batches(0, 3))
        again = await restarted(publisher, follower, published=1)
        await again.subscribed()
        await again.publish(2)
        await follower.sees(*batches(0, 3), "!the publisher was away and cannot be asked", "q1", "q2")
        await again.close()


async def test_a_publisher_that_starts_later_is_found(publisher: Publisher) -> None:
    await publisher.close()
    follower = Follower(*publisher.endpoints, first_timeout_s=0.05)
    await follower.stream.start()
    assert follower.stream.state == "starting"
    late = Publisher(ports=publisher.ports)
    await late.publish(3)
    await late.subscribed()
    await late.publish(1)
    await follower.sees(*batches(0, 4))
    await follower.state("live")
    await follower.stream.stop()
    await late.close()


async def test_a_replay_socket_that_does_not_answer_costs_the_past_only(publisher: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    await publisher.publish(2)
    nobody = Publisher()
    await nobody.close()
    follower = Follower(publisher.endpoints[0], nobody.endpoints[1], first_timeout_s=0.05)
    with caplog.at_level(logging.WARNING):
        await follower.stream.start()
        await publisher.subscribed()
        await publisher.publish(1)
        await publisher.publish(1, sent=False)
        await publisher.publish(2)
        await follower.sees("p2", "!gap of 1 batches after number 2", "p4", "p5")
    assert sum("no answer" in record.getMessage() for record in caplog.records) == 1
    await follower.stream.stop()


async def test_stopping_ends_a_start_that_still_waits_for_the_replay(publisher: Publisher) -> None:
    await publisher.publish(2)
    publisher.answer_limit = 0  # asked, and never answering
    follower = Follower(*publisher.endpoints, first_timeout_s=600)
    starting = asyncio.create_task(follower.stream.start())
    async with asyncio.timeout(SAFETY_S):
        while not publisher.requests:
            await asyncio.sleep(0.002)
        await follower.stream.stop()
        await starting
    assert follower.stream.state == "stopped"


async def test_resync_recovers_what_was_missed_and_tells_a_restart(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.publish(2)
        await follower.sees(*batches(0, 2))
        await publisher.publish(3, sent=False)
        await follower.stream.resync()
        assert follower.seen == batches(0, 5)
        publisher.buffer.clear()
        publisher.buffer.append((0, b"q0"))
        await follower.stream.resync()
        assert follower.seen == [*batches(0, 5), "!restart", "q0"]


async def test_a_stream_can_be_stopped_and_started_again(publisher: Publisher) -> None:
    async with following(publisher) as follower:
        await publisher.publish(1)
        await follower.sees("p0")
        await follower.stream.stop()
        await publisher.publish(2)
        await follower.stream.start()
        assert follower.seen == batches(0, 3)


async def test_a_batch_or_a_reset_that_fails_is_logged_and_the_rest_goes_on(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(publisher) as follower:

        def fail_always(why: str) -> None:
            raise RuntimeError("broken")

        def fail(payload: bytes) -> None:
            if payload == b"p1":
                raise RuntimeError("broken")

        follower.on_batch = fail
        await publisher.publish(3)
        await follower.sees("p0", "p1", "!error", "p2")
        monkeypatch.setattr(follower.stream, "_on_reset", fail_always)
        await publisher.publish(1, sent=False, kept=False)
        await publisher.publish(2)
        await follower.sees("p0", "p1", "!error", "p2", "p4", "p5")
    assert any("could not be applied" in record.getMessage() for record in caplog.records)


async def test_an_unexpected_error_does_not_end_the_stream(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    async with following(publisher, first_timeout_s=0.05) as follower:
        await publisher.publish(1)
        await follower.sees("p0")
        take = follower.stream._take

        async def fail_once(seq: int, payload: bytes) -> None:
            monkeypatch.setattr(follower.stream, "_take", take)
            raise RuntimeError("broken")

        monkeypatch.setattr(follower.stream, "_take", fail_once)
        await publisher.publish(1)
        await follower.sees("p0", "!error", "p0", "p1")  # from the replay


async def test_other_topics_and_other_messages_are_left_alone(publisher: Publisher) -> None:
    async with following(publisher, topic="kv") as follower:
        await publisher.send(b"other", (0).to_bytes(8, "big"), b"not ours")
        await publisher.send(b"kv", b"short", b"x")
        await publisher.send(b"kv")
        await publisher.publish(1)
        await follower.sees("p0")


async def test_the_event_loop_goes_on_while_many_batches_are_applied(publisher: Publisher) -> None:
    loop = asyncio.get_running_loop()
    await publisher.publish(100)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def work(payload: bytes) -> None:
        begin, before = loop.time(), turns
        while loop.time() < begin + 0.001:
            pass
        assert turns == before
        turns_at.append(turns)

    turns_at: list[int] = []
    follower = Follower(*publisher.endpoints)
    follower.on_batch = work
    other = asyncio.create_task(others())
    await follower.stream.start()
    await publisher.subscribed()
    await publisher.publish(100)
    await follower.sees(*batches(0, 200))
    other.cancel()
    await follower.stream.stop()
    for part in (turns_at[:100], turns_at[100:]):
        assert len(set(part)) > 20  # at most a few batches in one turn


def test_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def follow() -> None:
        publisher = Publisher()
        await publisher.publish(3)
        async with following(publisher) as follower:
            await publisher.publish(1)
            await publisher.publish(1, sent=False)
            await publisher.publish(200)
            await follower.sees(*batches(0, 205))
        await publisher.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(follow())
