"""A fleet in virtual time: the real Router, workers that prefill in order and decode in parallel, sessions in closed loop.

A worker's own KV cache is what the router's memory says, so these runs test placement alone.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvindex.index import KVIndex
from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory
from routing.fleet import Worker
from routing.others import Others
from routing.router import Decision, Router, RouteRequest
from routing.sessions import SessionRecord, SessionTable
from workers.latency import LatencyModel
from workers.profile import WorkerProfile

BLOCK = 512  # bytes
MODEL = "m"


def new_router(
    workers: int | list[WorkerProfile] = 4,
    *,
    policy: str = "warm",
    session_ttl_s: float = 900.0,
    memory_ttl_s: float = 3600.0,
    index: KVIndex | None = None,
) -> Router:
    """A router over equal workers w0, w1 ..., or over these profiles."""
    profiles = [WorkerProfile()] * workers if isinstance(workers, int) else workers
    index = index if index is not None else MemoryIndex()
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
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.router = router
        self.running = 0  # clients that have turns left
        self.now = 0.0
        self.decisions: list[Decision] = []
        self.requests: Counter[str] = Counter()
        self.ttfts: list[float] = []
        self.prompt_tokens = self.hit_tokens = 0.0
        self._engines = {name: _Engine(worker.profile.latency_model()) for name, worker in router.workers.items()}

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def start(self, client: Client, when: float) -> None:
        self.running += 1
        self.at(when, lambda: self._ask(client))

    def decide(self, client: Client) -> Decision:
        """Where the client's next request goes."""
        return self.router.decide(request(client.hashes, client.name), self.now)

    def cached_tokens(self, client: Client, decision: Decision) -> float:
        """What the worker really holds of it."""
        return decision.cached_tokens

    def learn(self, decision: Decision, cached_tokens: float, ttft_s: float) -> None:
        self.router.learn(decision, prompt_tokens=round(decision.prompt_tokens), cached_tokens=round(cached_tokens), ttft_s=ttft_s)

    def run(self) -> None:
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self.handled()

    def handled(self) -> None:
        """After each event."""

    def _ask(self, client: Client) -> None:
        asked = self.now
        self.running -= 1
        decision = self.decide(client)
        cached = self.cached_tokens(client, decision)
        self.prompt_tokens += decision.prompt_tokens
        self.hit_tokens += cached
        self.decisions.append(decision)
        name = decision.worker.id
        self.requests[name] += 1
        client.placed.append(name)
        client.turns_left -= 1
        engine = self._engines[name]
        started = max(asked, engine.free_at)
        uncached = max(decision.prompt_tokens - cached, 1.0)
        engine.free_at = first = started + engine.model.prefill_s(uncached, decision.prompt_tokens)
        self.at(first, lambda: self._first_token(client, decision, cached, first - asked))

    def _first_token(self, client: Client, decision: Decision, cached: float, ttft: float) -> None:
        decision.reservation.first_token(self.now)
        self.ttfts.append(ttft)
        engine = self._engines[decision.worker.id]
        engine.decoding += 1
        step = engine.model.step_s(engine.decoding, engine.decoding * decision.prompt_tokens)
        self.at(self.now + client.output_tokens * step, lambda: self._finished(client, decision, cached, ttft))

    def _finished(self, client: Client, decision: Decision, cached: float, ttft: float) -> None:
        decision.reservation.release(self.now)
        self._engines[decision.worker.id].decoding -= 1
        self.learn(decision, cached, ttft)
        client.hashes = client.hashes + blocks(client.grows())
        if client.turns_left:
            self.start(client, self.now + client.thinks())


class _Written(MemoryIndex):
    """A gateway's local index: what is stored and removed there reaches the shared one a little later."""

    def __init__(self, write: Callable[[str, str, list[int]], None]):
        super().__init__()
        self._write = write

    def store(self, worker: str, hashes: Iterable[int]) -> None:
        hashes = list(hashes)
        super().store(worker, hashes)
        self._write("store", worker, hashes)

    def remove(self, worker: str, hashes: Iterable[int]) -> None:
        hashes = list(hashes)
        super().remove(worker, hashes)
        self._write("remove", worker, hashes)

    def clear(self, worker: str) -> None:
        super().clear(worker)
        self._write("clear", worker, [])


