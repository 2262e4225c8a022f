"""One connection to a Redis server: commands packed and replies parsed by hiredis, on an asyncio protocol. RESP2."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import hiredis

from kvindex.redis_target import Address, RedisTarget, address_text

OPEN_S = 0.5  # to connect, with TLS and AUTH
# Replies that say: not this server, or not now. The caller goes on without Redis.
NOT_HERE = frozenset({"MOVED", "READONLY"})
NOT_NOW = frozenset({"ASK", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "BUSY"})
# A host that vanished resets nothing: probes after 5 s of silence, given up 6 s later. The names are Linux's.
_TCP_KEEPALIVE = [
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]

Argument = bytes | str | int | float

pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # typed as of a tuple of one


class RedisUnavailable(Exception):
    """Redis did not do it, as far as known: not connected, late, connection lost, or the server cannot now (`code` of its reply).

    A command that was sent may still have been executed, even after this was raised.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class RedisRefused(Exception):
    """Redis answered with an error: NOPERM, OOM, WRONGTYPE, NOSCRIPT, ERR ..."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _error_reply(text: str) -> RedisUnavailable | RedisRefused:
    code = text.partition(" ")[0]
    if code in NOT_HERE or code in NOT_NOW:
        return RedisUnavailable(text, code)
    return RedisRefused(code, text)


class Wire(asyncio.Protocol):
    """Bytes out, replies in. `on_reply` gets each reply in order (an error reply as an exception object), `on_lost` the end, once."""

    def __init__(self) -> None:
        self.on_reply: Callable[[Any], None] = self._answer
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.write: Callable[[bytes], None]
        self._reader = hiredis.Reader(replyError=_error_reply)
        self._transport: asyncio.Transport | None = None
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._lost = False

    async def ask(self, *command: Argument) -> Any:
        """One command and its reply, before `on_reply` is set. Raises RedisUnavailable, RedisRefused."""
        self.write(pack(command))
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Drop the connection and what is unsent. Nothing is called any more."""
        self.on_reply = self.on_lost = lambda _: None
        self._end("closed")

    def _answer(self, reply: Any) -> None:
        self._answers.put_nowait(reply)

    def _end(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            if self._transport:
                self._transport.abort()
            self._answers.put_nowait(RedisUnavailable(reason))
            self.on_lost(reason)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is of no asyncio class
        self._transport = transport
        self.write = transport.write
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _TCP_KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self._lost:  # given up while it was being connected
            transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:  # False: no whole reply is left; RESP2 itself has none
                self.on_reply(reply)
        except hiredis.ProtocolError as error:
            self._end(f"not the Redis protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc else "the server closed the connection")


async def open_wire(target: RedisTarget, address: Address) -> Wire:
    """Connect and log in. Raises RedisUnavailable, RedisRefused (the server did not like the credentials, say), OSError."""
    wire = Wire()
    try:
        async with asyncio.timeout(OPEN_S):
            await _connect(target, address, wire)
            if target.credentials:
                await wire.ask("AUTH", *target.credentials)
            if target.database:
                await wire.ask("SELECT", target.database)
    except TimeoutError:
        wire.close()
        raise RedisUnavailable(f"no answer from {address_text(address)} within {OPEN_S:g} s") from None
    except BaseException:
        wire.close()
        raise
    return wire


async def _connect(target: RedisTarget, address: Address, wire: Wire) -> None:
    loop = asyncio.get_running_loop()
    host, port = address
    if port:
        await loop.create_connection(lambda: wire, host, port, ssl=target.ssl_context)
    else:
        await loop.create_unix_connection(lambda: wire, host)
