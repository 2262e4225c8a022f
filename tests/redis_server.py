"""Real Redis servers for tests: alone, as a master with a replica and Sentinels, as a cluster. All on free ports of 127.0.0.1.

They keep nothing (no persistence) and end with their context, or at the latest with this process.
"""

from __future__ import annotations

import asyncio
import atexit
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from redis import Redis
from redis.crc import key_slot

from tests.programs import program

START_S = 20.0  # a server that is not there by then will not come

_running: set[subprocess.Popen[bytes]] = set()


@atexit.register
def _kill_all() -> None:
    for process in _running:
        process.kill()


def free_port() -> int:
    """A port that was free just now, and whose cluster bus port (10000 higher) is one too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55000:
            return port


async def until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """Wait for a state of another program that has no event."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        await asyncio.sleep(0.02)


class RedisServer:
    """One redis-server process. `args` are its further options."""

    def __init__(self, *args: str, port: int | None = None, sentinel_config: str | None = None) -> None:
        self._program = program("redis-server")
        self._args = args
        self._sentinel_config = sentinel_config
        self._dir = Path(tempfile.mkdtemp(prefix="redis-test-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._fixed_port = port
        self.port = port or free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        while True:
            self._launch()
            try:
                await until(self._ready_or_ended, f"redis-server on port {self.port}")
            except BaseException:
                self.kill()
                raise
            if self._process is not None and self._process.poll() is None:
                return
            output = (self._dir / "log").read_text("utf-8", "replace")
            self.kill()
            if "Address already in use" not in output or self._fixed_port:
                raise AssertionError(f"redis-server did not start:\n{output}")
            self.port = free_port()  # somebody else was quicker

    def stop(self) -> None:
        """Freeze it (SIGSTOP): connections stay, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        """End the freeze."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once (SIGKILL). Its data is gone."""
        if self._process:
            self._process.kill()
            self._process.wait()
            _running.discard(self._process)
            self._process = None

    async def restart(self) -> None:
        """Kill it and start it again on the same port, empty."""
        self.kill()
        self._fixed_port = self.port
        await self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._dir, ignore_errors=True)

    def admin(self, *command: str | int) -> object:
        """A command's reply, over a connection of its own (the default user's, without TLS). Raises redis-py's errors."""
        with Redis(port=self.port, socket_timeout=5, decode_responses=True, protocol=2) as client:
            client.response_callbacks.clear()  # replies as they come
            return client.execute_command(*command)

    def _launch(self) -> None:
        log = self._dir / "log"
        if self._sentinel_config is None:
            arguments = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port", str(self.port), *self._args]
            arguments += ["--dir", str(self._dir), "--enable-debug-command", "yes"]
        else:
            config = self._dir / "sentinel.conf"  # a Sentinel writes what it learned into it
            config.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self._dir}\n{self._sentinel_config}")
            arguments = [str(config), "--sentinel"]
        with log.open("wb") as output:
            self._process = subprocess.Popen([self._program, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        _running.add(self._process)

    def _ready_or_ended(self) -> bool:
        assert self._process is not None
        ready = b"Ready to accept connections" if self._sentinel_config is None else b"+monitor"
        return self._process.poll() is not None or ready in (self._dir / "log").read_bytes()


@asynccontextmanager
async def redis_server(*args: str, port: int | None = None) -> AsyncIterator[RedisServer]:
    """A running redis-server. `args` are further options, as "--maxmemory", "10mb"."""
    server = RedisServer(*args, port=port)
    try:
        await server.start()
        yield server
    finally:
        server.close()


class SentinelPair:
    """A master, its replica and three Sentinels that replace a master silent for half a second."""

    MASTER = "pool"

    def __init__(self, master: RedisServer, replica: RedisServer, sentinels: list[RedisServer]) -> None:
        self.master = master  # as started; a failover does not swap these names
        self.replica = replica
        self.sentinels = sentinels

    @property
    def nodes(self) -> list[str]:
        """host:port of the Sentinels."""
        return [f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels]

    def master_port(self) -> int:
        """Of the master by now, as the first Sentinel knows it."""
        address = self.sentinels[0].admin("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.MASTER)
        assert isinstance(address, (list, tuple))
        return int(address[1])


@asynccontextmanager
async def sentinel_pair(*args: str) -> AsyncIterator[SentinelPair]:
    """Running and acquainted: a failover takes a few seconds. `args` are further options of master and replica."""
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(redis_server("--repl-diskless-sync-delay", "0", *args))
        replica = await stack.enter_async_context(redis_server("--replicaof", f"127.0.0.1 {master.port}", *args))
        await until(lambda: "master_link_status:up" in str(replica.admin("INFO", "replication")), "the replica to follow")
        name = SentinelPair.MASTER
        config = (
            f"sentinel monitor {name} 127.0.0.1 {master.port} 2\nsentinel down-after-milliseconds {name} 500\n"
            f"sentinel failover-timeout {name} 3000\n"
        )
        sentinels = []
        for _ in range(3):
            sentinel = RedisServer(sentinel_config=config)
            stack.callback(sentinel.close)
            await sentinel.start()
            sentinels.append(sentinel)

        def acquainted(sentinel: RedisServer) -> bool:
            known = _pairs(sentinel.admin("SENTINEL", "MASTER", name))
            return known["num-other-sentinels"] == "2" and known["num-slaves"] == "1"

        await until(lambda: all(map(acquainted, sentinels)), "the Sentinels to know each other and the replica")
        yield SentinelPair(master, replica, sentinels)


class RedisCluster:
    """Masters that share the slots evenly, without replicas."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes

    @property
    def addresses(self) -> list[str]:
        """host:port of the nodes."""
        return [f"127.0.0.1:{node.port}" for node in self.nodes]

    def owner(self, key: bytes) -> RedisServer:
        """The node that holds the key's slot."""
        slot = key_slot(key)
        slots = self.nodes[0].admin("CLUSTER", "SLOTS")
        assert isinstance(slots, (list, tuple))
        port = next(int(node[1]) for first, last, node, *_ in slots if first <= slot <= last)
        return next(node for node in self.nodes if node.port == port)

    def migrate(self, key: bytes, to: RedisServer) -> None:
        """Move the key's slot with its keys to another node, as a resharding does."""
        slot, source = key_slot(key), self.owner(key)
        target_id, source_id = str(to.admin("CLUSTER", "MYID")), str(source.admin("CLUSTER", "MYID"))
        to.admin("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.admin("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := source.admin("CLUSTER", "GETKEYSINSLOT", slot, 100):
            assert isinstance(keys, list)
            source.admin("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys)
        for node in [to, source, *self.nodes]:
            node.admin("CLUSTER", "SETSLOT", slot, "NODE", target_id)


@asynccontextmanager
async def cluster(nodes: int = 3, *args: str) -> AsyncIterator[RedisCluster]:
    """A running cluster in which every node knows all slots. `args` are further options of the nodes."""
    async with AsyncExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *args)
        members = [await stack.enter_async_context(redis_server(*options)) for _ in range(nodes)]
        for at, node in enumerate(members):
            node.admin("CLUSTER", "ADDSLOTSRANGE", 16384 * at // nodes, 16384 * (at + 1) // nodes - 1)
            node.admin("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            members[0].admin("CLUSTER", "MEET", "127.0.0.1", node.port)

        def complete(node: RedisServer) -> bool:
            info = str(node.admin("CLUSTER", "INFO"))
            return "cluster_state:ok" in info and "cluster_slots_ok:16384" in info and f"cluster_known_nodes:{nodes}" in info

        await until(lambda: all(map(complete, members)), "the cluster's nodes to know each other")
        yield RedisCluster(members)


def _pairs(reply: object) -> dict[str, str]:
    """A reply of alternating names and values."""
    assert isinstance(reply, list)
    return {str(name): str(value) for name, value in zip(reply[::2], reply[1::2], strict=True)}
