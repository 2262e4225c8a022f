"""A lasting line to Redis for the hot path: one pipelined connection that comes back by itself, and calls that never wait long.

redis-py's asyncio client costs more than 100 us a call, lends a connection to each caller and loses it when that caller is cancelled.
Here all callers share one connection; replies come in the order of the commands, so a caller who left just has its reply dropped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha1
from time import monotonic
from typing import Any

from kvindex.breaker import Breaker
from kvindex.redis_target import Address, RedisTarget, address_text
from kvindex.redis_wire import NOT_HERE, Argument, RedisRefused, RedisUnavailable, Wire, open_wire, pack

__all__ = ["Line", "RedisRefused", "RedisUnavailable", "Script", "Subscriber"]

logger = logging.getLogger("warmroute.redis")

LOG_EVERY_S = 10.0  # at most one line about an outage of the same connection
RETRY_S = (0.1, 1.0)  # first and longest pause between attempts to connect
STEADY_S = 2.0  # a connection that lasted for less counts as one more failed attempt
STALL_S = 0.005  # a timer this late means that the event loop was held up, and replies may lie unread

Command = Sequence[Argument]

_texts: dict[str, str] = {}  # of all scripts, by their sha


class Script:
    """A Lua script, called by its SHA-1. The server learns it by EVAL when it turns out not to know it: no SCRIPT LOAD, which an ACL
    may forbid, and nothing to do after a restart, a failover or SCRIPT FLUSH.

    Make scripts once, at import: their texts are kept for good.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode()).hexdigest()
        _texts[self.sha] = text

    def command(self, keys: Sequence[bytes | str], args: Sequence[Argument]) -> tuple[Argument, ...]:
        """The EVALSHA command, for `Line.pipeline`, which repeats it as EVAL where the server does not know the script."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


class _Waiting:
    """Commands that were sent as one, and what came back so far."""

    __slots__ = ("commands", "due", "future", "results", "size")

    def __init__(self, future: asyncio.Future[Any], due: float, size: int, commands: Sequence[Command] | None) -> None:
        self.future = future
        self.due = due  # of the monotonic clock, seconds
        self.size = size  # bytes sent
        self.commands = commands  # None: one command, whose reply is the result by itself
        self.results: list[Any] = []


class Line:
    """One connection to the server that holds `key`; for one event loop.

    What cannot be had within `deadline_s` fails with `RedisUnavailable`. Silence for as long as a call's deadline counts as a failure;
    when `breaker` opens, the connection is dropped, what is pending fails, and calls fail at once until a new connection has answered
    a PING in time. Commands are executed in order, so what is ahead in the line counts against a call's deadline: send bulk in
    portions that take Redis a few milliseconds, or on a line of its own.

    `on_up` is called whenever the connection works (again), `on_down` with a reason once for each outage, also when the first attempt
    fails; both in the event loop. What was sent before an outage may be lost or done, and another server may answer after it.
    """

    def __init__(
        self,
        target: RedisTarget,
        key: bytes = b"",
        *,
        deadline_s: float = 0.05,
        breaker: Breaker | None = None,
        on_up: Callable[[], None] = lambda: None,
        on_down: Callable[[str], None] = lambda reason: None,
        name: str = "redis",
        max_pending_bytes: int = 16 << 20,
    ) -> None:
        """`max_pending_bytes` bounds the commands without a reply; what would go over it is refused. The breaker is this line's alone."""
        self.up = False
        self._target = target
        self._key = key
        self._deadline_s = deadline_s
        self._breaker = breaker or Breaker()
        self._outage = _Outage(name, target, on_up, on_down)
        self._max_pending_bytes = max_pending_bytes
        self._reason = "not connected yet"  # why it is not up
        self._wire: Wire | None = None
        self._elsewhere: Address | None = None  # where a MOVED reply said the key is
        self._pending: deque[_Waiting] = deque()
        self._pending_bytes = 0
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None  # one, for the earliest deadline
        self._timer_due = 0.0
        self._counted_until = 0.0  # silence up to here has been counted as failures
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect in the background, and again after each loss, until `close`."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._stay_connected(), name=f"line to {self._outage.name}")

    async def close(self) -> None:
        """Drop the connection; what is pending fails. Calls neither `on_down` nor anything else."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self._hang_up("closed")

    async def call(self, *command: Argument) -> Any:
        """One command's reply (bytes, int, list or None). Raises RedisUnavailable, RedisRefused."""
        return await self._submit(command, monotonic() + self._deadline_s)

    async def run(self, script: Script, keys: Sequence[bytes | str], args: Sequence[Argument], deadline_s: float | None = None) -> Any:
        """A script's reply. Raises as `call` does. The deadline also covers the second attempt when the server does not know it."""
        due = monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        try:
            return await self._submit(("EVALSHA", script.sha, len(keys), *keys, *args), due)
        except RedisRefused as error:
            if error.code != "NOSCRIPT":
                raise
            return await self._submit(("EVAL", script.text, len(keys), *keys, *args), due)

    def pipeline(self, commands: Sequence[Command], deadline_s: float | None = None) -> asyncio.Future[list[Any]]:
        """Commands in one write; the future gets their replies in the same order, an error reply as an exception object in the list.

        The future gets RedisUnavailable when they did not all get a reply in time; ignoring it is no error. Scripts the server does not
        know are sent once more, as EVAL, after all other commands of the pipeline: put commands of which the later needs the
        earlier into one script, not into one pipeline.
        """
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        if not commands:
            future.set_result([])
            return future
        due = monotonic() + (self._deadline_s if deadline_s is None else deadline_s)
        try:
            if not self.up:
                raise RedisUnavailable(self._reason)
            packed = b"".join([pack(tuple(command)) for command in commands])
            self._send(packed, _Waiting(future, due, len(packed), commands))
        except RedisUnavailable as error:
            _fail(future, error)
        return future

    # ---- commands out, replies in

    def _submit(self, command: tuple[Argument, ...], due: float) -> asyncio.Future[Any]:
        if not self.up:
            raise RedisUnavailable(self._reason)
        packed = pack(command)
        future = self._loop.create_future()
        self._send(packed, _Waiting(future, due, len(packed), None))
        return future

    def _send(self, packed: bytes, waiting: _Waiting) -> None:
        size = self._pending_bytes + waiting.size
        if size > self._max_pending_bytes:
            raise RedisUnavailable(f"{size / 2**20:.1f} MiB of commands would be pending, more than {self._max_pending_bytes / 2**20:g}")
        self._pending_bytes = size
        self._pending.append(waiting)
        if not self._unsent:  # all that comes up in this turn of the event loop goes out in one write
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)
        if self._timer is None:
            self._arm(waiting.due)
        elif waiting.due < self._timer_due:
            self._timer.cancel()
            self._arm(waiting.due)

    def _flush(self) -> None:
        if self._wire and self._unsent:
            self._wire.write(self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent))
            self._unsent.clear()

    def _receive(self, reply: Any) -> None:
        if not self._pending:
            self._drop("a reply came that nobody had asked for")
            return
        waiting = self._pending[0]
        if waiting.commands is None:
            self._pending.popleft()
            self._pending_bytes -= waiting.size
            if not waiting.future.done():  # else its caller left, or was told that it is late
                if isinstance(reply, Exception):
                    waiting.future.set_exception(reply)
                else:
                    waiting.future.set_result(reply)
        else:
            waiting.results.append(reply)
            if len(waiting.results) == len(waiting.commands):
                self._pending.popleft()
                self._pending_bytes -= waiting.size
                if not waiting.future.done():
                    self._complete(waiting)
        if isinstance(reply, RedisUnavailable):
            self._not_served(reply)

    def _complete(self, waiting: _Waiting) -> None:
        """A pipeline has all its replies."""
        commands, results, future = waiting.commands, waiting.results, waiting.future
        assert commands is not None
        again = [
            at
            for at, reply in enumerate(results)
            if isinstance(reply, RedisRefused) and reply.code == "NOSCRIPT" and commands[at][0] == "EVALSHA" and commands[at][1] in _texts
        ]
        if not again:
            future.set_result(results)
            return
        repeated: list[Command] = []
        taught = set()
        for at in again:
            _, sha, *rest = commands[at]
            assert isinstance(sha, str)
            repeated.append(commands[at] if sha in taught else ("EVAL", _texts[sha], *rest))  # the first teaches the server
            taught.add(sha)

        def merge(second: asyncio.Future[list[Any]]) -> None:
            if future.done():
                return
            if error := second.exception():
                _fail(future, error)
                return
            for at, reply in zip(again, second.result(), strict=True):
                results[at] = reply
            future.set_result(results)

        # a caller who leaves meanwhile leaves the repetition to itself: it is on its way like any other command
        self.pipeline(repeated, max(0.0, waiting.due - monotonic())).add_done_callback(merge)

    def _not_served(self, reply: RedisUnavailable) -> None:
        """The server says that it is the wrong one, or that it cannot now."""
        if reply.code in NOT_HERE:
            if reply.code == "MOVED":
                host, _, port = str(reply).rpartition(" ")[2].rpartition(":")
                self._elsewhere = (host, int(port)) if host and port.isdecimal() else None
            self._drop(str(reply))
        else:
            self._failed(str(reply))

    def _failed(self, reason: str) -> None:
        self._breaker.failed(monotonic())
        if self._breaker.state != "closed":
            self._drop(reason)

    # ---- deadlines

    def _arm(self, due: float) -> None:
        self._timer_due = due
        self._timer = self._loop.call_later(max(0.0, due - monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        if monotonic() > self._timer_due + STALL_S:
            self._timer = self._loop.call_later(0.001, self._judge)  # read first, then judge
        else:
            self._judge()

    def _judge(self) -> None:
        """Fail what is late, and set the timer for the next."""
        self._timer = None
        if not self._pending:
            return
        now = monotonic()
        late = False
        for waiting in self._pending:
            if waiting.due <= now:
                late = True
                if not waiting.future.done():
                    _fail(waiting.future, RedisUnavailable("no reply within the deadline"))
                waiting.due = now + self._deadline_s  # still unanswered by then, it counts once more
        # Many calls that are late together are one failure: they all waited for the same silence.
        if late and now >= self._counted_until:
            self._counted_until = now + 0.9 * self._deadline_s  # timers are exact to a millisecond
            self._failed(f"no reply within {self._deadline_s * 1000:g} ms")
        if self._pending:
            self._arm(min(waiting.due for waiting in self._pending))

    # ---- the connection

    async def _stay_connected(self) -> None:
        attempt = 0
        while True:
            if not self._breaker.allows(monotonic()):
                await asyncio.sleep(self._breaker.wait_s(monotonic()) + 0.001)
                continue
            try:
                wire = await self._connect()
            except Exception as error:  # whatever it is, the gateway goes on and tries again
                self._breaker.failed(monotonic())
                self._reason = self._outage.failed(error)
            else:
                since = monotonic()
                self._breaker.succeeded(since)
                self._take(wire)
                await self._lost.wait()
                if monotonic() - since > STEADY_S:
                    attempt = 0
            await asyncio.sleep(_pause_s(attempt))
            attempt += 1

    async def _connect(self) -> Wire:
        """A connection to the server that has answered a PING within the deadline."""
        address, self._elsewhere = self._elsewhere or await self._target.locate(self._key), None
        wire = await open_wire(self._target, address)
        try:
            async with asyncio.timeout(self._deadline_s):
                await wire.ask("PING")
        except TimeoutError:
            wire.close()
            raise RedisUnavailable(f"no answer from {address_text(address)} within {self._deadline_s * 1000:g} ms") from None
        except BaseException:
            wire.close()
            raise
        return wire

    def _take(self, wire: Wire) -> None:
        self._wire = wire
        wire.on_reply = self._receive
        wire.on_lost = self._on_lost
        self._lost.clear()
        self._counted_until = 0.0
        self.up = True
        self._outage.over()

    def _on_lost(self, reason: str) -> None:
        self._breaker.failed(monotonic())
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        if self._wire:
            self._hang_up(reason)
            self._outage.failed(RedisUnavailable(reason))

    def _hang_up(self, reason: str) -> None:
        self.up = False
        self._reason = reason
        if self._wire:
            self._wire.close()
            self._wire = None
        if self._timer:
            self._timer.cancel()
            self._timer = None
        pending = list(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        self._unsent.clear()
        for waiting in pending:
            if not waiting.future.done():
                _fail(waiting.future, RedisUnavailable(reason))
        self._lost.set()


class Subscriber:
    """Follows one pub/sub channel on a connection of its own, which comes back by itself. Messages sent while it is away are lost.

    In a cluster plain pub/sub reaches all nodes; the one that would hold the channel's name as a key is asked. A connection that says
    nothing for `silence_s`, not even to a PING, is dropped. `on_up` is called when it is subscribed (again), `on_down` once for each
    outage.
    """

    def __init__(
        self,
        target: RedisTarget,
        channel: str | bytes,
        on_message: Callable[[bytes], None],
        *,
        on_up: Callable[[], None] = lambda: None,
        on_down: Callable[[str], None] = lambda reason: None,
        name: str = "redis channel",
        silence_s: float = 2.0,
    ) -> None:
        self.up = False
        self._target = target
        self._channel = channel.encode() if isinstance(channel, str) else channel
        self._on_message = on_message
        self._outage = _Outage(name, target, on_up, on_down)
        self._silence_s = silence_s
        self._heard_at = 0.0
        self._ended: asyncio.Future[str] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Subscribe in the background, and again after each loss, until `close`."""
        if self._task is None:
            self._task = asyncio.create_task(self._stay_subscribed(), name=f"subscriber of {self._outage.name}")

    async def close(self) -> None:
        """Drop the connection. `on_message` is not called any more."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self.up = False

    async def _stay_subscribed(self) -> None:
        attempt = 0
        while True:
            since = monotonic()
            try:
                wire = await open_wire(self._target, await self._target.locate(self._channel))
                try:
                    await self._follow(wire)
                finally:
                    wire.close()
            except Exception as error:
                self._outage.failed(error)
            self.up = False
            if monotonic() - since > STEADY_S:
                attempt = 0
            await asyncio.sleep(_pause_s(attempt))
            attempt += 1

    async def _follow(self, wire: Wire) -> None:
        """Until the connection is lost: always raises."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ended = ended
        self._heard_at = monotonic()
        wire.on_reply = self._receive
        wire.on_lost = self._end
        wire.write(pack(("SUBSCRIBE", self._channel)))
        while not ended.done():
            await asyncio.wait([ended], timeout=self._silence_s / 3)
            if monotonic() - self._heard_at > self._silence_s:
                raise RedisUnavailable(f"silent for {self._silence_s:g} s")
            if not ended.done():
                wire.write(pack(("PING",)))
        raise RedisUnavailable(ended.result())

    def _end(self, reason: str) -> None:
        if self._ended and not self._ended.done():
            self._ended.set_result(reason)

    def _receive(self, reply: Any) -> None:
        self._heard_at = monotonic()
        if isinstance(reply, Exception):
            self._end(str(reply))
        elif reply[0] == b"message":
            try:
                self._on_message(reply[2])
            except Exception:
                logger.exception("%s: a message could not be used", self._outage.name)
        elif reply[0] == b"subscribe":
            self.up = True
            self._outage.over()


class _Outage:
    """Tells the owner once that the server is away, and once that it is back; logs so too, but not in a storm."""

    def __init__(self, name: str, target: RedisTarget, on_up: Callable[[], None], on_down: Callable[[str], None]) -> None:
        self.name = name
        self._target = target
        self._on_up = on_up
        self._on_down = on_down
        self._since: float | None = None  # the outage's begin
        self._logged = ""  # the reason last logged in this outage
        self._log_from = 0.0  # when the next line may be logged

    def failed(self, error: Exception) -> str:
        """The connection was lost, or an attempt failed. Returns the reason in words."""
        reason = str(error) or type(error).__name__
        now = monotonic()
        if reason != self._logged and now >= self._log_from:
            self._logged = reason
            self._log_from = now + LOG_EVERY_S
            logger.warning("%s (%s): not available, going on without it: %s", self.name, self._target, reason)
        if self._since is None:
            self._since = now
            self._tell(self._on_down, reason)
        return reason

    def over(self) -> None:
        if self._logged and self._since is not None:
            logger.info("%s (%s): available again after %.1f s", self.name, self._target, monotonic() - self._since)
        self._since, self._logged = None, ""
        self._tell(self._on_up)

    def _tell(self, callback: Callable[..., None], *args: str) -> None:
        try:
            callback(*args)
        except Exception:  # the owner's fault must not end the connection's care
            logger.exception("%s: telling of its state failed", self.name)


def _pause_s(attempt: int) -> float:
    """Seconds before the next attempt: doubling, with jitter, so that many gateways do not come back as one."""
    first, longest = RETRY_S
    return min(longest, first * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    future.set_exception(error)
    future.exception()  # nobody has to look at it
