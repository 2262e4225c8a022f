"""One publisher of KV events (an engine's data-parallel rank), followed without a hole.

The publisher numbers its batches from 0 and sends [topic, number, payload] on a PUB socket; numbers are 8 bytes, big-endian. A ROUTER
socket answers [b"", first number] with the recent batches, [b"", topic, number, payload] each, and ends with number -1. Both are
vLLM's; SGLang has taken them over. A ROUTER drops what its peer is too slow for, so an answer may have holes or no end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger("warmroute.kv_events")

Socket = zmq.Socket[bytes]
State = Literal["starting", "live", "stale", "stopped"]

QUEUED_BATCHES = 4096  # of live batches held back while a replay runs; what is over is a gap, and replayed
RECONNECT_MS = 1000  # longest pause between attempts to reach the publisher
TURN_S = 0.002  # after which applying batches lets the event loop go on
_END = (-1).to_bytes(8, "big", signed=True)


class EventStream:
    """Subscribes to one publisher; replays what it still has on start, after a gap and when it comes back.

    `on_batch` gets every payload once and in order. `on_reset` says that what was reported so far is void (the publisher restarted,
    or batches are lost for good); the batches that follow stand alone. Both are called in the event loop.

    `on_state` gets each change of `state`: "starting" until the publisher was heard of, "live", "stale" while it is away, "stopped".
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str = "",
        *,
        on_batch: Callable[[bytes], None],
        on_reset: Callable[[str], None],
        name: str,
        on_state: Callable[[State], None] = lambda state: None,
        first_timeout_s: float = 2.0,
    ) -> None:
        """`first_timeout_s` is how long `start` waits for the publisher, and a replay for its next batch."""
        self._state: State = "starting"
        self.last_seq: int | None = None  # number of the last batch applied
        self.last_batch_at: float | None = None  # the event loop's time, seconds
        self.gaps = 0  # holes seen in the numbers of live batches
        self.replayed = 0  # batches applied from replays
        self.lost = 0  # batches that could not be recovered
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._on_batch = on_batch
        self._on_reset = on_reset
        self._on_state = on_state
        self._name = name
        self._timeout_s = first_timeout_s
        self._last_payload = b""
        self._last_live: int | None = None  # number of the last batch on the live socket; only a restart lowers it
        self._unverified = True  # the publisher was away, or is new: it may have restarted, or published unheard
        self._no_replay_logged = False
        self._heard = asyncio.Event()  # the publisher is there
        self._caught_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if state != self._state:
            self._state = state
            self._on_state(state)

    async def start(self) -> None:
        """Subscribe, and apply what the publisher still has. Returns after `first_timeout_s` if it is not there yet; it is awaited then."""
        if self._task is None:
            self.state = "starting"
            self._begin()
        await self._first_contact()

    async def resync(self) -> None:
        """Connect again and apply what was missed, as `start` does: for a caller who knows that the publisher was away."""
        await self._end()
        self._begin()
        await self._first_contact()

    async def stop(self) -> None:
        """Close the sockets. What was applied stays applied."""
        await self._end()
        self.state = "stopped"

    def _begin(self) -> None:
        self._heard.clear()
        self._caught_up.clear()
        self._last_live, self._unverified = None, True
        self._task = asyncio.create_task(self._run(), name=f"kv-events {self._name}")

    async def _end(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._heard.set()  # whoever waits in `start` need not any more
        self._caught_up.set()

    async def _first_contact(self) -> None:
        try:
            await asyncio.wait_for(self._heard.wait(), self._timeout_s)
        except TimeoutError:
            logger.info("%s: no publisher of KV events at %s yet", self._name, self._endpoint)
        else:
            await self._caught_up.wait()

    # ---- the live socket

    async def _run(self) -> None:
        trouble = ""
        while True:
            try:
                await self._follow()
            except Exception as error:  # never silently: the index must not stand still and be believed
                if repr(error) != trouble:
                    logger.exception("%s: following the KV events failed; starting over", self._name)
                trouble = repr(error)
                self.state = "stale"
                self._start_over("error")
                self._caught_up.set()
                await asyncio.sleep(self._timeout_s)

    async def _follow(self) -> None:
        """Connect and follow, until cancelled."""
        with _socket(zmq.SUB, self._endpoint, QUEUED_BATCHES) as live:
            monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                live.subscribe(self._topic)
                live.connect(self._endpoint)
                while True:
                    await _readable(live, monitor)
                    await self._drain(live)  # what came before the connection changed belongs before it
                    while (message := _receive(monitor)) is not None:
                        await self._connection_changed(parse_monitor_message(message)["event"])
            finally:
                live.disable_monitor()
                monitor.close(linger=0)

    async def _connection_changed(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._unverified = True
            self.state = "stale"
            logger.info("%s: the publisher of KV events went away", self._name)
            return
        self._heard.set()
        if self._unverified:  # only now that the subscription stands, so that nothing falls between replay and live batches
            await self._catch_up()
        self.state = "live"
        self._caught_up.set()

    async def _drain(self, live: Socket) -> None:
        """Take what has arrived, letting the event loop go on now and then. During a replay, live batches wait in the socket."""
        loop = asyncio.get_running_loop()
        turn_ends = loop.time() + TURN_S
        while (frames := _receive(live)) is not None:
            if len(frames) == 3 and len(frames[1]) == 8:
                await self._take(int.from_bytes(frames[1], "big"), frames[2])
            else:
                logger.warning("%s: a message of %d frames that is no batch of KV events is ignored", self._name, len(frames))
            if loop.time() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = loop.time() + TURN_S

    async def _take(self, seq: int, payload: bytes) -> None:
        """A live batch: find out first whether it is the next one."""
        first = self._last_live is None
        if self._last_live is not None and seq <= self._last_live:
            self._start_over("restart")
        self._last_live = seq
        following = 0 if self.last_seq is None else self.last_seq + 1
        if self._unverified or seq > following or (first and seq < following):  # the last: replayed already, or a restart unseen
            if seq > following and self.last_seq is not None:
                self.gaps += 1
            await self._catch_up()
        if self.last_seq is not None and seq <= self.last_seq:
            return
        self._apply(seq, payload)
        self.state = "live"

    def _apply(self, seq: int, payload: bytes) -> None:
        if self.last_seq is not None and seq > self.last_seq + 1:
            lost = seq - self.last_seq - 1
            self.lost += lost
            self._reset(f"gap of {lost} batches after number {self.last_seq}")
        self.last_seq, self._last_payload = seq, payload
        self.last_batch_at = asyncio.get_running_loop().time()
        try:
            self._on_batch(payload)
        except Exception:
            logger.exception("%s: KV event batch %d could not be applied", self._name, seq)
            self._reset("error")

    def _start_over(self, why: str) -> None:
        """Another publisher's batches are to come, from number 0."""
        self.last_seq, self._last_payload, self._last_live, self._unverified = None, b"", None, True
        self._reset(why)

    def _reset(self, why: str) -> None:
        logger.warning("%s: KV events start over: %s", self._name, why)
        try:
            self._on_reset(why)
        except Exception:
            logger.exception("%s: a reset of the KV events failed", self._name)

    # ---- replay

    async def _catch_up(self) -> None:
        """Apply what the publisher still has after the last batch. Where it cannot be asked, nothing happens."""
        unverified, self._unverified = self._unverified, False
        whole = True
        while True:
            before = self.last_seq
            outcome = await self._replay(whole) if self._replay_endpoint else "silent"
            if outcome == "restart":
                self._start_over("restart")
                self._unverified = False
            elif outcome == "done":
                return
            elif outcome == "silent" and self.last_seq == before:
                if not self._no_replay_logged:
                    self._no_replay_logged = True
                    where = f"no answer from {self._replay_endpoint}" if self._replay_endpoint else "no replay endpoint"
                    logger.warning("%s: KV events are not replayed: %s", self._name, where)
                if unverified and before is not None:  # nobody can say whether it is still the publisher that it was
                    self._start_over("the publisher was away and cannot be asked")
                    self._unverified = False
                return
            whole = self.last_seq != before  # a hole that is there again is a loss

    async def _replay(self, whole: bool) -> Literal["done", "hole", "restart", "silent"]:
        """Ask once and apply the answers, up to the first hole if `whole`.

        The batch applied last is asked for again: if the publisher has another one by that number, or has not come that far, it is
        not the publisher that it was.
        """
        verified = self.last_seq is None
        try:
            async with aclosing(self._answers(self.last_seq or 0)) as answers:
                async for seq, payload in answers:
                    if not verified and seq == self.last_seq and payload != self._last_payload:
                        return "restart"
                    verified = True
                    if self.last_seq is not None and seq <= self.last_seq:
                        continue
                    if whole and self.last_seq is not None and seq > self.last_seq + 1:
                        return "hole"
                    self._apply(seq, payload)
                    self.replayed += 1
        except TimeoutError:
            return "silent"
        return "done" if verified else "restart"

    async def _answers(self, first: int) -> AsyncGenerator[tuple[int, bytes]]:
        """The publisher's batches from number `first` on. Raises TimeoutError when it falls silent before the end."""
        assert self._replay_endpoint is not None
        loop = asyncio.get_running_loop()
        with _socket(zmq.DEALER, self._replay_endpoint, 0) as dealer:  # unlimited: what waits here the publisher has as well
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(self._timeout_s):
                    await _readable(dealer)
                turn_ends = loop.time() + TURN_S
                while loop.time() < turn_ends and (frames := _receive(dealer)) is not None:
                    if len(frames) < 2 or frames[-2] == _END:
                        return
                    yield int.from_bytes(frames[-2], "big"), frames[-1]
                await asyncio.sleep(0)


@contextmanager
def _socket(kind: int, endpoint: str, queued: int) -> Iterator[Socket]:
    """A socket that takes up to `queued` messages before it is read (0: any number) and is closed at the end."""
    socket: Socket = zmq.Context.instance().socket(kind)
    try:
        socket.rcvhwm = queued
        socket.linger = 0
        socket.reconnect_ivl_max = RECONNECT_MS
        socket.tcp_keepalive = 1
        socket.ipv6 = "[" in endpoint
        yield socket
    finally:
        socket.close()


def _receive(socket: Socket) -> list[bytes] | None:
    """The next message, or None if none is there yet."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


async def _readable(*sockets: Socket) -> None:
    """Wait until one of the sockets has a message.

    A socket's file descriptor only says that something happened; asking for EVENTS tells what, and makes it silent again.
    """
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    descriptors = [socket.FD for socket in sockets]
    for descriptor in descriptors:
        loop.add_reader(descriptor, happened.set)
    try:
        while not any(int(socket.EVENTS) & zmq.POLLIN for socket in sockets):
            await happened.wait()
            happened.clear()
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
