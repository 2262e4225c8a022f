"""Writes of one turn of the event loop, done together at its end: first all reads, then all writes.

Two reasons. A response's head and its first body bytes, or a request's, become one system call. And a write between reads
wakes a peer that has just gone back to sleep, which costs more than the write itself: with 64 streams this halves the cost
of a chunk.
"""

from __future__ import annotations

import asyncio
from typing import Any

JOIN_BELOW = 64 * 1024  # bytes that cost less to copy than to hand over separately


class Outbox:
    """Collects writes per transport and flushes them when the loop's current turn ends. Order per transport is kept."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._waiting: dict[asyncio.WriteTransport, bytes] = {}

    def put(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write `data` at the end of this turn."""
        waiting = self._waiting
        if not waiting:
            self._loop.call_soon(self._flush)
        before = waiting.get(transport)
        if before is None:
            waiting[transport] = data
        elif len(data) < JOIN_BELOW:
            waiting[transport] = before + data
        else:
            del waiting[transport]
            transport.writelines((before, data))

    def flush(self, transport: asyncio.WriteTransport) -> None:
        """Write what waits for this transport now (it is about to be closed)."""
        data = self._waiting.pop(transport, None)
        if data is not None and not transport.is_closing():
            transport.write(data)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for transport, data in waiting.items():
            try:
                transport.write(data)
            except RuntimeError:  # uvloop: its connection was lost since; the others' bytes must not be lost with it
                pass


class BatchedTransport:
    """A transport whose writes go through an outbox. Only what uvicorn's protocol uses."""

    __slots__ = ("_outbox", "_transport", "is_closing", "write_now")

    def __init__(self, transport: asyncio.Transport, outbox: Outbox):
        self._transport = transport
        self._outbox = outbox
        self.is_closing = transport.is_closing
        self.write_now = transport.write  # after `flush`, and where nothing is written with `write` in between

    def write(self, data: bytes) -> None:
        self._outbox.put(self._transport, data)

    def flush(self) -> None:
        self._outbox.flush(self._transport)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_outboxes: dict[asyncio.AbstractEventLoop, Outbox] = {}


def outbox() -> Outbox:
    """The running loop's outbox."""
    loop = asyncio.get_running_loop()
    found = _outboxes.get(loop)
    if found is None:
        for closed in [old for old in _outboxes if old.is_closed()]:
            del _outboxes[closed]
        found = _outboxes[loop] = Outbox(loop)
    return found
