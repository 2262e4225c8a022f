"""A fleet in virtual time: the real Router, workers that prefill in order and decode in parallel, sessions in closed loop.

A worker's own KV cache is what the router's memory says, so these runs test placement alone.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory
from routing.fleet import Worker
from routing.router import Decision, Router, RouteRequest
from routing.sessions import SessionTable
from workers.latency import LatencyModel
from workers.profile import WorkerProfile

BLOCK = 512  # bytes
MODEL = "m"


def new_router(
    workers: int | list[WorkerProfile] = 4, *, policy: str = "warm", session_ttl_s: float = 900.0, memory_ttl_s: float = 3600.0
) -> Router:
    """A router over equal workers w0, w1 ..., or over these profiles."""
    profiles = [WorkerProfile()] * workers if isinstance(workers, int) else workers
    index = MemoryIndex()
    router = Router(
        index, RoutingMemory(index, ttl_s=memory_ttl_s), block_units=BLOCK, policy=policy, sessions=SessionTable(ttl_s=session_ttl_s)
    )
    for number, profile in enumerate(profiles):
        router.add_worker(f"w{number}", [MODEL], profile)
    return router


_numbers = itertools.count(1)


def blocks(count: int) -> list[int]:
    """So many block hashes that nobody else has."""
    return [next(_numbers) for _ in range(count)]


def request(hashes: list[int], session: str | None = None, *, streamed: bool = True, max_output_tokens: int | None = None) -> RouteRequest:
    return RouteRequest(MODEL, hashes, len(hashes) * BLOCK, session, max_output_tokens=max_output_tokens, streamed=streamed)


@dataclass
class Client:
    """One agent session: its prompt so far and what it has yet to ask."""

    name: str | None
    hashes: list[int]
    turns_left: int
    grows: Callable[[], int]  # blocks a turn adds
    thinks: Callable[[], float]  # seconds between an answer and the next turn
    output_tokens: int = 150
    placed: list[str] = field(default_factory=list)


@dataclass
class _Engine:
    """What a worker is really doing."""

    model: LatencyModel
    free_at: float = 0.0
    decoding: int = 0


class VirtualFleet:
    """Runs clients against a router until all have had their turns."""

    def __init__(self, router: Router):
        self.router = router
        self.now = 0.0
        self.decisions: list[Decision] = []
        self.requests: Counter[str] = Counter()
        self.ttfts: list[float] = []
        self._engines = {name: _Engine(worker.profile.latency_model()) for name, worker in router.workers.items()}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def start(self, client: Client, when: float) -> None:
        self.at(when, lambda: self._ask(client))

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def _ask(self, client: Client) -> None:
        asked = self.now
        decision = self.router.decide(request(client.hashes, client.name), asked)
        self.decisions.append(decision)
        name = decision.worker.id
        self.requests[name] += 1
        client.placed.append(name)
        client.turns_left -= 1
        engine = self._engines[name]
        started = max(asked, engine.free_at)
        uncached = max(decision.prompt_tokens - decision.cached_tokens, 1.0)
        engine.free_at = first = started + engine.model.prefill_s(uncached, decision.prompt_tokens)
        self.at(first, lambda: self._first_token(client, decision, first - asked))

    def _first_token(self, client: Client, decision: Decision, ttft: float) -> None:
        decision.reservation.first_token(self.now)
        self.ttfts.append(ttft)
        engine = self._engines[decision.worker.id]
        engine.decoding += 1
        step = engine.model.step_s(engine.decoding, engine.decoding * decision.prompt_tokens)
        self.at(self.now + client.output_tokens * step, lambda: self._finished(client, decision, ttft))

    def _finished(self, client: Client, decision: Decision, ttft: float) -> None:
        decision.reservation.release(self.now)
        self._engines[decision.worker.id].decoding -= 1
        self.router.learn(
            decision, prompt_tokens=round(decision.prompt_tokens), cached_tokens=round(decision.cached_tokens), ttft_s=ttft
        )
        client.hashes = client.hashes + blocks(client.grows())
        if client.turns_left:
            self.start(client, self.now + client.thinks())


def agents(count: int, turns: int, seed: int, *, shared: list[int], own: int, named: bool = True) -> list[Client]:
    """Agent sessions that share a system prompt and grow by turns of 2 to 8 KB, with gaps like those of tools."""
    draw = random.Random(seed)
    return [
        Client(
            f"s{number}" if named else None, shared + blocks(own), turns,
            grows=lambda: draw.randint(4, 16), thinks=lambda: min(draw.lognormvariate(0.7, 1.0), 60.0),
        )
        for number in range(count)
    ]  # fmt: skip


def stayed(clients: list[Client]) -> float:
    """Share of later turns that went to their session's first worker."""
    later = [name == client.placed[0] for client in clients for name in client.placed[1:]]
    return sum(later) / len(later)


def busiest_over_mean(requests: Counter[str], workers: dict[str, Worker] | int) -> float:
    count = workers if isinstance(workers, int) else len(workers)
    return max(requests.values()) * count / sum(requests.values())