class SharedFleet(VirtualFleet):
    """Several gateways, each turn through any of them. Workers have a real KV cache (least recently used blocks go first).

    What gateways tell each other, the shared index and the sessions' records take `delay_s`; without `shares` they tell nothing.
    A gateway asks before it decides, a random part of `answer_s` before, and gets its answers in the order of its questions.
    """

    def __init__(
        self,
        gateways: int,
        workers: int | list[WorkerProfile] = 4,
        *,
        seed: int = 0,
        delay_s: float = 0.005,
        answer_s: float = 0.001,
        shares: bool = True,
        sticky: bool = False,
    ) -> None:
        self.delay_s = delay_s
        self.answer_s = answer_s
        self.shares = shares
        self.sticky = sticky
        self.gateway_of: dict[str | None, int] = {}
        self.stayed = 0.0  # share of later turns at their session's first worker
        self.errors: list[float] = []  # predicted minus held tokens, over prompt tokens
        self.index = MemoryIndex()  # the shared one; holders are "gateway|holder"
        self.records: dict[bytes, bytes] = {}
        self.routers: list[Router] = []
        for number in range(gateways):
            self.routers.append(new_router(workers, index=_Written(lambda *op, name=f"g{number}": self._written(name, *op))))
        super().__init__(self.routers[0])
        self.others = [Others(router, f"g{number}") for number, router in enumerate(self.routers)]
        self._draw = random.Random(seed)
        self._tickets = itertools.count(1)
        self._answered = [0.0] * gateways  # when each has had its last answer
        self._asked: dict[int, tuple[int, RouteRequest, dict[str, int] | None]] = {}  # what is on its way: gateway, request, match
        self._published = [False] * gateways
        self._truth = MemoryIndex()
        self._caches = RoutingMemory(self._truth)
        for worker in self.router.workers.values():
            self._caches.set_capacity(worker.id, int(worker.profile.kv_capacity_tokens / 128))
        if shares:
            for number in range(gateways):
                self._publish(number, True)
            self.at(0.0, self._publish_all)

    def start(self, client: Client, when: float) -> None:
        self.running += 1
        self.at(when, lambda: self._ask_others(client))

    def _ask_others(self, client: Client) -> None:
        if self.sticky:
            number = self.gateway_of.setdefault(client.name, self._draw.randrange(len(self.routers)))
        else:
            number = self._draw.randrange(len(self.routers))
        asked = request(client.hashes, client.name)
        known: dict[str, int] | None = None
        if self.shares:
            known = {}
            for holder, depth in self.index.match(client.hashes).items():
                worker = holder.partition("|")[2]
                known[worker] = max(depth, known.get(worker, 0))
            if (session_id := self.routers[number].session_id(asked)) is not None:
                asked.shared = SessionRecord.decode(self.records.get(session_id, b""))
            if asked.shared is None and len(self.others[number]):
                asked.ticket = next(self._tickets)
        self._asked[id(client)] = number, asked, known
        self._answered[number] = max(self._answered[number], self.now + self._draw.uniform(0.0, self.answer_s))
        self.at(self._answered[number], lambda: self._ask(client))

    def decide(self, client: Client) -> Decision:
        number, asked, known = self._asked.pop(id(client))
        decision = self.routers[number].decide(asked, self.now, known=known)
        if self.shares and (record := decision.session_record()) is not None:
            self.at(self.now + self.delay_s, lambda: self.records.__setitem__(asked.session_id or b"", record.encode()))
        return decision

    def cached_tokens(self, client: Client, decision: Decision) -> float:
        name = decision.worker.id
        held = self._truth.match(client.hashes).get(name, 0)
        self._caches.record(name, client.name, client.hashes, self.now)
        cached = held * decision.prompt_tokens / len(client.hashes)
        self.errors.append((decision.by_memory - cached) / decision.prompt_tokens)
        return cached

    def learn(self, decision: Decision, cached_tokens: float, ttft_s: float) -> None:
        router = self.routers[int(decision.gateway[1:])]
        router.learn(decision, prompt_tokens=round(decision.prompt_tokens), cached_tokens=round(cached_tokens), ttft_s=ttft_s)

    def handled(self) -> None:
        if self.shares:
            for number, router in enumerate(self.routers):
                if not self._published[number] and (router.touched or router.sessions.new_claims):
                    self._published[number] = True
                    self.at(self.now + self.delay_s / 2, lambda number=number: self._publish(number, False))  # type: ignore[misc]

    def _publish_all(self) -> None:
        for number, others in enumerate(self.others):
            others.expire(self.now)
            self._publish(number, True)
        if self.running or any(worker.in_flight for router in self.routers for worker in router.workers.values()):
            self.at(self.now + 0.5, self._publish_all)

    def _publish(self, number: int, full: bool) -> None:
        self._published[number] = self._published[number] and full
        message = self.others[number].message(self.now, full)
        if message is not None:
            for others in self.others:
                self.at(self.now + self.delay_s / 2, lambda others=others: others.heard(message, self.now))  # type: ignore[misc]

    def _written(self, gateway: str, what: str, holder: str, hashes: list[int]) -> None:
        if self.shares:
            name = f"{gateway}|{holder}"
            operation = {"store": self.index.store, "remove": self.index.remove}.get(what)
            self.at(self.now + self.delay_s, lambda: operation(name, hashes) if operation else self.index.clear(name))


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
