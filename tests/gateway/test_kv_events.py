"""From an engine's publisher to a decision: discovery, ranks, readiness, loss and return. The publisher is real, the engine is not."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.tiny_tokenizer import write_model
from gateway.dialects import CHAT
from gateway.token_mode import TokenMode
from tests.kvindex.event_batches import batch, stored
from tests.kvindex.test_event_stream import Publisher
from tests.stack import ScriptedWorker, Stack, WorkerRequest, config, running, until

BLOCK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen")


class Engine(ScriptedWorker):
    """A worker that publishes KV events, one publisher per data-parallel rank, and reports cached tokens as told."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(self._answer)
        self.ranks = ranks
        self.publishers: list[Publisher] = []
        self.cached = 0
        self.told = True  # whether it says where it publishes

    async def start(self) -> None:
        await super().start()
        self.publishers = [Publisher() for _ in range(self.ranks)]

    async def stop(self) -> None:
        await super().stop()
        for publisher in self.publishers:
            await publisher.close()

    async def handle(self, request: WorkerRequest) -> None:
        if request.path == "/metrics":
            request.respond(b'vllm:cache_config_info{block_size="%d",num_gpu_blocks="4000"} 1\n' % BLOCK)
        elif request.path == "/kv_event_sources" and self.told:
            request.respond(orjson.dumps({str(rank): self._source(rank) for rank in range(self.ranks)}))
        else:
            await super().handle(request)

    def _source(self, rank: int) -> dict[str, Any]:
        endpoint, replay = self.publishers[rank].endpoints
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv"}

    async def _answer(self, request: WorkerRequest) -> None:
        usage = {"prompt_tokens": self.tokens_of(request), "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": self.cached}}
        request.respond(orjson.dumps({"choices": [{"message": {"role": "assistant", "content": "x"}}], "usage": usage}))

    def tokens_of(self, request: WorkerRequest) -> int:
        prompt = self.tokens.prompt(CHAT, request.json)
        assert prompt is not None
        return prompt.tokens

    tokens: TokenMode

    async def stores(self, text: str, rank: int = 0, sent: bool = True) -> None:
        """Report the prompt of a conversation with this text as cached, whole."""
        rendered = self.tokens.renderer.render(CHAT, body(text)).prompt
        ids = self.tokens.tokenizer.encode(rendered)
        ids = [int.from_bytes(ids[at : at + 4], "little") for at in range(0, len(ids), 4)]
        full = len(ids) // BLOCK * BLOCK
        payload = batch(stored([hash(tuple(ids[: at + BLOCK])) for at in range(0, full, BLOCK)], ids[:full], block_size=BLOCK), rank=rank)
        await self.publishers[rank].publish_payload(payload, sent=sent)


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


LONG = "def f(x): return x + 1\n" * 400


@asynccontextmanager
async def fleet(model: Path, *engines: Engine, **sections: Any) -> AsyncIterator[Stack]:
    Engine.tokens = TokenMode(model, BLOCK)
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        settings = config(*(e.url for e in engines), models=[{"name": "m", "tokenizer": str(model)}], **sections)
        yield await stack.enter_async_context(running(settings))


def levels(stack: Stack) -> list[str]:
    return [worker.trust.level for worker in stack.router.workers.values()]


async def chosen(stack: Stack, text: str) -> tuple[str, float]:
    """(worker, predicted cached tokens) of a request."""
    decisions = []
    decide = stack.router.decide
    stack.router.decide = lambda *a, **k: decisions.append(decide(*a, **k)) or decisions[-1]  # type: ignore[method-assign,func-returns-value]
    try:
        response = await stack.post("/v1/chat/completions", body(text))
        assert response.status_code == 200
    finally:
        stack.router.decide = decide  # type: ignore[method-assign]
    return response.headers["x-warmroute-worker"], decisions[-1].cached_tokens


@pytest.mark.replaces
async def test_what_the_engine_has_is_known_before_the_gateway_is_ready(model: Path) -> None:
    """Replay: the events were published before the gateway existed."""
    engines = Engine(), Engine()
    Engine.tokens = TokenMode(model, BLOCK)
    async with engines[0], engines[1]:
        await engines[1].stores(LONG, sent=False)
        async with running(config(*(e.url for e in engines), models=[{"name": "m", "tokenizer": str(model)}])) as stack:
            assert levels(stack) == ["exact", "exact"]
            worker, cached = await chosen(stack, LONG)
            assert worker == engines[1].id
            assert cached > 2000


