"""32 agent sessions with one system prompt through the whole gateway, over four equal simulated engines of different speeds."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.gateway.spoken import CHAT
from tests.stack import Stack, config, running
from workers.profile import WorkerProfile
from workers.simserver import SimServer

SYSTEM = "You are a coding agent. Follow these rules.\n" * 373  # 16 KB: 80 % of a session's first prompt
SESSIONS = 32
TURNS = 6


async def _session(stack: Stack, number: int, gap_s: float, placed: dict[int, list[str]], named: bool) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"task {number}: " + f"line {number} of code\n" * 250}]
    headers = {"x-session-id": f"s{number}"} if named else {}
    for turn in range(TURNS):
        body = {"model": "m", "messages": messages, "max_tokens": 20, "stream": True}
        response = await stack.post(CHAT.path, body, headers)
        assert response.status_code == 200
        placed[number].append(response.headers["x-warmroute-worker"])
        answer = {"role": "assistant", "content": f"answer {turn} of {number} " * 20}
        messages = [*messages, answer, {"role": "user", "content": f"next {turn} of {number} " * 100}]
        await asyncio.sleep(gap_s * (1 + (number + turn) % 5))


@pytest.mark.parametrize("arrivals", ["sequential", "staggered", "at-once"])
@pytest.mark.parametrize(
    ("speed", "named"), [pytest.param(60.0, True, marks=pytest.mark.slow), (500.0, False)], ids=["engines-x60", "engines-x500"]
)
async def test_sessions_spread_over_the_workers_and_stay(arrivals: str, speed: float, named: bool) -> None:
    servers = [SimServer(WorkerProfile(engine="sim"), speed=speed, model="m") for _ in range(4)]
    for server in servers:
        await server.start()
    try:
        async with running(config(*(s.url for s in servers))) as stack:
            placed: dict[int, list[str]] = {number: [] for number in range(SESSIONS)}
            gap_s = 0.0 if arrivals == "sequential" else 1.0 / speed
            if arrivals == "sequential":
                # first turns one by one on an idle fleet, then the later ones
                for number in range(SESSIONS):
                    await _session(stack, number, gap_s, placed, named)
            else:

                async def start(number: int) -> None:
                    if arrivals == "staggered":
                        await asyncio.sleep(number * 2.0 / speed)
                    await _session(stack, number, gap_s, placed, named)

                await asyncio.gather(*(start(number) for number in range(SESSIONS)))
            requests = Counter(worker for workers in placed.values() for worker in workers)
            assert max(requests.values()) <= 1.25 * SESSIONS * TURNS / 4, requests
            later = [worker == workers[0] for workers in placed.values() for worker in workers[1:]]
            assert sum(later) >= 0.98 * len(later), placed
            await stack.until_idle()
    finally:
        for server in servers:
            await server.stop()
