"""Several gateway processes behind one port: `warmroute serve --processes N`.

The parent holds the address and looks after its children; it serves nothing itself. Each child is a whole gateway with its own event
loop. Children are forked before there is a loop, a thread or a connection that could be shared by mistake, and so they all run the
configuration that was checked, also the one that is started hours later in the place of one that died.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import FrameType

import uvloop

from gateway.app import Gateway
from gateway.config import Config
from gateway.server import Server, url_of
from gateway.siblings import Siblings
from kvindex.tokenizer import TokenizerError

logger = logging.getLogger("warmroute.processes")

GRACE_S = 30.0  # for requests under way, as `serve` gives them
LATE_S = 10.0  # a child that has not ended this long after its grace is killed
FIRST_PAUSE_S = 0.1  # before a child that died is started again; doubled each time
LONGEST_PAUSE_S = 10.0
STEADY_S = 10.0  # a child that ran this long counts as well: the next pause is the first again
NOT_STARTED = 3  # exit status of a server that could not start

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def reserve(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to every address of this host, none of them listening. Raises OSError, also where somebody else listens.

    `siblings_of` makes sockets that listen there. Each child has its own (SO_REUSEPORT: the kernel spreads connections by a hash),
    because processes that accept from one shared socket take very unequal shares: of 64 connections opened at once over three
    processes the busiest held 1.2 times its share with a socket each, 2.1 times with a shared one (up to 3.0: all of them). When a child
    dies its socket goes with it, and new connections are spread over the others.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = _socket(family, kind, protocol)
            sockets.append(sock)
            if sockets[:-1] and not port:  # the port that the first address got
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sock.bind(address)
            # only now: with it, binding would also succeed beside another gateway of this user, and share its clients
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def siblings_of(reserved: list[socket.socket]) -> list[socket.socket]:
    """For one child: sockets on the same addresses, ready to listen."""
    sockets = []
    for held in reserved:
        sock = _socket(held.family, held.type, held.proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(held.getsockname())
        sockets.append(sock)
    return sockets


def _socket(family: int, kind: int, protocol: int) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


class Processes:
    """The parent. It holds the address from now on (raises OSError when it cannot be had); `run` returns when all children have ended."""

    def __init__(self, config: Config, count: int, *, on_started: Callable[[str], None]):
        self._config = config
        self._count = count
        self._on_started = on_started
        self._directory = Path()
        self._reserved = reserve(config.listen.host, config.listen.port)
        self._children: dict[int, int] = {}  # process id -> number
        self._started_at = [0.0] * count
        self._pauses = [FIRST_PAUSE_S] * count
        self._due: dict[int, float] = {}  # number -> when to start it again
        self._waiting_for = set(range(count))  # children whose first start is not done
        self._stop_signal = 0
        self._kill_at: float | None = None
        self._exit_status = 0

    def run(self) -> int:
        """Serve until a signal says to end. Returns the exit status."""
        # children see the end of the first when the parent is gone, however it went; by the second they say that they serve
        self._lifeline, self._lifeline_end = os.pipe()
        self._reports, self._reports_end = os.pipe()
        wakeup, wakeup_end = socket.socketpair()
        for end in (wakeup, wakeup_end):
            end.setblocking(False)
        gc.collect()
        gc.freeze()  # pages that the collector does not touch stay shared with the children
        before = {number: signal.signal(number, _noted) for number in _SIGNALS}
        signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)
        try:
            with tempfile.TemporaryDirectory(prefix="warmroute-") as directory, selectors.DefaultSelector() as selector:
                self._directory = Path(directory)
                selector.register(wakeup, selectors.EVENT_READ)
                selector.register(self._reports, selectors.EVENT_READ)
                for number in range(self._count):
                    self._start(number)
                while self._children or (self._due and not self._stop_signal):
                    for key, _ in selector.select(self._until_next()):
                        if key.fileobj is wakeup:
                            for number in wakeup.recv(4096):
                                self._take_signal(number)
                        else:
                            for number in os.read(self._reports, 4096):
                                self._has_started(number)
                    self._reap()
                    self._keep_time()
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._exit_status:
            return self._exit_status
        if self._stop_signal:
            signal.raise_signal(self._stop_signal)  # ends the way a single process does
        return 0

    # --- children ---

    def _start(self, number: int) -> None:
        # a signal between the fork and the child's own handlers would be taken for the parent's
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process = os.fork()
            if not process:
                status = 1
                try:
                    status = self._be_child(number)
                finally:
                    os._exit(status)  # nothing of what the parent has on its stack is the child's to end
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        self._children[process] = number
        self._started_at[number] = monotonic()

    def _be_child(self, number: int) -> int:
        signal.set_wakeup_fd(-1)
        for caught in _SIGNALS:
            signal.signal(caught, signal.SIG_IGN if caught == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(self._lifeline_end)
        try:
            gateway = Gateway(self._config, Siblings(self._directory, number, self._count))
            server = _Child(gateway, self._config.listen, on_started=lambda _: self._report(number), grace_s=GRACE_S)
            uvloop.run(self._serve(server))
            return 0 if server.started else NOT_STARTED
        except (TokenizerError, ValueError) as error:  # what a configuration may be wrong in
            print(f"Error: {error}", file=sys.stderr, flush=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        except BaseException:
            logger.exception("process %d failed", number)
        return 1

    async def _serve(self, server: Server) -> None:
        def parent_is_gone() -> None:
            asyncio.get_running_loop().remove_reader(self._lifeline)
            server.should_exit = True

        asyncio.get_running_loop().add_reader(self._lifeline, parent_is_gone)
        await server.serve(sockets=siblings_of(self._reserved))

    def _report(self, number: int) -> None:
        os.write(self._reports_end, bytes((number,)))
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)

    # --- the parent's part ---

    def _until_next(self) -> float | None:
        times = [*(() if self._stop_signal else self._due.values()), *(() if self._kill_at is None else (self._kill_at,))]
        return max(0.0, min(times) - monotonic()) if times else None

    def _keep_time(self) -> None:
        now = monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_children(signal.SIGKILL)
        if not self._stop_signal:
            for number in [number for number, at in self._due.items() if at <= now]:
                del self._due[number]
                self._start(number)

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if self._stop_signal and number == signal.SIGINT:
            self._kill_at = monotonic()  # asked twice
        elif not self._stop_signal:
            self._stop(number)

    def _stop(self, number: int) -> None:
        self._stop_signal = number
        self._kill_at = monotonic() + GRACE_S + LATE_S
        self._signal_children(signal.SIGTERM)

    def _signal_children(self, number: signal.Signals) -> None:
        for process in self._children:
            os.kill(process, number)

    def _has_started(self, number: int) -> None:
        if self._waiting_for:
            self._waiting_for.discard(number)
            if not self._waiting_for and not self._stop_signal:
                self._on_started(url_of(self._reserved[0]))

    def _reap(self) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            number = self._children.pop(process, None)
            if number is not None:
                self._has_ended(number, os.waitstatus_to_exitcode(status))

    def _has_ended(self, number: int, status: int) -> None:
        if self._stop_signal:
            return
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        if self._waiting_for:
            logger.error("process %d of %d could not start (%s)", number, self._count, how)
            self._exit_status = status if status > 0 else NOT_STARTED
            self._stop(signal.SIGTERM)
            return
        now = monotonic()
        if now - self._started_at[number] >= STEADY_S:
            self._pauses[number] = FIRST_PAUSE_S
        pause = self._pauses[number]
        self._pauses[number] = min(LONGEST_PAUSE_S, 2 * pause)
        self._due[number] = now + pause
        logger.error("process %d of %d ended (%s); it is started again in %.1f s", number, self._count, how, pause)


class _Child(Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # a terminal interrupts the whole group; the parent says when to end, once
        if sig != signal.SIGINT:
            super().handle_exit(sig, frame)


def _noted(number: int, frame: FrameType | None) -> None:
    """The wakeup socket has told the loop."""
