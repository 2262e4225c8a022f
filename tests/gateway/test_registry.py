"""Workers that register themselves: from an engine's health to a gateway's fleet, over a real Redis; and entries that are not genuine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tiny_tokenizer import write_model
from gateway import agent as agent_module
from gateway import registry as registry_module
from gateway.agent import Agent, Registration
from gateway.allowed_urls import AllowedURLs, NotAllowed
from gateway.cli import main
from gateway.config import ConfigError, RedisConfig, load
from gateway.dialects import CHAT
from gateway.registry import Registry, registry_line
from gateway.sharing import redis_target
from gateway.token_mode import TokenMode
from gateway.worker_entries import (
    LIST,
    MOST_BYTES,
    REGISTER,
    RUN_BYTES,
    Beat,
    Entry,
    EntryRefused,
    Seal,
    entry_key,
    packed,
    set_key,
    unpacked,
)
from kvindex.chain import use_pool_secret
from kvindex.redis_index import key_prefix
from loadgen.local import Program
from tests.gateway.test_kv_events import BLOCK, LONG, Engine, body, chosen
from tests.redis_server import RedisServer, redis_server
from tests.stack import ScriptedWorker, Stack, WorkerRequest, config, running, soon, until
from workers.profile import WorkerProfile

SECRET = "registry-secret-0123456789"
PREFIX = key_prefix("default")
RUN = b"r" * RUN_BYTES


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WARMROUTE_REGISTRY_SECRET", SECRET)
    monkeypatch.setenv("WARMROUTE_POOL_SECRET", "pool-secret-0123456789")
    yield
    use_pool_secret("")


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats and leases that a test need not wait for so long."""
    for module in (agent_module, registry_module):
        monkeypatch.setattr(module, "BEAT_S", 0.1)
        monkeypatch.setattr(module, "LEASE_S", 2.0)


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


async def answer(request: WorkerRequest) -> None:
    request.respond(b'{"choices":[{"message":{"role":"assistant","content":"x"}}],"usage":{"prompt_tokens":20,"completion_tokens":1}}')


def settings(redis: RedisServer, *urls: str, allow: tuple[str, ...] = ("127.0.0.0/8",), **sections: Any) -> Any:
    registry = {"enabled": True, "allow": list(allow), **sections.pop("registry", {})}
    return config(*urls, index={"backend": "redis", "redis": {"url": redis.url}}, registry=registry, **sections)