@pytest.mark.replaces
async def test_events_arrive_while_it_runs(model: Path) -> None:
    engines = Engine(), Engine()
    async with fleet(model, *engines) as stack:
        await engines[1].stores(LONG)
        await until(lambda: stack.gateway.fleet.feeds[engines[1].id].blocks.blocks > 50, "the events")
        assert (await chosen(stack, LONG))[0] == engines[1].id


@pytest.mark.slow
async def test_ranks_behind_one_url_are_workers_and_are_named_in_a_header(model: Path) -> None:
    engine = Engine(ranks=2)
    async with fleet(model, engine) as stack:
        assert list(stack.router.workers) == [f"{engine.id}#0", f"{engine.id}#1"]
        await engine.stores(LONG, rank=1)
        await until(lambda: stack.gateway.fleet.feeds[f"{engine.id}#1"].blocks.blocks > 50, "the events of rank 1")
        worker, cached = await chosen(stack, LONG)
        assert worker == f"{engine.id}#1" and cached > 2000
        assert engine.requests[-1].headers["x-data-parallel-rank"] == "1"
        await chosen(stack, "something else " * 400)
        assert engine.requests[-1].headers["x-data-parallel-rank"] == "0"
        state = (await stack.client.get("/admin/workers")).json()
        assert set(state) == set(stack.router.workers)
        # down together, up together
        engine.healthy = False
        await until(lambda: not any(w.up for w in stack.router.workers.values()), "both ranks down")
        engine.healthy = True
        await until(lambda: all(w.up for w in stack.router.workers.values()), "both ranks up")


async def test_configured_endpoints_need_no_discovery_and_off_means_off(model: Path) -> None:
    engine = Engine()
    engine.told = False
    Engine.tokens = TokenMode(model, BLOCK)
    async with engine:
        endpoint, replay = engine.publishers[0].endpoints
        models = [{"name": "m", "tokenizer": str(model)}]
        given = {"url": engine.url, "kv_events": {"endpoint": endpoint, "replay_endpoint": replay, "topic": "kv"}}
        async with running(config(models=models, workers=[given])) as stack:
            assert levels(stack) == ["exact"]
        engine.told = True
        async with running(config(models=models, workers=[{"url": engine.url, "kv_events": "off"}])) as stack:
            assert levels(stack) == ["memory"]
            assert not stack.gateway.fleet.feeds


async def test_without_a_tokenizer_events_are_left_alone_and_that_is_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    Engine.tokens = TokenMode(model, BLOCK)
    with caplog.at_level(logging.INFO, "warmroute.fleet"):
        async with engine, running(config(engine.url)) as stack:
            assert levels(stack) == ["memory"]
            assert (await stack.post("/v1/chat/completions", body(LONG))).status_code == 200
    assert "tokenizer" in caplog.text


@pytest.mark.replaces
async def test_a_worker_that_is_back_without_its_cache_counts_as_cold(model: Path) -> None:
    engine, other = Engine(), Engine()
    async with fleet(model, engine, other) as stack:
        await engine.stores(LONG)
        await until(lambda: stack.gateway.fleet.feeds[engine.id].blocks.blocks > 50, "the events")
        ports = engine.publishers[0].ports
        engine.healthy = False
        await until(lambda: not stack.router.workers[engine.id].up, "notice")
        await engine.publishers[0].close()
        engine.publishers[0] = Publisher(ports=ports)  # a new engine behind the same ports, silent until it has work
        engine.healthy = True
        await until(lambda: stack.router.workers[engine.id].up, "its return")
        assert stack.gateway.fleet.feeds[engine.id].blocks.blocks == 0
        assert (await chosen(stack, LONG))[1] == 0


@pytest.mark.replaces
async def test_a_worker_that_was_only_thought_to_be_down_keeps_what_it_has(model: Path) -> None:
    engine, other = Engine(), Engine()
    async with fleet(model, engine, other) as stack:
        await engine.stores(LONG)
        await until(lambda: stack.gateway.fleet.feeds[engine.id].blocks.blocks > 50, "the events")
        engine.healthy = False
        await until(lambda: not stack.router.workers[engine.id].up, "notice")
        engine.healthy = True
        await until(lambda: stack.router.workers[engine.id].up, "its return")
        worker, cached = await chosen(stack, LONG)
        assert worker == engine.id and cached > 2000


