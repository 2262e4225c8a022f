"""Several gateways over one pool of workers and one Redis: what one knows the others use, and none of them needs Redis to serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis import Redis

from benchmarks.tiny_tokenizer import write_model
from gateway.dialects import CHAT
from gateway.sharing import Sharing
from gateway.token_mode import TokenMode
from kvindex.chain import use_pool_secret
from routing.policies import Terms
from tests.gateway.test_kv_events import BLOCK, LONG, Engine, body
from tests.redis_server import RedisServer, redis_server
from tests.stack import ScriptedWorker, Stack, WorkerRequest, config, running, soon, until

SECRET = "0123456789abcdef-test"
CODE = "def f(x):\n    return x + 1\n" * 300  # 8 KB, some 16 blocks


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WARMROUTE_POOL_SECRET", SECRET)
    yield
    use_pool_secret("")  # of this process: other tests' chains need not be keyed, but must not change in their middle


PATIENT_MS = 2000  # a deadline that a working server on a busy machine keeps


def shared(redis: RedisServer, **settings: Any) -> dict[str, Any]:
    return {"backend": "redis", "redis": {"url": redis.url, **settings}}


async def quick(request: WorkerRequest) -> None:
    usage = {"prompt_tokens": 2000, "completion_tokens": 1}
    request.respond(orjson.dumps({"choices": [{"message": {"role": "assistant", "content": "x"}}], "usage": usage}))


@asynccontextmanager
async def pool(redis: RedisServer, gateways: int = 2, *workers: ScriptedWorker, **sections: Any) -> AsyncIterator[list[Stack]]:
    """Gateways that share, over the same workers, each with the others in sight."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        settings = config(*(w.url for w in workers), **{"index": shared(redis), **sections})
        started = [await stack.enter_async_context(running(settings)) for _ in range(gateways)]
        await together(*started)
        yield started


def sharing(gateway: Stack) -> Sharing:
    assert gateway.gateway.fleet.sharing is not None
    return gateway.gateway.fleet.sharing


async def together(*gateways: Stack) -> None:
    """Return once all have their index in Redis and have heard of each other."""
    for gateway in gateways:
        part = sharing(gateway)
        await until(lambda p=part: p.index.synced and not p.degraded and len(p.others) == len(gateways) - 1, "a gateway's part")  # type: ignore[misc]


