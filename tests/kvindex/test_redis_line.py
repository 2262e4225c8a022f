"""The line to Redis, against real servers: order, deadlines, outages of every kind, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvindex import redis_line
from kvindex.breaker import Breaker
from kvindex.redis_line import Line, RedisRefused, RedisUnavailable, Script, Subscriber
from kvindex.redis_target import RedisTarget
from tests.programs import program
from tests.redis_server import RedisServer, cluster, free_port, redis_server, sentinel_pair

PATIENT_S = 5.0  # a deadline that a working server on a busy machine keeps


class Owner:
    """Whoever uses a line: is told of its state."""

    def __init__(self) -> None:
        self.ups = 0
        self.downs: list[str] = []
        self._changed = asyncio.Event()

    def on_up(self) -> None:
        self.ups += 1
        self._changed.set()

    def on_down(self, reason: str) -> None:
        self.downs.append(reason)
        self._changed.set()

    async def sees(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def up(self, times: int = 1) -> None:
        await self.sees(lambda: self.ups >= times)

    async def down(self, times: int = 1) -> None:
        await self.sees(lambda: len(self.downs) >= times)


@asynccontextmanager
async def line_to(
    target: RedisServer | RedisTarget, key: bytes = b"", wait: bool = True, **options: Any
) -> AsyncIterator[tuple[Line, Owner]]:
    """A started line and its owner; `wait` until it is up."""
    if isinstance(target, RedisServer):
        target = RedisTarget(target.url)
    owner = Owner()
    line = Line(target, key, on_up=owner.on_up, on_down=owner.on_down, **{"deadline_s": PATIENT_S, **options})
    await line.start()
    try:
        if wait:
            await owner.up()
        yield line, owner
    finally:
        await line.close()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_line, "RETRY_S", (0.001, 0.002))


def fails_at_once(line: Line) -> bool:
    """Whether a call is refused without waiting for anything, not even for the event loop."""
    call = line.call("PING")
    try:
        call.send(None)
    except RedisUnavailable:
        return True
    finally:
        call.close()
    return False


# ---- commands and replies


async def test_replies_belong_to_their_commands_when_callers_leave(server: RedisServer) -> None:
    chance = random.Random(7)
    async with line_to(server) as (line, _):

        async def caller(number: int) -> None:
            for turn in range(20):
                text = f"{number}:{turn}".encode()
                if chance.random() < 0.2:
                    assert await line.pipeline([("ECHO", text), ("ECHO", text + b"'")]) == [text, text + b"'"]
                else:
                    assert await line.call("ECHO", text) == text

        tasks = [asyncio.create_task(caller(number)) for number in range(60)]
        for task in chance.sample(tasks, 40):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        left = [result for result in results if isinstance(result, asyncio.CancelledError)]
        assert len(left) >= 30
        assert [result for result in results if result is not None and result not in left] == []


async def test_a_pipeline_keeps_errors_in_their_place(server: RedisServer) -> None:
    async with line_to(server) as (line, _):
        first, refused, last = await line.pipeline([("SET", "k", 1), ("LPUSH", "k", "x"), ("GET", b"k")])
        assert (first, last) == (b"OK", b"1")
        assert isinstance(refused, RedisRefused) and refused.code == "WRONGTYPE"
        assert await line.pipeline([]) == []
        with pytest.raises(RedisRefused, match="WRONGTYPE"):
            await line.call("LPUSH", "k", "x")


async def test_a_script_is_taught_again_after_the_server_forgot_it(server: RedisServer) -> None:
    script = Script("return {KEYS[1], ARGV[1]}")
    other = Script("return ARGV[1] + 1")
    async with line_to(server) as (line, owner):
        for _ in range(2):
            assert await line.run(script, ["k"], [b"a"]) == [b"k", b"a"]
            assert await line.call("EVALSHA", script.sha, 0, "k") is not None  # now it knows it
            server.admin("SCRIPT", "FLUSH")
            assert await line.pipeline(
                [
                    script.command(["k"], [1]),
                    ("ECHO", "between"),
                    other.command([], [1]),
                    script.command(["k"], [2]),
                    other.command([], [2]),
                ]
            ) == [[b"k", b"1"], b"between", 2, [b"k", b"2"], 3]
            server.admin("SCRIPT", "FLUSH")
        assert owner.downs == []


async def test_a_script_in_a_pipeline_is_sent_in_full_only_once(server: RedisServer) -> None:
    script = Script("return ARGV[1] * 2")
    async with line_to(server) as (line, _):
        assert await line.pipeline([script.command([], [n]) for n in range(50)]) == [2 * n for n in range(50)]
        assert "cmdstat_eval:calls=1," in str(server.admin("INFO", "commandstats"))


async def test_a_script_of_nobody_stays_an_error(server: RedisServer) -> None:
    async with line_to(server) as (line, _):
        (reply,) = await line.pipeline([("EVALSHA", "0" * 40, 0)])
        assert isinstance(reply, RedisRefused) and reply.code == "NOSCRIPT"


async def test_full_memory_is_a_refusal_and_no_outage() -> None:
    script = Script("return redis.call('SET', KEYS[1], ARGV[1])")
    async with redis_server("--maxmemory", "1", "--maxmemory-policy", "noeviction") as server, line_to(server) as (line, owner):
        for _ in range(10):
            with pytest.raises(RedisRefused) as refused:
                await line.call("SET", "k", "v")
            assert refused.value.code == "OOM"
        with pytest.raises(RedisRefused) as refused:
            await line.run(script, ["k"], ["v"])
        assert refused.value.code == "OOM"
        assert line.up and owner.downs == []


# ---- who may what


async def test_a_user_without_script_and_connection_commands(server: RedisServer) -> None:
    script = Script("return redis.call('GET', KEYS[1])")
    server.admin("ACL", "SETUSER", "gateway", "on", ">s3cret", "resetkeys", "~{wr:*", "-@all", "+ping", "+evalsha", "+eval", "+get")
    target = RedisTarget(server.url, username="gateway", password="s3cret")
    async with line_to(target) as (line, owner):
        assert await line.run(script, ["{wr:p}:1:x"], []) is None
        for forbidden in (("SCRIPT", "LOAD", "return 1"), ("GET", "other"), ("CLIENT", "ID")):
            with pytest.raises(RedisRefused) as refused:
                await line.call(*forbidden)
            assert refused.value.code == "NOPERM"
        assert line.up and owner.downs == []


async def test_a_wrong_password_is_said_once_and_can_be_put_right(
    server: RedisServer, caplog: pytest.LogCaptureFixture, quick_retries: None
) -> None:
    server.admin("ACL", "SETUSER", "gateway", "on", ">right-one", "~*", "+@all")
    target = RedisTarget(server.url, username="gateway", password="gu3ssed")
    with caplog.at_level(logging.INFO, "warmroute.redis"):
        async with line_to(target, wait=False, breaker=Breaker(failures=1000)) as (line, owner):
            await owner.down()
            with pytest.raises(RedisUnavailable, match="WRONGPASS"):
                await line.call("PING")
            while int(str(server.admin("INFO", "stats")).partition("total_connections_received:")[2].split()[0]) < 20:
                await asyncio.sleep(0.01)  # it goes on trying
            assert len(owner.downs) == 1 and len(caplog.records) == 1
            server.admin("ACL", "SETUSER", "gateway", ">gu3ssed")
            await owner.up()
            assert await line.call("PING") == b"PONG"
    assert "WRONGPASS" in caplog.text and "gu3ssed" not in caplog.text
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    "target",
    [
        RedisTarget("redis://user:s3cret@localhost:1234/2"),
        RedisTarget("rediss://localhost:1234", username="user", password="s3cret"),
        RedisTarget("redis://user:s3cret@x/", nodes=["a:1"], sentinel_master="m", sentinel_password="s3cret"),
        RedisTarget("redis://:s3cret@x", nodes=["a:1"], cluster=True),
        RedisTarget("unix://:s3cret@/run/redis.sock"),
    ],
)
def test_no_secret_shows(target: RedisTarget) -> None:
    assert "s3cret" not in f"{target} {target!r}"
    assert target.password or "s3cret" in target.credentials


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "http://s3cret@host"},
        {"url": "redis://:s3cret@host:port"},
        {"nodes": ["host"]},
        {"sentinel_master": "m"},
        {"sentinel_master": "m", "nodes": ["a:1"], "cluster": True},
        {"cluster": True, "url": "redis://host/1"},
        {"cluster": True, "url": "unix:///socket"},
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        RedisTarget(**settings)
    assert "s3cret" not in str(error.value)


async def test_the_database_of_the_url(server: RedisServer) -> None:
    async with line_to(RedisTarget(server.url.removesuffix("0") + "3")) as (line, _):
        await line.call("SET", "k", "v")
    assert "db3:keys=1" in str(server.admin("INFO", "keyspace"))


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    async with redis_server("--unixsocket", str(path)), line_to(RedisTarget(f"unix://{path}")) as (line, _):
        assert await line.call("PING") == b"PONG"


# ---- lateness


async def test_a_late_reply_reaches_nobody(server: RedisServer) -> None:
    async with line_to(server, deadline_s=0.05, breaker=Breaker(failures=1000)) as (line, owner):
        late = line.pipeline([("DEBUG", "SLEEP", "0.3"), ("ECHO", "late")])
        behind = asyncio.create_task(line.call("ECHO", "behind"))
        with pytest.raises(RedisUnavailable, match="deadline"):
            await late
        with pytest.raises(RedisUnavailable, match="deadline"):
            await behind
        assert await line.pipeline([("ECHO", "next")], deadline_s=PATIENT_S) == [b"next"]
        assert owner.downs == []


async def test_a_call_does_not_wait_for_the_longer_deadline_ahead_of_it(server: RedisServer) -> None:
    async with line_to(server, deadline_s=0.05, breaker=Breaker(failures=1000)) as (line, _):
        bulk = line.pipeline([("DEBUG", "SLEEP", "0.3")], deadline_s=PATIENT_S)
        with pytest.raises(RedisUnavailable):
            await line.call("PING")
        assert not bulk.done()
        assert await bulk == [b"OK"]


async def test_many_calls_that_wait_for_one_short_pause_do_not_open_the_breaker(server: RedisServer) -> None:
    async with line_to(server, deadline_s=0.3, breaker=Breaker(failures=2, within_s=60)) as (line, owner):
        calls = [line.call("DEBUG", "SLEEP", "0.4")] + [line.call("PING") for _ in range(50)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, RedisUnavailable) for result in results)
        assert line.up and owner.downs == []


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_reply_that_lies_unread_while_the_event_loop_is_held_up_is_not_late(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def hold_up() -> None:
        async with redis_server() as server, line_to(server, deadline_s=0.1, breaker=Breaker(failures=1)) as (line, owner):
            call = asyncio.create_task(line.call("PING"))
            await asyncio.sleep(0.001)  # it is sent
            time.sleep(0.3)  # noqa: ASYNC251  (that is the point)
            assert await call == b"PONG"
            assert owner.downs == []

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(hold_up())


async def test_a_frozen_server_costs_a_deadline_and_then_nothing(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.redis")
    async with line_to(server, deadline_s=0.1) as (line, owner):
        server.stop()
        # none of these may wait for the server's return: it does not come back before they have all failed
        results = await asyncio.gather(*(line.call("PING") for _ in range(32)), return_exceptions=True)
        assert all(isinstance(result, RedisUnavailable) for result in results)
        await owner.down()  # without another call: the silence goes on
        assert fails_at_once(line)
        bulk = line.pipeline([("PING",)], deadline_s=60)
        assert bulk.done() and isinstance(bulk.exception(), RedisUnavailable)
        await asyncio.sleep(1.0)  # probes come and go
        assert fails_at_once(line)
        assert owner.ups == 1 and len(owner.downs) == 1
        server.cont()
        await owner.up(2)
        assert await line.pipeline([("ECHO", "back")], deadline_s=PATIENT_S) == [b"back"]
        assert len(owner.downs) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_what_is_pending_fails_when_the_breaker_opens(server: RedisServer) -> None:
    async with line_to(server, deadline_s=0.1) as (line, owner):
        server.stop()
        bulk = line.pipeline([("PING",)] * 3, deadline_s=3600)
        with pytest.raises(RedisUnavailable):
            await line.call("PING")
        await owner.down()
        with pytest.raises(RedisUnavailable):
            await bulk
        server.cont()


async def test_more_than_the_bound_is_refused_not_queued(server: RedisServer) -> None:
    async with line_to(server, max_pending_bytes=100_000) as (line, owner):
        server.stop()
        chunk = ("ECHO", b"x" * 30_000)
        sent = [line.pipeline([chunk]) for _ in range(5)]
        assert [future.done() for future in sent] == [False] * 3 + [True] * 2
        with pytest.raises(RedisUnavailable, match="pending"):
            await sent[-1]
        server.cont()
        assert [len(await future) for future in sent[:3]] == [1] * 3
        assert await line.call(*chunk) == chunk[1]  # there is room again
        assert owner.downs == []


# ---- connections come and go


async def test_a_server_that_is_not_there_yet(caplog: pytest.LogCaptureFixture, quick_retries: None) -> None:
    port = free_port()
    caplog.set_level(logging.INFO, "warmroute.redis")
    target = RedisTarget(f"redis://127.0.0.1:{port}")
    async with line_to(target, wait=False, breaker=Breaker(failures=1000)) as (line, owner):
        assert fails_at_once(line)
        await owner.down()
        await asyncio.sleep(0.1)  # many attempts
        assert len(owner.downs) == 1 and len(caplog.records) == 1
        async with redis_server(port=port):
            await owner.up()
            assert await line.call("PING") == b"PONG"


async def test_kill_and_restart_empty(server: RedisServer) -> None:
    async with line_to(server) as (line, owner):
        await line.call("SET", "k", "v")
        server.stop()
        pending = [asyncio.create_task(line.call("GET", "k")) for _ in range(5)]
        await asyncio.sleep(0)
        server.kill()
        for result in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(result, RedisUnavailable)
        await owner.down()
        assert fails_at_once(line)
        await server.restart()
        await owner.up(2)
        assert await line.call("GET", "k") is None
        assert len(owner.downs) == 1


async def test_a_master_that_became_a_replica_is_left(server: RedisServer) -> None:
    async with line_to(server) as (line, owner):
        server.admin("REPLICAOF", "127.0.0.1", free_port())
        with pytest.raises(RedisUnavailable, match="READONLY"):
            await line.call("SET", "k", "v")
        await owner.down()
        assert "READONLY" in owner.downs[0]
        server.admin("REPLICAOF", "NO", "ONE")
        await owner.up(2)
        assert await line.call("SET", "k", "v") == b"OK"


async def test_something_that_is_not_redis() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    other = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    async with other, line_to(RedisTarget(f"redis://127.0.0.1:{port}"), wait=False) as (_, owner):
        await owner.down()
        assert "protocol" in owner.downs[0].lower()


async def test_closing_fails_what_is_pending_and_tells_nobody(server: RedisServer) -> None:
    async with line_to(server) as (line, owner):
        server.stop()
        call = asyncio.create_task(line.call("PING"))
        await asyncio.sleep(0)
        await line.close()
        with pytest.raises(RedisUnavailable, match="closed"):
            await call
        assert fails_at_once(line)
        assert owner.downs == []


async def test_a_hundred_lost_connections_leave_nothing_behind(server: RedisServer, quick_retries: None) -> None:
    def residue() -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    async with line_to(server, breaker=Breaker(failures=1000)) as (line, owner):
        before = residue()
        for lost in range(1, 101):
            calls = [asyncio.create_task(line.call("ECHO", n)) for n in range(10)]
            await asyncio.sleep(0)
            for call in calls[::3]:
                call.cancel()
            server.admin("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.gather(*calls, return_exceptions=True)
            await owner.up(lost + 1)
        assert await line.call("PING") == b"PONG"
        assert len(owner.downs) == 100
        assert residue() == before
        assert str(server.admin("INFO", "clients")).count("connected_clients:2") == 1  # the line, and this question


async def test_tls(tmp_path: Path) -> None:
    certificate, key, port = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), free_port()
    subprocess.run(
        [
            *(program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    options = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(redis_server(*options))
        except AssertionError as error:
            if "tls" not in str(error) or os.environ.get("CI"):
                raise
            pytest.skip("redis-server is built without TLS")
        url = f"rediss://127.0.0.1:{port}"
        async with line_to(RedisTarget(url, ca_file=certificate, cert_file=certificate, key_file=key)) as (line, _):
            big = b"x" * 1_000_000
            assert await line.pipeline([("ECHO", big)] * 3) == [big] * 3
        async with line_to(RedisTarget(url), wait=False) as (_, owner):  # an authority it does not know
            await owner.down()
            assert "certificate" in owner.downs[0].lower() and owner.ups == 0


# ---- several servers


@pytest.mark.slow
async def test_a_sentinel_failover() -> None:
    async with sentinel_pair() as pair:
        nodes = ["127.0.0.1:1", *pair.nodes]  # the first does not answer
        target = RedisTarget("redis://ignored/0", nodes=nodes, sentinel_master=pair.MASTER)
        async with line_to(target) as (line, owner):
            await line.call("SET", "k", "before")
            pair.master.kill()
            await owner.up(2)
            assert await line.call("SET", "k", "after") == b"OK"
            assert pair.replica.admin("GET", "k") == "after"
            assert len(owner.downs) == 1


@pytest.mark.slow
async def test_a_frozen_master_is_replaced_and_not_gone_back_to() -> None:
    async with sentinel_pair() as pair:
        target = RedisTarget("redis://ignored/0", nodes=pair.nodes, sentinel_master=pair.MASTER)
        async with line_to(target, deadline_s=0.2) as (line, owner):
            pair.master.stop()
            with pytest.raises(RedisUnavailable):
                await line.call("SET", "k", "lost")
            await owner.up(2)
            pair.master.cont()
            assert await line.pipeline([("SET", "k", "kept")], deadline_s=PATIENT_S) == [b"OK"]
            assert pair.replica.admin("GET", "k") == "kept"
            assert len(owner.downs) == 1


@pytest.mark.slow
async def test_a_slot_that_moves_to_another_node() -> None:
    async with cluster() as nodes:
        key = b"{wr:pool}:1:slots"
        source = nodes.owner(key)
        to = next(node for node in nodes.nodes if node is not source)
        for node in nodes.nodes:
            node.admin(
                "ACL", "SETUSER", "gateway", "on", ">s3cret", "~{wr:*", "-@all", "+ping", "+get", "+set", "+cluster|info", "+cluster|slots"
            )
        gone = f"redis://127.0.0.1:{free_port()}"  # the first start node
        target = RedisTarget(gone, nodes=nodes.addresses, cluster=True, username="gateway", password="s3cret")
        async with line_to(target, key) as (line, owner):
            await line.call("SET", key, "v")
            nodes.migrate(key, to)
            with pytest.raises(RedisUnavailable, match="MOVED"):
                await line.call("GET", key)
            await owner.up(2)
            assert "MOVED" in owner.downs[0]
            assert await line.call("GET", key) == b"v"
            assert len(owner.downs) == 1
            to.kill()
            await owner.down(2)
            assert fails_at_once(line)


# ---- the subscriber


@asynccontextmanager
async def subscriber_of(server: RedisServer, **options: Any) -> AsyncIterator[tuple[asyncio.Queue[bytes], Owner]]:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    owner = Owner()
    subscriber = Subscriber(RedisTarget(server.url), "news", heard.put_nowait, on_up=owner.on_up, on_down=owner.on_down, **options)
    await subscriber.start()
    try:
        await owner.up()
        yield heard, owner
    finally:
        await subscriber.close()


async def test_messages_arrive_in_order_also_after_the_connection_was_lost(server: RedisServer) -> None:
    async with line_to(server) as (line, _), subscriber_of(server) as (heard, owner):
        await line.pipeline([("PUBLISH", "news", n) for n in range(3)])
        assert [await heard.get() for _ in range(3)] == [b"0", b"1", b"2"]
        server.admin("CLIENT", "KILL", "TYPE", "pubsub")
        await owner.up(2)
        await line.call("PUBLISH", "news", b"\x00\xff")
        assert await heard.get() == b"\x00\xff"
        assert len(owner.downs) == 1


@pytest.mark.slow
async def test_a_quiet_channel_is_no_outage_but_a_frozen_server_is(server: RedisServer) -> None:
    async with subscriber_of(server, silence_s=0.6) as (heard, owner):
        await asyncio.sleep(1.5)
        assert owner.downs == []
        server.stop()
        await owner.down()
        server.cont()
        await owner.up(2)
        server.admin("PUBLISH", "news", "again")
        assert await heard.get() == b"again"


async def test_a_message_that_its_reader_cannot_use_does_not_end_the_subscription(server: RedisServer) -> None:
    heard: asyncio.Queue[int] = asyncio.Queue()
    owner = Owner()
    subscriber = Subscriber(RedisTarget(server.url), b"news", lambda message: heard.put_nowait(int(message)), on_up=owner.on_up)
    await subscriber.start()
    await owner.up()
    for message in ("not a number", "5"):
        server.admin("PUBLISH", "news", message)
    assert await heard.get() == 5
    await subscriber.close()
