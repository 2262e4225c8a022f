"""Which Redis to talk to, and where it is right now: one server, a master that Sentinels know, or a node of a cluster."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

DISCOVERY_S = 0.25  # for each answer of a Sentinel or a cluster node

Address = tuple[str, int]  # host and port; a unix socket's path and 0


class NotLocated(OSError):
    """Nobody could say where the server is."""


@dataclass(frozen=True)
class RedisTarget:
    """A Redis or Valkey, as configured. Its repr and `str` hold no secret.

    `nodes` are Sentinels when `sentinel_master` is set (the url then only gives scheme, user and database), else further nodes of the
    cluster to ask. A password given by name wins over one in the url. Raises ValueError where these do not fit together.
    """

    url: str = "redis://127.0.0.1:6379/0"
    nodes: Sequence[str] = ()
    sentinel_master: str | None = None
    cluster: bool = False
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None

    def __post_init__(self) -> None:
        parsed = self._parsed
        if self.sentinel_master and self.cluster:
            raise ValueError("a cluster has no Sentinels")
        if self.sentinel_master and not self.nodes:
            raise ValueError("a Sentinel master needs the Sentinels' host:port in nodes")
        if self.cluster and self.database:
            raise ValueError("a cluster has database 0 only")
        if "path" in parsed and (self.sentinel_master or self.cluster):
            raise ValueError("a unix socket is one server, neither a cluster nor behind Sentinels")
        for node in self.nodes:
            _host_port(node)

    def __str__(self) -> str:
        if self.sentinel_master:
            return f"master {self.sentinel_master} of Sentinels {', '.join(self.nodes)}"
        if self.cluster:
            return f"cluster {', '.join(f'{host}:{port}' for host, port in self._start_nodes)}"
        return address_text(self._address)

    def __repr__(self) -> str:
        return f"RedisTarget({self})"

    @cached_property
    def _parsed(self) -> dict[str, Any]:
        try:
            return dict(parse_url(self.url))
        except ValueError:
            # without its cause, whose text may hold the url
            raise ValueError("not a Redis URL: expected redis://host:port/db, rediss://host:port/db or unix:///path") from None

    @property
    def _address(self) -> Address:
        parsed = self._parsed
        return (parsed["path"], 0) if "path" in parsed else (parsed.get("host", "127.0.0.1"), parsed.get("port", 6379))

    @property
    def _start_nodes(self) -> list[Address]:
        return list(dict.fromkeys([self._address, *map(_host_port, self.nodes)]))

    @property
    def database(self) -> int:
        return int(self._parsed.get("db", 0))

    @property
    def credentials(self) -> tuple[str, ...]:
        """The arguments of AUTH; empty where there is no password."""
        username = self.username or self._parsed.get("username")
        password = self.password or self._parsed.get("password")
        if password is None:
            return ()
        return (username, password) if username else (password,)

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        """For rediss://, else None. Read once. Raises OSError where a file is missing or not PEM."""
        if not self.url.startswith("rediss://"):
            return None
        context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file)
        return context

    async def locate(self, key: bytes = b"") -> Address:
        """The server that holds the key now. Raises NotLocated; takes up to `DISCOVERY_S` for each node that does not answer."""
        if self.sentinel_master:
            return await self._locate_master(self.sentinel_master)
        if self.cluster:
            return await self._locate_slot(key_slot(key))
        return self._address

    async def _locate_master(self, name: str) -> Address:
        options = self._options(self.sentinel_username, self.sentinel_password)
        async with Sentinel([_host_port(node) for node in self.nodes], sentinel_kwargs=options) as sentinels:
            try:
                host, port = await sentinels.discover_master(name)
            except (RedisError, OSError) as error:
                raise NotLocated(f"no Sentinel names a master {name!r} that is up: {error}") from error
            return _text(host), int(port)

    async def _locate_slot(self, slot: int) -> Address:
        problems = []
        for start in self._start_nodes:
            try:
                async with self._client(start) as node:
                    if b"cluster_state:ok" not in await node.execute_command("CLUSTER", "INFO"):
                        problems.append(f"{address_text(start)} says that the cluster is down")
                        continue
                    for first, last, (host, port, *_), *_ in await node.execute_command("CLUSTER", "SLOTS"):
                        if first <= slot <= last:
                            return _text(host) or start[0], int(port)  # no host: the one that was asked
                    problems.append(f"{address_text(start)} knows no node for slot {slot}")
            except (RedisError, OSError) as error:
                problems.append(f"{address_text(start)}: {error}")
        raise NotLocated("; ".join(problems))

    @asynccontextmanager
    async def _client(self, address: Address) -> AsyncIterator[Any]:
        *username, password = self.credentials or (None,)
        client: Redis = Redis(
            host=address[0], port=address[1], single_connection_client=True, **self._options(username[0] if username else None, password)
        )
        try:
            yield client
        finally:
            await client.aclose()

    def _options(self, username: str | None, password: str | None) -> dict[str, Any]:
        """redis-py's settings for one question: no retries, and no HELLO, which an ACL may forbid."""
        options: dict[str, Any] = {
            "username": username,
            "password": password,
            "socket_timeout": DISCOVERY_S,
            "socket_connect_timeout": DISCOVERY_S,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if self.url.startswith("rediss://"):
            options |= {"ssl": True, "ssl_ca_certs": _path(self.ca_file), "ssl_certfile": _path(self.cert_file)}
            options |= {"ssl_keyfile": _path(self.key_file)}
        return options


def address_text(address: Address) -> str:
    """For people: host:port, or a unix socket's path."""
    host, port = address
    return f"{host}:{port}" if port else host


def _host_port(node: str) -> Address:
    host, colon, port = node.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ValueError(f"{node!r} is not host:port")
    return host.strip("[]"), int(port)


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _path(file: str | Path | None) -> str | None:
    return str(file) if file else None