class RunningAgent:
    """An agent in this process."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(agent.run(self._stop))

    async def stop(self) -> None:
        """As SIGTERM does."""
        self._stop.set()
        await soon(self._task, "the agent's end")

    async def crash(self) -> None:
        """End it without a goodbye."""
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def agent(redis: RedisServer, url: str, **changes: Any) -> AsyncIterator[RunningAgent]:
    """Registers the worker at `url`."""
    registration = Registration(url.split("://")[1], url, url, WorkerProfile(), kv_events="off")
    started = RunningAgent(Agent(replace(registration, **changes), RedisConfig(url=redis.url), Seal(SECRET, "default")))
    try:
        yield started
    finally:
        await started.crash()


def up(stack: Stack) -> set[str]:
    return {worker_id for worker_id, worker in stack.router.workers.items() if worker.up}


def registry(stack: Stack) -> Registry:
    found = stack.gateway.fleet.registry
    assert found is not None
    return found


async def looks(stack: Stack, count: int) -> None:
    """Return once the registry has been read so many times more."""
    for _ in range(count):
        looked = registry(stack)._looked_at
        await until(lambda seen=looked: registry(stack)._looked_at != seen, "a look")  # type: ignore[misc]


async def ask(stack: Stack) -> str:
    response = await stack.post(CHAT.path, body("hello"))
    assert response.status_code == 200, response.text
    return str(response.headers["x-warmroute-worker"])


# --- coming and going ---


@pytest.mark.usefixtures("quickly")
async def test_a_registered_worker_serves_and_leaves_with_its_agent(redis: RedisServer) -> None:
    engine = ScriptedWorker(answer, metrics="vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n")
    async with engine, running(settings(redis)) as first, running(settings(redis)) as second:
        assert (await first.post(CHAT.path, body("hello"))).status_code == 503
        async with agent(redis, engine.url, profile=WorkerProfile(tp=2, max_num_seqs=7)) as running_agent:
            for gateway in (first, second):
                await until(lambda g=gateway: up(g) == {engine.id}, "the worker")  # type: ignore[misc]
                assert await ask(gateway) == engine.id
                worker = gateway.router.workers[engine.id]
                assert (worker.profile.tp, worker.slots, worker.profile.engine) == (2, 7, "vllm")
                await until(lambda w=worker: (w.scraped_running, w.scraped_waiting) == (3.0, 2.0), "its load")  # type: ignore[misc]
            await running_agent.stop()
            for gateway in (first, second):
                await until(lambda g=gateway: not up(g), "its leaving")  # type: ignore[misc]
                assert (await gateway.post(CHAT.path, body("hello"))).status_code == 503
    assert redis.admin("EXISTS", set_key(PREFIX), entry_key(PREFIX, engine.id)) == 0


@pytest.mark.usefixtures("quickly")
async def test_the_entry_goes_with_the_engine_and_comes_back_with_it(redis: RedisServer) -> None:
    engine = ScriptedWorker(answer)
    async with engine, running(settings(redis)) as stack, agent(redis, engine.url) as running_agent:
        await until(lambda: up(stack) == {engine.id}, "the worker")
        await engine.stop()
        await until(lambda: not running_agent.agent.registered and not registry(stack).members, "the entry's end")
        assert redis.admin("EXISTS", entry_key(PREFIX, engine.id)) == 0
        await engine.start()
        await until(lambda: up(stack) == {engine.id}, "its return")
        assert await ask(stack) == engine.id


@pytest.mark.usefixtures("quickly")
async def test_an_agent_waits_for_its_engine(redis: RedisServer) -> None:
    engine = ScriptedWorker(answer)
    engine.healthy = False
    async with engine, running(settings(redis)) as stack, agent(redis, engine.url):
        await until(lambda: engine.probes > 3, "probes")
        assert redis.admin("EXISTS", set_key(PREFIX)) == 0
        engine.healthy = True
        await until(lambda: up(stack) == {engine.id}, "the worker")


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
async def test_requests_in_flight_outlive_the_lease_and_new_ones_go_elsewhere(redis: RedisServer) -> None:
    async def begin(request: WorkerRequest) -> None:
        request.start_stream()
        request.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')

    leaving, staying = ScriptedWorker(begin), ScriptedWorker(answer)
    async with leaving, staying, running(settings(redis)) as stack, agent(redis, leaving.url) as running_agent:
        await until(lambda: up(stack) == {leaving.id}, "the worker")
        client = await stack.connect()
        client.send(CHAT.path, body("hello") | {"stream": True})
        request = await leaving.until_requests(1)
        await client.until_contains(b'"a"')
        async with agent(redis, staying.url):
            await until(lambda: up(stack) == {leaving.id, staying.id}, "the other worker")
            await running_agent.crash()
            await until(lambda: up(stack) == {staying.id}, "the end of its lease")
            assert await ask(stack) == staying.id
            registry(stack)._forget(leaving.id)  # as if it had been away for long
            assert list(stack.router.workers) == [staying.id]
            request.chunk(b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n')
            request.chunk(b"data: [DONE]\n\n")
            request.end()
            await client.until_contains(b"[DONE]")
            await stack.until_idle()
        await client.close()


@pytest.mark.usefixtures("quickly")
async def test_what_is_known_of_a_worker_outlives_a_restart_of_its_agent(redis: RedisServer) -> None:
    engine = ScriptedWorker(answer)
    async with engine, running(settings(redis)) as stack:
        async with agent(redis, engine.url) as running_agent:
            await until(lambda: up(stack) == {engine.id}, "the worker")
            worker = stack.router.workers[engine.id]
            await running_agent.stop()
            await until(lambda: not up(stack), "its leaving")
        async with agent(redis, engine.url):
            await until(lambda: up(stack) == {engine.id}, "its return")
            assert stack.router.workers[engine.id] is worker


@pytest.mark.usefixtures("quickly")
async def test_a_worker_that_stays_away_is_forgotten_and_one_of_its_name_elsewhere_is_another(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = ScriptedWorker(answer), ScriptedWorker(answer)
    async with engine, other, running(settings(redis)) as stack:
        async with agent(redis, engine.url, id="a") as running_agent:
            await until(lambda: up(stack) == {"a"}, "the worker")
            await running_agent.stop()
        async with agent(redis, other.url, id="a") as running_agent:
            endpoints = stack.gateway.fleet.endpoints
            await until(lambda: up(stack) == {"a"} and endpoints["a"].url == other.url, "the other worker")
            assert await ask(stack) == "a" and len(other.requests) == 1
            await running_agent.stop()
        monkeypatch.setattr(registry_module, "LINGER_S", 0.0)
        await until(lambda: not stack.router.workers, "its end")
        assert (await stack.client.get("/admin/workers")).json() == {}


@pytest.mark.usefixtures("quickly")
async def test_a_redis_that_lost_its_data_takes_no_worker_away(redis: RedisServer) -> None:
    engine = ScriptedWorker(answer)
    async with engine, running(settings(redis)) as stack, agent(redis, engine.url) as running_agent:
        await until(lambda: up(stack) == {engine.id}, "the worker")
        downs = []
        stack.gateway.fleet.leave = downs.append  # type: ignore[method-assign]
        redis.kill()
        await until(lambda: not running_agent.agent.registered, "notice")
        assert await ask(stack) == engine.id
        await redis.restart()
        await until(lambda: running_agent.agent.registered, "its registration")
        await looks(stack, 2)
        assert await ask(stack) == engine.id and not downs


@pytest.mark.usefixtures("quickly")
async def test_two_agents_of_one_name_do_not_alternate(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    engine, other = ScriptedWorker(answer), ScriptedWorker(answer)
    async with engine, other, running(settings(redis)) as stack, agent(redis, engine.url, id="a") as first:
        await until(lambda: up(stack) == {"a"}, "the worker")
        async with agent(redis, other.url, id="a") as second:
            await until(lambda: "another agent" in caplog.text, "a warning")
            assert not second.agent.registered and stack.gateway.fleet.endpoints["a"].url == engine.url
            await second.stop()
            assert redis.admin("EXISTS", entry_key(PREFIX, "a")) == 1
            assert first.agent.registered


@pytest.mark.slow
async def test_an_agent_of_its_own_process_is_gone_within_its_lease_or_at_once(redis: RedisServer, tmp_path: Path) -> None:
    engine = ScriptedWorker(answer)
    async with engine, running(settings(redis)) as stack:
        command = [sys.executable, "-m", "gateway.cli", "worker", "agent", "--worker", engine.url, "--redis", redis.url, "--name", "a"]
        for number in (signal.SIGKILL, signal.SIGTERM):
            program = Program("agent", [*command, "--no-events"], tmp_path / f"{number}.log")
            try:
                await until(lambda: up(stack) == {"a"}, "the worker")
                os.kill(program.pid, number)
                await until(lambda: not up(stack), "its end")
                status = await asyncio.to_thread(program.wait)
            finally:
                program.stop()
            assert status == (-signal.SIGKILL if number == signal.SIGKILL else 0), program.tail()
            assert "is no longer registered" in program.tail() or number == signal.SIGKILL


# --- KV events ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen")


async def test_an_engine_without_events_is_registered_all_the_same(redis: RedisServer) -> None:
    async with ScriptedWorker(answer) as engine, running(settings(redis)) as stack, agent(redis, engine.url, kv_events="auto"):
        await until(lambda: up(stack) == {engine.id}, "the worker")


@pytest.mark.slow
@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("ranks", [1, 2])
async def test_events_that_the_agent_follows_make_a_gateways_prediction_exact(redis: RedisServer, model: Path, ranks: int) -> None:
    use_pool_secret(os.environ["WARMROUTE_POOL_SECRET"])
    Engine.tokens = TokenMode(model, BLOCK)
    engine, cold = Engine(ranks), ScriptedWorker(answer)
    models = [{"name": "m", "tokenizer": str(model), "block_tokens": BLOCK}]
    async with engine, cold, running(settings(redis, cold.url, models=models)) as stack:
        await engine.stores(LONG, rank=ranks - 1, sent=False)
        async with agent(redis, engine.url, kv_events="auto"):
            names = {engine.id} if ranks == 1 else {f"{engine.id}#0", f"{engine.id}#1"}
            await until(lambda: up(stack) == {cold.id, *names}, "the worker")
            warm = sorted(names)[-1]
            engine.cached = Engine.tokens.prompt(CHAT, body(LONG)).tokens // BLOCK * BLOCK  # type: ignore[union-attr]
            assert await chosen(stack, LONG) == (warm, engine.cached)
            assert stack.router.workers[warm].trust.level == "exact"
            assert not stack.gateway.fleet.feeds
            other = "class A:\n    pass\n" * 2000  # long enough to go where it is, though a session lives there
            await engine.stores(other, rank=ranks - 1)
            hashes = Engine.tokens.prompt(CHAT, body(other)).chain.hashes  # type: ignore[union-attr]
            index = stack.gateway.fleet.sharing.index  # type: ignore[union-attr]

            async def known() -> None:
                while max((await index.lookup(hashes) or {"": 0}).values()) < len(hashes) - 1:
                    await asyncio.sleep(0.01)

            await soon(known(), "what it stored since")
            worker, cached = await chosen(stack, other)
            assert (worker, cached) == (warm, len(hashes) * BLOCK)
            # without its publisher the agent cannot know any more
            await engine.publishers[ranks - 1].close()
            await until(lambda: stack.router.workers[warm].trust.level == "memory", "doubt")


# --- entries that are not genuine ---


def entry(worker_id: str, url: str, **fields: Any) -> Entry:
    return Entry(id=worker_id, url=url, models=["m"], profile=WorkerProfile(), **fields)


def stored(worker: Entry, *, age_s: float = 0.0, secret: str = SECRET, pool: str = "default") -> bytes:
    return Seal(secret, pool).sign(RUN, packed(worker), Beat(at=time.time() - age_s))


def put(redis: RedisServer, worker_id: str, value: bytes) -> None:
    redis.admin("SADD", set_key(PREFIX), worker_id)
    redis.admin("SET", entry_key(PREFIX, worker_id), value)  # type: ignore[arg-type]


def _unlike(worker: Entry, **changes: Any) -> bytes:
    """Signed, but not what `Entry` would take."""
    line = orjson.dumps({**orjson.loads(packed(worker)), **changes})
    return Seal(SECRET, "default").sign(RUN, line, Beat(at=time.time()))


@pytest.mark.usefixtures("quickly")
async def test_what_is_not_genuine_or_not_allowed_is_refused_and_said_once(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmroute.registry")

    async def redirect(request: WorkerRequest) -> None:
        request.respond(b"", 302, b"location: http://127.0.0.1:1/\r\n")

    engine, configured = ScriptedWorker(answer), ScriptedWorker(answer)
    async with engine, configured:
        url = engine.url
        good = entry("good", url)
        bad: dict[str, tuple[bytes, str]] = {
            "forged": (stored(entry("forged", url), secret="another-secret-0123456789"), "signature"),
            "other-pool": (stored(entry("other-pool", url), pool="other"), "signature"),
            "altered": (stored(entry("altered", url)).replace(b'"m"', b'"n"'), "signature"),
            "stolen-run": (b"x" * RUN_BYTES + stored(entry("stolen-run", url))[RUN_BYTES:], "signature"),
            "replayed": (stored(entry("replayed", url), age_s=31.0), "more than 30 s ago"),
            "from-the-future": (stored(entry("from-the-future", url), age_s=-31.0), "more than 30 s ago"),
            "junk": (b"\xff\x00junk", "signature"),
            "large": (b"x" * (MOST_BYTES + 1), "more than 8192 bytes"),
            "renamed": (stored(good), "that of another worker"),
            configured.id: (stored(entry(configured.id, url)), "configuration"),
            "same-place": (stored(entry("same-place", configured.url)), "configuration"),
            "outside": (stored(entry("outside", "http://10.0.0.1:8000")), "not within registry.allow"),
            "metadata": (stored(entry("metadata", "http://169.254.169.254")), "never allowed"),
            "ftp": (_unlike(entry("ftp", url), url="ftp://127.0.0.1/"), "http(s)"),
            "credentials": (_unlike(entry("credentials", url), url="http://me:pw-123@127.0.0.1:1"), "credentials"),
            "smuggling": (_unlike(entry("smuggling", url), url="http://127.0.0.1:1/ HTTP/1.1\r\nx:"), "http(s)"),
            "a@b": (_unlike(entry("ab", url), id="a@b"), "letters"),
            "kv:a": (_unlike(entry("ab", url), id="kv:a"), "letters"),
            "odd-profile": (_unlike(entry("odd-profile", url), profile={"latency": "warp"}), "cannot be read"),
        }
        for worker_id, (value, _) in bad.items():
            put(redis, worker_id, value)
        async with running(settings(redis, configured.url, allow=("127.0.0.1", "198.51.100.0/24"))) as stack:
            put(redis, "good", stored(good))
            await until(lambda: up(stack) == {configured.id, "good"}, "the good one")
            await looks(stack, 3)
            assert set(stack.router.workers) == {configured.id, "good"}
            refusals = [r.getMessage() for r in caplog.records if r.name == "warmroute.registry" and r.levelno == logging.WARNING]
            for worker_id, (_, says) in bad.items():
                said = [text for text in refusals if f"{worker_id!r} is not used" in text]
                assert len(said) == 1 and says in said[0], (worker_id, said)
            assert SECRET not in caplog.text and "pw-123" not in caplog.text
            # one that was good and is no longer
            put(redis, "good", b"junk")
            await until(lambda: up(stack) == {configured.id}, "its end")
            # a redirect is no answer that is followed
            engine.script = redirect
            put(redis, "good", stored(good))
            await until(lambda: up(stack) == {configured.id, "good"}, "its return")
            configured.healthy = False
            await until(lambda: up(stack) == {"good"}, "the other's end")
            assert (await stack.post(CHAT.path, body("hello"))).status_code == 302


@pytest.mark.usefixtures("quickly")
async def test_two_names_for_one_address_are_one_worker(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedWorker(answer)
    async with engine, running(settings(redis)) as stack, agent(redis, engine.url, id="a"):
        await until(lambda: up(stack) == {"a"}, "the worker")
        async with agent(redis, engine.url, id="b"):
            await until(lambda: "that of the registered worker a" in caplog.text, "a refusal")
            assert set(stack.router.workers) == {"a"}


async def test_without_the_setting_the_registry_is_not_read(redis: RedisServer) -> None:
    engine = ScriptedWorker(answer)
    async with engine:
        put(redis, "a", stored(entry("a", engine.url)))
        async with running(config(index={"backend": "redis", "redis": {"url": redis.url}})) as stack:
            assert stack.gateway.fleet.registry is None and not stack.router.workers


@given(st.binary(max_size=200))
def test_no_bytes_but_a_signed_entry_are_taken(data: bytes) -> None:
    with pytest.raises(EntryRefused):
        Seal(SECRET, "default").open(data, time.time())


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_breaks_the_signature(at: int, by: int) -> None:
    value = bytearray(stored(entry("a", "http://a:1")))
    value[at % len(value)] ^= by
    with pytest.raises(EntryRefused, match="signature"):
        Seal(SECRET, "default").open(bytes(value), time.time())


def test_an_entry_says_what_was_stated_and_leaves_the_rest_to_its_defaults() -> None:
    worker = Entry(id="a", url="http://[::1]:8000/v", models=["m"], profile=WorkerProfile(tp=2, latency="gpt-oss-120b-h200"), ranks=2)
    line, _ = Seal(SECRET, "default").open(stored(worker), time.time())
    read = unpacked(line, "a")
    assert read == worker and read.profile.model_fields_set == {"tp", "latency"}


# --- where workers may be ---


async def placed(allow: list[str], url: str, resolved: str | None = None) -> str | None:
    """The URL that is used, None where it is not allowed. Names resolve to `resolved`."""
    loop = asyncio.get_running_loop()

    async def getaddrinfo(host: str, port: int | None, **_: Any) -> list[Any]:
        assert resolved is not None
        return [(2, 1, 6, "", (address, port)) for address in resolved.split()]

    loop.getaddrinfo, before = getaddrinfo, loop.getaddrinfo  # type: ignore[method-assign,assignment]
    try:
        return await AllowedURLs(allow).place(url)
    except NotAllowed:
        return None
    finally:
        loop.getaddrinfo = before  # type: ignore[method-assign]


async def test_addresses_and_names_are_checked_and_http_goes_to_the_address_that_was() -> None:
    net = ["10.0.0.0/8"]
    assert await placed(net, "http://10.1.2.3:8000/v") == "http://10.1.2.3:8000/v"
    assert await placed(net, "http://11.1.2.3:8000") is None
    assert await placed(net, "http://[::ffff:10.1.2.3]:8000") is not None
    assert await placed(net, "http://gpu1:8000/v", "10.0.0.1") == "http://10.0.0.1:8000/v"
    assert await placed(net, "https://gpu1:8000", "10.0.0.1") == "https://gpu1:8000"
    assert await placed(net, "http://gpu1:8000", "10.0.0.1 192.168.0.1") is None
    assert await placed(net, "http://2130706433:8000", "127.0.0.1") is None
    domain = [".gpu.internal"]
    assert await placed(domain, "http://a.gpu.internal", "192.168.0.1") == "http://192.168.0.1"
    assert await placed(domain, "http://A.GPU.internal.", "fd00::1") == "http://[fd00::1]"
    assert await placed(domain, "http://agpu.internal") is None
    assert await placed(domain, "http://a.gpu.internal", "127.0.0.1") is None
    assert await placed([*domain, "127.0.0.1"], "http://a.gpu.internal", "127.0.0.1") == "http://127.0.0.1"
    assert await placed(domain, "http://192.168.0.1") is None


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "169.254.1.1", "100.100.100.200", "168.63.129.16", "fe80::1", "fd00:ec2::254", "::ffff:169.254.169.254",
     "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "0.0.0.0", "::", "224.0.0.1"],
)  # fmt: skip
async def test_some_addresses_are_never_allowed(address: str) -> None:
    everything = ["0.0.0.0/0", "::/0", "gpu.internal"]
    assert await placed(everything, f"http://[{address}]:80" if ":" in address else f"http://{address}:80") is None
    assert await placed(everything, "http://gpu.internal:80", address) is None


@pytest.mark.parametrize("item", ["10.0.0.1/8", "300.1.1.1", "*", "http://gpu1", "a b", ""])
def test_what_is_neither_network_nor_domain_is_no_rule(item: str) -> None:
    with pytest.raises(ValueError, match="network"):
        AllowedURLs([item])


# --- configuration, and what Redis must permit ---


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("registry: {enabled: true}\nindex: {backend: redis}\n", "needs 'allow'"),
        ("registry: {enabled: true, allow: [10.0.0.0/8]}\n", "index.backend redis"),
        ("registry: {enabled: true, allow: ['*']}\nindex: {backend: redis}\n", "neither a network"),
        ("registry: {enable: true}\n", "did you mean 'enabled'"),
    ],
)
def test_faults_of_the_section_are_told(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(file)


@pytest.mark.parametrize(
    ("arguments", "unset", "says"),
    [
        ([], "WARMROUTE_REGISTRY_SECRET", "openssl rand"),
        ([], "WARMROUTE_POOL_SECRET", "--no-events"),
        (["--name", "a b"], "", "letters"),
        (["--advertise", "http://me:pw@gpu:1"], "", "credentials"),
        (["--profile", "tpp=2"], "", "KEY=VALUE"),
        (["--profile", "tp=x"], "", "--profile tp"),
        (["--redis", "http://x"], "", "--redis"),
    ],
)
def test_the_command_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, arguments: list[str], unset: str, says: str) -> None:
    if unset:
        monkeypatch.delenv(unset)
    result = CliRunner().invoke(main, ["worker", "agent", "--worker", "http://127.0.0.1:1", *arguments])
    assert result.exit_code == 2 and says in result.output


# of an agent that follows no KV events, and of a gateway for the registry, beside what it needs for all else
COMMANDS = ["ping", "evalsha", "eval", "get", "set", "del", "strlen", "getrange", "sadd", "srem", "scard", "sismember", "smembers"]


@pytest.mark.usefixtures("quickly")
async def test_the_registry_needs_these_commands_and_no_others(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_REDIS_PASSWORD", "pw")
    redis.admin("ACL", "SETUSER", "agent", "on", ">pw", "~{wr:default}:1:W*", "-@all", *(f"+{command}" for command in COMMANDS))
    limited = RedisConfig(url=redis.url.replace("redis://", "redis://agent@"), password_env="AGENT_REDIS_PASSWORD")
    redis.admin("SADD", set_key(PREFIX), "gone")
    engine = ScriptedWorker(answer)
    registration = Registration("a", engine.url, engine.url, WorkerProfile(), kv_events="off")
    line = registry_line(redis_target(limited), PREFIX, lambda: None)
    async with engine:
        registration.url = registration.advertise = engine.url
        running_agent = RunningAgent(Agent(registration, limited, Seal(SECRET, "default")))
        await until(lambda: running_agent.agent.registered, "the registration")
        await line.start()
        await until(lambda: line.up, "the line")
        assert [len(part) > 0 for part in await line.run(LIST, [set_key(PREFIX)], [10, MOST_BYTES])] == [True, True]
        redis.admin("SADD", set_key(PREFIX), "gone")
        full = [set_key(PREFIX), entry_key(PREFIX, "b")]
        assert await line.run(REGISTER, full, ["b", stored(entry("b", engine.url)), 1000, 1]) == -1
        await running_agent.stop()
        await line.close()
    assert redis.admin("KEYS", "*") == []
    assert redis.admin("ACL", "LOG") == []