def chat(text: str, *more: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": CODE}, {"role": "user", "content": text}]
    for number, said in enumerate(more):
        messages.append({"role": ("assistant", "user")[number % 2], "content": said})
    return {"model": "m", "messages": messages, "max_tokens": 5}


async def ask(gateway: Stack, request: dict[str, Any], session: str | None = None) -> str:
    """The worker that answered."""
    response = await gateway.post(CHAT.path, request, {"x-session-id": session} if session else {})
    assert response.status_code == 200, response.text
    return str(response.headers["x-warmroute-worker"])


async def written(*gateways: Stack) -> None:
    for gateway in gateways:
        await soon(sharing(gateway).index.flush(), "what is written behind")


# --- what is shared ---


async def test_a_session_is_at_home_on_one_worker_whichever_gateway_its_turns_come_through(redis: RedisServer) -> None:
    workers = [ScriptedWorker(quick) for _ in range(4)]
    async with pool(redis, 3, *workers, index=shared(redis, deadline_ms=PATIENT_MS)) as gateways:
        for number in range(12):
            said: list[str] = []
            placed = set()
            for turn in range(6):
                gateway = gateways[(number + turn) % 3]
                placed.add(await ask(gateway, chat(f"task {number}", *said), f"s{number}"))
                await written(gateway)
                said += [f"answer {turn} " * 50, f"question {turn} " * 50]
            assert len(placed) == 1, placed
        routers = [gateway.router for gateway in gateways]
        await until(lambda: sum(w.live_sessions for r in routers for w in r.workers.values()) == 12, "each session counted once")


async def test_a_prefix_that_another_gateway_made_warm_attracts_a_session_without_a_key(redis: RedisServer) -> None:
    workers = [ScriptedWorker(quick) for _ in range(4)]
    async with pool(redis, 2, *workers) as (first, second):
        warm = [await ask(first, chat(f"task {number}", "an answer " * 400, "more")) for number in range(4)]
        await written(first)
        again = [await ask(second, chat(f"task {number}", "an answer " * 400, "more", "yes", "and now")) for number in range(4)]
        assert again == warm


async def test_load_that_another_gateway_has_placed_counts_within_moments(redis: RedisServer) -> None:
    release = asyncio.Event()

    async def slow(request: WorkerRequest) -> None:
        await release.wait()
        await quick(request)

    async with pool(redis, 2, ScriptedWorker(slow), ScriptedWorker(slow)) as (first, second):
        waiting = [asyncio.ensure_future(ask(first, chat("a long one " * 2000)))]
        await until(lambda: any(w.others_prefilling for w in second.router.workers.values()), "the other's load")
        waiting.append(asyncio.ensure_future(ask(second, chat("another long one " * 2000))))
        await until(lambda: all(w.prefilling or w.others_prefilling for w in second.router.workers.values()), "a place")
        release.set()
        placed = await asyncio.gather(*waiting)
        assert placed[0] != placed[1]
        await until(lambda: not any(w.others_in_flight for g in (first, second) for w in g.router.workers.values()), "no load")


@pytest.mark.slow
async def test_the_load_of_a_gateway_that_died_is_gone_within_seconds(redis: RedisServer) -> None:
    release = asyncio.Event()

    async def slow(request: WorkerRequest) -> None:
        await release.wait()
        await quick(request)

    async with pool(redis, 2, ScriptedWorker(slow)) as (first, second):
        waiting = asyncio.ensure_future(ask(first, chat("a long one")))
        worker = next(iter(second.router.workers.values()))
        await until(lambda: worker.others_in_flight == 1, "the other's load")
        part = sharing(first)
        for task in part._tasks:  # it says nothing more, not even goodbye
            task.cancel()
        part._line.up = False
        await until(lambda: worker.others_in_flight == 0 and not len(sharing(second).others), "its end")
        release.set()
        await waiting


async def test_a_stored_response_is_continued_where_it_is(redis: RedisServer) -> None:
    async def responses(request: WorkerRequest) -> None:
        given = request.json.get("previous_response_id") or f"resp_{request.connection.worker.id.replace(':', '_').replace('.', '_')}"
        request.respond(orjson.dumps({"id": given, "object": "response", "status": "completed", "output": []}))

    async with pool(redis, 2, *(ScriptedWorker(responses) for _ in range(4))) as (first, second):
        for number in range(8):
            answer = await first.post("/v1/responses", {"model": "m", "input": f"number {number} " * 300})
            await written(first)
            follow = {"model": "m", "input": "go on", "previous_response_id": answer.json()["id"]}
            for gateway in (second, first):
                followed = await gateway.post("/v1/responses", follow)
                assert followed.headers["x-warmroute-worker"] == answer.headers["x-warmroute-worker"]


@pytest.mark.slow
async def test_the_policy_is_the_pools(redis: RedisServer) -> None:
    async with pool(redis, 2, ScriptedWorker(quick)) as (first, second):
        assert (await first.client.put("/admin/policy", json={"policy": "least-loaded"})).status_code == 200
        await until(lambda: second.router.policy.name == "least-loaded", "the policy")
        settings = config(*(e.url for e in first.gateway.fleet.endpoints.values()), index=shared(redis))
        async with running(settings) as third:
            await until(lambda: third.router.policy.name == "least-loaded", "the policy on a gateway that came later")
        redis.kill()  # set while it is away, the policy is told when it is back, though it has lost what it had
        await until(lambda: sharing(first).degraded, "the loss")
        assert (await first.client.put("/admin/policy", json={"policy": "random"})).status_code == 200
        await redis.restart()
        await until(lambda: second.router.policy.name == "random", "the policy")
        redis.kill()
        await until(lambda: sharing(first).degraded and sharing(second).degraded, "the loss")
        await redis.restart()
        await together(first, second)
        await until(lambda: redis.admin("GET", "{wr:default}:1:P") == "random", "the policy in a Redis that had lost it")


async def test_no_text_and_no_guessable_hash_of_it_reaches_redis(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []
    for secret in ("a secret of this pool", "a secret of another pool"):
        monkeypatch.setenv("WARMROUTE_POOL_SECRET", secret)
        async with pool(redis, 1, ScriptedWorker(quick)) as (gateway,):
            await ask(gateway, chat("my password is hunter2"), "session-of-alice")
            await written(gateway)
            with Redis(port=redis.port) as admin:
                dump = b"".join(key + admin.dump(key) for key in admin.scan_iter())
            assert dump
            assert b"hunter2" not in dump and b"alice" not in dump and b"return x" not in dump and secret.encode() not in dump
            hashes = {h for blocks in gateway.router.memory._workers.values() for s in blocks._by_first.values() for h in s.blocks}
            stored.append(hashes)
    assert stored[0] and not stored[0] & stored[1]


# --- events ---


async def believed(gateway: Stack, worker: str) -> float:
    """Tokens of a request's prompt that the gateway takes the worker to hold."""
    decisions = []
    decide = gateway.router.decide
    gateway.router.decide = lambda *a, **k: decisions.append(decide(*a, **k)) or decisions[-1]  # type: ignore[method-assign,func-returns-value]
    assert (await gateway.post(CHAT.path, body(LONG))).status_code == 200
    gateway.router.decide = decide  # type: ignore[method-assign]
    weighed = {terms.worker.id: terms.cached for terms in (Terms(*entry) for entry in decisions[-1].candidates) if terms.worker}
    return weighed[worker]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen")


@pytest.mark.slow
async def test_one_gateway_follows_an_engines_events_all_know_what_they_say_and_another_takes_over(redis: RedisServer, model: Path) -> None:
    use_pool_secret(SECRET)  # as the gateways do
    Engine.tokens = TokenMode(model, BLOCK)
    engines = [Engine() for _ in range(2)]
    sections = {"models": [{"name": "m", "tokenizer": str(model)}], "index": shared(redis)}
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        await engines[1].stores(LONG)
        settings = config(*(e.url for e in engines), **sections)
        gateways = [await stack.enter_async_context(running(settings)) for _ in range(2)]

        def settled(*living: Stack) -> bool:
            """Each engine is followed by the one gateway that is to follow it."""
            followed = [(g, e.id) for g in living for e in engines if e.id in g.gateway.fleet.feeds]
            return len(followed) == len(engines) and all(sharing(g)._is_mine(worker) for g, worker in followed)

        await together(*gateways)
        await until(lambda: settled(*gateways), "one follower each")
        feeds = [feed for g in gateways for feed in g.gateway.fleet.feeds.values() if feed.worker.id == engines[1].id]
        await until(lambda: feeds[0].blocks.blocks > 50, "the events")
        await written(*gateways)
        for gateway in gateways:
            assert await believed(gateway, engines[1].id) > 4000
        async with running(settings) as third:
            await together(*gateways, third)
            await until(lambda: settled(*gateways, third), "one follower each of three")
        await until(lambda: settled(*gateways), "takeover")


# --- when Redis is away ---


async def test_requests_go_on_while_redis_is_frozen_and_the_index_is_whole_again_after_it(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [ScriptedWorker(quick) for _ in range(2)]
    async with pool(redis, 2, *workers) as (first, second):
        home = await ask(first, chat("task"), "s")
        await written(first)
        assert await ask(second, chat("task"), "s") == home
        with caplog.at_level(logging.WARNING):
            redis.stop()
            said: list[str] = []
            for turn in range(20):
                said += [f"answer {turn} " * 30, f"question {turn}"]
                assert await ask((first, second)[turn % 2], chat("task", *said), "s") == home
            await until(lambda: sharing(first).degraded and sharing(second).degraded, "the breaker")
            assert b"warmroute_redis_degraded 1.0" in (await first.client.get("/metrics")).content
            assert len([r for r in caplog.records if r.name == "warmroute.redis" and "going on without" in r.getMessage()]) <= 6
        redis.cont()
        await together(first, second)
        assert b"warmroute_redis_degraded 0.0" in (await first.client.get("/metrics")).content
        await until(lambda: not any(w.others_in_flight for g in (first, second) for w in g.router.workers.values()), "no load left over")
        newcomer = await ask(second, chat("task", *said, "more"))  # without a key: only the index knows
        assert newcomer == home


async def test_a_restart_with_an_empty_dataset_is_made_good_from_what_gateways_know(redis: RedisServer) -> None:
    workers = [ScriptedWorker(quick) for _ in range(4)]
    async with pool(redis, 2, *workers) as (first, second):
        warm = [await ask(first, chat(f"task {number}", "an answer " * 400, "more")) for number in range(4)]
        await written(first)
        redis.kill()
        await until(lambda: sharing(first).degraded and sharing(second).degraded, "the breaker")
        assert [await ask(first, chat(f"task {number}", "an answer " * 400, "more")) for number in range(4)] == warm
        await redis.restart()
        await together(first, second)
        await until(lambda: sum(w.others_live_sessions for w in second.router.workers.values()) == 4, "the other's sessions")
        again = [await ask(second, chat(f"task {number}", "an answer " * 400, "more", "yes", "and now")) for number in range(4)]
        assert again == warm


async def test_a_gateway_starts_without_redis_and_joins_when_it_comes() -> None:
    async with redis_server() as redis:
        redis.kill()
        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(ScriptedWorker(quick))
            gateway = await stack.enter_async_context(running(config(worker.url, index=shared(redis))))
            assert await ask(gateway, chat("task")) == worker.id
            await redis.restart()
            await together(gateway)


async def test_without_a_secret_the_gateway_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMROUTE_POOL_SECRET")
    with pytest.raises(ValueError, match="openssl rand"):
        async with running(config("http://127.0.0.1:1", index={"backend": "redis"})):
            pass
