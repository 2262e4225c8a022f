"""Two real vLLM engines: what the gateway predicts to be cached is what the engine reports, through everything that happens to it."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.config import Config
from tests.engine.conftest import running_engines
from tests.engine.conversations import Conversation, Recorder, check, take_turns
from tests.engine.engines import BLOCK, Engine, LossyForwarder
from tests.stack import Stack, config, running, until

pytestmark = pytest.mark.engine

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def settings(model: Path, *engines: Engine, **sections: Any) -> Config:
    workers = sections.pop("workers", [])
    models = [{"name": "tiny", "tokenizer": str(model)}]
    probes = {"probe_interval_s": 0.5, "probe_timeout_s": 5.0, "probe_failures": 3}
    urls = [] if workers else [engine.url for engine in engines]
    return config(*urls, models=models, upstream=probes, workers=workers, **sections)


def exact(stack: Stack) -> bool:
    return all(worker.up and worker.trust.level == "exact" for worker in stack.router.workers.values())


async def test_predictions_are_what_the_engines_report(vllm_python: Path, tiny_model: Path) -> None:
    """One run, because engines take half a minute to start: agents in every dialect, a gateway restart, an engine crash, lost events."""
    engines = Engine(vllm_python, tiny_model, core=0), Engine(vllm_python, tiny_model, core=1)
    async with running_engines(*engines):
        chats = [Conversation(CHAT, seed, first_tokens=2500, turn_tokens=1900, tools=seed % 2 == 0) for seed in range(8)]
        async with running(settings(tiny_model, *engines)) as stack:
            await until(lambda: exact(stack), "exact knowledge of both engines")
            seen = Recorder(stack.router, "8 chat sessions to 16k tokens").seen
            await take_turns(stack, chats, 8, at_once=8)
            check(seen, BLOCK, 64)
            assert max(s.reported_prompt for s in seen) > 14_000
            assert {s.worker for s in seen} == {engines[0].url[7:], engines[1].url[7:]}
            for path in (COMPLETIONS, RESPONSES, MESSAGES):
                seen = Recorder(stack.router, path).seen
                await take_turns(stack, [Conversation(path, seed, first_tokens=900, turn_tokens=600) for seed in range(4)], 5, at_once=4)
                check(seen, BLOCK, 20)
            assert exact(stack)

        # a new gateway: replay fills its index before it says that it is ready
        async with running(settings(tiny_model, *engines)) as stack:
            assert (await stack.client.get("/ready")).status_code == 200
            assert exact(stack)
            seen = Recorder(stack.router, "after a gateway restart").seen
            for chat in chats:
                chat.turn_tokens = 200
            await take_turns(stack, chats, 2, at_once=4)
            check(seen, BLOCK, 16)
            assert all(s.reported > 10_000 for s in seen), "the new gateway sent sessions away from their cache"

            # an engine crashes and comes back with an empty cache
            engines[0].kill()
            lost = stack.router.workers[engines[0].url[7:]]
            await until(lambda: not lost.up, "notice of the crash")
            engines[0].start()
            await engines[0].ready()
            await until(lambda: lost.up, "the engine's return")
            seen = Recorder(stack.router, "after an engine was killed").seen
            await take_turns(stack, chats, 3, at_once=4)
            check(seen, BLOCK, 24)
            assert exact(stack)

        # events are lost on the way: replay closes the gap
        async with LossyForwarder(engines[0]) as lossy:
            replay = f"tcp://127.0.0.1:{engines[0].replay_port}"
            events = {"endpoint": f"tcp://127.0.0.1:{lossy.port}", "replay_endpoint": replay, "topic": "kv"}
            workers = [{"url": engines[0].url, "kv_events": events}, {"url": engines[1].url}]
            async with running(settings(tiny_model, *engines, workers=workers)) as stack:
                await until(lambda: exact(stack), "exact knowledge of both engines")
                shorter = [Conversation(CHAT, 100 + seed, first_tokens=900, turn_tokens=500) for seed in range(8)]
                await take_turns(stack, shorter, 1, at_once=4)
                lossy.lose = True
                await take_turns(stack, shorter, 1, at_once=4)
                lossy.lose = False
                assert lossy.lost > 0
                await take_turns(stack, shorter, 1, at_once=4)
                seen = Recorder(stack.router, "after lost events").seen
                await take_turns(stack, shorter, 3, at_once=4)
                check(seen, BLOCK, 24)
                assert sum(feed.stream.gaps for feed in stack.gateway.fleet.feeds.values()) > 0


async def test_evictions_are_followed_and_a_warm_cache_is_five_times_faster(vllm_python: Path, tiny_model: Path) -> None:
    small = [Engine(vllm_python, tiny_model, core=core, kv_tokens=40_960, max_len=20_480) for core in (0, 1)]
    async with running_engines(*small):
        async with running(settings(tiny_model, *small)) as stack:
            await until(lambda: exact(stack), "exact knowledge of both engines")
            seen = Recorder(stack.router, "evictions: 8 sessions of 16k tokens on 2 x 40k tokens of KV").seen
            chats = [Conversation(CHAT, 200 + seed, first_tokens=6000, turn_tokens=3000) for seed in range(8)]
            await take_turns(stack, chats, 4, at_once=1, gap_s=0.1)
            check(seen, BLOCK, 32)
            assert sum(s.reported < s.reported_prompt - 6000 for s in seen[8:]) > 3, "nothing was evicted"

        # seven sessions of 8k tokens fit both caches together, and not each of them
        times = {}
        for policy in ("warm", "round-robin"):
            async with running(settings(tiny_model, *small, policy=policy)) as stack:
                seed = 300 if policy == "warm" else 400
                chats = [Conversation(CHAT, seed + n, first_tokens=8000, turn_tokens=120) for n in range(7)]
                first = [await first_token_s(stack, chat) for chat in chats]
                later = [await first_token_s(stack, chat) for _ in range(3) for chat in chats]
                times[policy] = statistics.median(later)
                print(f"\n{policy}: TTFT p50 of first turns {statistics.median(first):.3f} s, of later turns {times[policy]:.3f} s")
        assert times["round-robin"] >= 5 * times["warm"]


async def first_token_s(stack: Stack, chat: Conversation) -> float:
    """Take a streamed turn; the time until its first token."""
    body = chat.next_body(stream=True) | {"max_tokens": 4}
    started, ttft, text = time.perf_counter(), 0.0, ""
    async with stack.client.stream("POST", chat.path, content=orjson.dumps(body), headers={"content-type": "application/json"}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = orjson.loads(line[6:])["choices"]
                delta = choices[0]["delta"].get("content") if choices else None
                if delta:
                    ttft = ttft or time.perf_counter() - started
                    text += delta
    chat.take({"choices": [{"message": {"content": text}}]})
    await asyncio.sleep(0.1)
    return ttft
