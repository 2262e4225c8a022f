"""The HTTP server: uvicorn, with the gateway's own protocol for its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from gateway.config import Listen
from gateway.connection import GatewayProtocol

logger = logging.getLogger("warmroute.server")

FORCED_S = 5.0  # for the application's end where connections are not waited for


def url_of(listening: Any) -> str:
    """The URL of a bound TCP socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{'[' + host + ']' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which also cuts clients that are too slow to send and can tell its port."""

    def __init__(self, app: Any, listen: Listen, *, on_started: Callable[[str], None] | None = None, grace_s: float = 30.0):
        protocol: Any = partial(GatewayProtocol, limits=listen)  # uvicorn makes the instances
        config = uvicorn.Config(
            app, host=listen.host, port=listen.port, http=protocol, ws="none", loop="uvloop", lifespan="on",
            access_log=False, log_config=None, server_header=False, timeout_keep_alive=75, backlog=4096,
            timeout_graceful_shutdown=int(grace_s), proxy_headers=False, interface="asgi3",
        )  # fmt: skip
        super().__init__(config)
        self._on_started = on_started
        self._sweeper: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            listening = self.servers[0].sockets[0]
            self.port = listening.getsockname()[1]
            self._sweeper = asyncio.create_task(self._sweep(), name="slow clients")
            if self._on_started is not None:
                self._on_started(url_of(listening))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await super().shutdown(sockets)
        if self.force_exit:  # a second signal: uvicorn would leave the application running and its end to the interpreter
            with suppress(TimeoutError):
                async with asyncio.timeout(FORCED_S):
                    await self.lifespan.shutdown()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for connection in list(self.server_state.connections):
                if not isinstance(connection, GatewayProtocol):
                    continue
                if connection.takes_nothing(now):
                    logger.warning("a client took nothing for %g s", connection.listen.write_timeout_s)
                    connection.transport.abort()
                elif connection.is_overdue(now):
                    connection.transport.close()