async def test_an_engine_that_is_back_on_other_ports_or_without_events_is_not_believed_by_its_old_ones(model: Path) -> None:
    engine, other = Engine(), Engine()
    async with fleet(model, engine, other) as stack:
        worker = stack.router.workers[engine.id]
        known = Engine.tokens.prompt(CHAT, body(LONG))
        assert known is not None
        for told in (True, False, True):
            await engine.stores(LONG)
            if worker.trust.has_events:
                await until(lambda: stack.gateway.fleet.feeds[engine.id].blocks.blocks > 50, "the events")
            engine.healthy = False
            await until(lambda: not worker.up, "notice")
            await engine.publishers[0].close()
            engine.publishers[0], engine.told = Publisher(), told
            engine.healthy = True
            await until(lambda: worker.up, "its return")
            assert worker.trust.level == ("exact" if told else "memory")
            feed = stack.gateway.fleet.feeds.get(engine.id)
            assert (feed is not None) == told and (feed is None or feed.blocks.blocks == 0)
            assert not any(holder.startswith(f"kv:{engine.id}") for holder in stack.router.index.match(known.chain.hashes))


@pytest.mark.slow
async def test_a_publisher_that_was_never_heard_leaves_routing_memory_in_charge(model: Path) -> None:
    engine = Engine()
    Engine.tokens = TokenMode(model, BLOCK)
    async with engine:
        await engine.publishers[0].close()
        async with running(config(engine.url, models=[{"name": "m", "tokenizer": str(model)}])) as stack:
            assert levels(stack) == ["memory"]
            await chosen(stack, LONG)
            assert (await chosen(stack, LONG))[1] > 2000


@pytest.mark.slow
@pytest.mark.parametrize("oddity", ["metrics", "endpoint", "text", "list"])
async def test_an_odd_worker_does_not_keep_the_others_from_being_used(model: Path, oddity: str) -> None:
    class Odd(Engine):
        async def handle(self, request: WorkerRequest) -> None:
            if oddity == "metrics" and request.path == "/metrics":
                request.respond(b"", 500)
            elif oddity == "text" and request.path == "/kv_event_sources":
                request.respond(b"<html>")
            elif oddity == "list" and request.path in ("/kv_event_sources", "/server_info"):
                request.respond(b'[{"kv_events_config": 3}]')
            else:
                await super().handle(request)

        def _source(self, rank: int) -> dict[str, Any]:
            return super()._source(rank) | ({"endpoint": "garbage"} if oddity == "endpoint" else {})

    odd, engine = Odd(ranks=2), Engine()
    async with fleet(model, odd, engine) as stack:
        assert stack.router.workers[engine.id].trust.level == "exact"
        await until(lambda: any(w.up for i, w in stack.router.workers.items() if i.startswith(odd.id)), "the odd worker's use")


async def test_a_refused_request_leaves_no_prediction_behind(model: Path) -> None:
    engine = Engine()
    async with fleet(model, engine) as stack:

        async def refuse(request: WorkerRequest) -> None:
            request.respond(b'{"error": {"message": "too long"}}', 400)

        engine.script = refuse
        assert (await stack.post("/v1/chat/completions", body(LONG))).status_code == 400
        blocks = stack.gateway.fleet.feeds[engine.id].blocks
        assert not blocks._expected and not stack.router.index.match(Engine.tokens.prompt(CHAT, body(LONG)).chain.hashes).get(blocks.holder)  # type: ignore[union-attr]


@pytest.mark.replaces
async def test_a_salted_prompt_is_another_prompt(model: Path) -> None:
    engine = Engine()
    async with fleet(model, engine) as stack:
        await engine.stores(LONG)
        await until(lambda: stack.gateway.fleet.feeds[engine.id].blocks.blocks > 50, "the events")
        decisions = []
        decide = stack.router.decide
        stack.router.decide = lambda *a, **k: decisions.append(decide(*a, **k)) or decisions[-1]  # type: ignore[method-assign,func-returns-value]
        for salt in ({}, {"cache_salt": "tenant"}):
            await stack.post("/v1/chat/completions", body(LONG) | salt)
        assert decisions[0].cached_tokens > 2000 and decisions[1].cached_tokens == 0


async def test_what_cannot_be_rendered_is_served_in_text_mode(model: Path) -> None:
    engine = Engine()
    async with fleet(model, engine) as stack:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        content = [{"type": "text", "text": LONG}, picture]
        engine.script = lambda request: _plain(request)
        for _ in range(2):
            response = await stack.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": content}]})
            assert response.status_code == 200
        assert sum(stack.gateway.fleet.token_modes["m"].fallbacks.values()) == 2
        await stack.until_idle()


async def _plain(request: WorkerRequest) -> None:
    request.respond(b'{"choices":[],"usage":{"prompt_tokens":2000,"completion_tokens":1}}')
