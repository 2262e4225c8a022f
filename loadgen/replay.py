"""Replay: plays a trace's sessions against a server, as agents would, and measures.

Closed loop (default): N lanes each play one session after another. A session's next request goes out when the answer before has come
and its gap has passed, so a slow server is asked less, as by real agents. Open loop: sessions start at the trace's times (or at a
rate) whatever the server does; within a session the next turn still waits for its answer.
"""

from __future__ import annotations

import asyncio
import copy
import random
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import httpx

from loadgen.bound import InfiniteCache, LruCache
from loadgen.client import StreamClient
from loadgen.conversation import PATHS, Conversation, Dialect, Prompt
from loadgen.metrics import Collector, RunResult
from loadgen.prompts import block_text
from loadgen.readers import Gaps, read_trace
from loadgen.trace import Session, limit_context

Mode = Literal["closed", "open"]
Spread = Literal["request", "session"]

UNSET_POLICY = "current"  # the result's name when the server's policy was left alone
_LOOP_PROBE_S = 0.05
_HEADER_UNSAFE = re.compile(r"[^\x21-\x7e]")
_CONNECT_FAILURES = 20  # in a row: the server is gone


class ReplayError(RuntimeError):
    """The replay cannot start or go on; the message says what to do."""


@dataclass(slots=True)
class ReplayOptions:
    """What to replay against what. Token counts, seconds and shares as named."""

    trace: str | Path | list[Session]
    url: str = "http://127.0.0.1:8000"
    more_urls: tuple[str, ...] = ()  # further gateways before the same workers, which take their share of the load
    spread: Spread = "request"  # what is sent to one of them, drawn by `seed`: each request, or all of a session and its sub-agents
    model: str | None = None  # asked from /v1/models when absent
    policies: tuple[str, ...] = ()  # each is set at the gateway and played in turn; none: the server stays as it is
    mode: Mode = "closed"
    live_sessions: int = 32  # closed loop: lanes
    requests: int | None = None  # measured requests; without this and duration_s every session is played once
    duration_s: float | None = None  # no request is sent after this (and warmup_s); those in flight are awaited
    warmup: int = 0  # first requests that are sent but not measured
    warmup_s: float = 0.0  # first seconds whose requests are not measured; duration_s comes after them
    time_scale: float = 1.0  # gaps are multiplied by this
    gaps: Gaps = "quantiles"
    max_gap_s: float = 300.0  # longer gaps are cut to this, before scaling
    ramp_s: float = 10.0  # closed loop: the lanes start over this time
    rate: float | None = None  # open loop: sessions per second (Poisson) instead of the trace's times
    speedup: float = 1.0  # open loop: the trace's times are divided by this
    max_context: int | None = None  # sessions are cut before a step whose prompt and answer exceed this
    kv_capacity_tokens: int | None = None  # of all workers together: adds the bound of one LRU cache of this size
    dialect: Dialect = "chat"
    api_key: str | None = None
    session_header: bool = True
    ignore_eos: bool = True  # engines answer with the recorded length
    timeout_s: float = 600.0
    seed: int = 0

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.more_urls)


@dataclass(slots=True)
class Progress:
    """Where a run is."""

    policy: str
    done: int
    total: int | None
    elapsed_s: float
    duration_s: float | None
    errors: int
    hit_rate: float | None
    hit_bound: float | None
    ttft_p50_s: float | None
    in_flight: int


@dataclass(slots=True)
class ReplayResult:
    runs: dict[str, RunResult] = field(default_factory=dict)  # by policy, in the order played
    gateways: int = 1
    spread: Spread = "request"

    def to_json(self) -> dict[str, Any]:
        return {policy: run.to_json() for policy, run in self.runs.items()}


async def replay(
    options: ReplayOptions,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> ReplayResult:
    """Play the trace, once per policy. `on_progress` is called twice a second; setting `stop` ends early with what was measured.

    Raises ReplayError when the server cannot be used as asked, TraceError when the trace cannot be read.
    """
    sessions = read_trace(options.trace, gaps=options.gaps, seed=options.seed) if isinstance(options.trace, str | Path) else options.trace
    if options.max_context is not None:
        sessions = limit_context(copy.deepcopy(sessions), options.max_context)
        if not sessions:
            raise ReplayError(f"no session of the trace has a step within {options.max_context} tokens of context")
    if not sessions:
        raise ReplayError("the trace holds no sessions")
    stop = stop or asyncio.Event()
    result = ReplayResult(gateways=len(options.urls), spread=options.spread)
    async with AsyncExitStack() as stack:
        controls = [await stack.enter_async_context(_control(options, url)) for url in options.urls]
        model = options.model or await controls[0].first_model()
        try:
            for policy in options.policies or (UNSET_POLICY,):
                if policy != UNSET_POLICY:
                    for control in controls:
                        await control.set_policy(policy)
                run = _Run(options, sessions, model, policy, stop)
                result.runs[policy] = await run.play(on_progress)
                if stop.is_set():
                    break
        finally:
            if len(options.policies) > 1:
                for control in controls:
                    with suppress(ReplayError):  # leaving the server as asked must not cost the results
                        await control.set_policy(options.policies[0])
    return result


class _Control:
    """The requests around a replay: which model, which policy."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    async def _request(self, method: str, path: str, json: Any = None) -> httpx.Response:
        try:
            return await self._client.request(method, path, json=json)
        except httpx.HTTPError as error:
            raise ReplayError(
                f"nothing usable answers at {self._url} ({error or type(error).__name__}); start the gateway first, "
                "e.g. `warmroute serve --port 8000 --workers http://host:port,...`, or pass its address as --url"
            ) from None

    async def first_model(self) -> str:
        response = await self._request("GET", "/v1/models")
        if response.status_code != 200:
            hint = "pass the key's environment variable as --api-key" if response.status_code in (401, 403) else "pass --model"
            raise ReplayError(f"{self._url}/v1/models answered {response.status_code}; {hint}")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ReplayError(f"{self._url}/v1/models names no model; pass --model") from None

    async def set_policy(self, policy: str) -> None:
        response = await self._request("PUT", "/admin/policy", {"policy": policy})
        if response.status_code >= 300:
            answer = f"{response.status_code}: {' '.join(response.text.split())[:200]}"
            raise ReplayError(
                f"{self._url} refused the policy {policy!r} (PUT /admin/policy answered {answer}); "
                "--policy and --compare need a warmroute gateway that knows the policy, leave them out to replay as the server is"
            )


@asynccontextmanager
async def _control(options: ReplayOptions, url: str) -> AsyncIterator[_Control]:
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        client = httpx.AsyncClient(base_url=url, headers=headers, timeout=30)
    except httpx.InvalidURL as error:
        raise ReplayError(f"{url!r} is not a URL: {error}") from None
    async with client:
        yield _Control(client, url)


class _Run:
    """One policy's run."""

    def __init__(self, options: ReplayOptions, sessions: list[Session], model: str, policy: str, stop: asyncio.Event) -> None:
        self._options = options
        self._model = model
        self._policy = policy
        self._stop = stop
        self._salt = secrets.token_hex(4)  # a run must not find the prompts of an earlier one in the caches
        try:
            self._clients = [StreamClient(url, api_key=options.api_key, timeout_s=options.timeout_s) for url in options.urls]
        except ValueError as error:
            raise ReplayError(str(error)) from None
        self._endless = options.requests is not None or options.duration_s is not None
        self._plays = self._all_plays(sessions)
        self._session_requests = sum(len(part.requests) for session in sessions for part in session.tree())
        self._collector = Collector()
        self._infinite = InfiniteCache()
        # Kept for the LRU bound, which is computed after the run: (chain, blocks, block size, tokens). Turns share their chain's list.
        self._issued: list[tuple[list[int], int, int, int]] = []
        self._issue_count = 0
        self._first_measured: int | None = None  # its number among the issued
        self._in_flight = 0
        self._connect_failures = 0
        self._started_at = 0.0
        self._measured_from = 0.0
        self._last_answer_at = 0.0
        self._closing = asyncio.Event()  # no more requests are to be sent
        self._idle = asyncio.Event()  # none is in flight
        self._idle.set()

    def _all_plays(self, sessions: list[Session]) -> Iterator[tuple[Session, int]]:
        """Sessions in the trace's order with the lap they belong to; once through, or again and again when the run is bounded otherwise."""
        ordered = sorted(sessions, key=lambda session: session.start_s)
        lap = 0
        while True:
            for session in ordered:
                yield session, lap
            if not self._endless:
                return
            lap += 1

    async def play(self, on_progress: Callable[[Progress], None] | None) -> RunResult:
        block_text(0, 1, 0)  # builds the pool of text now, not while the first request is due
        self._started_at = self._measured_from = self._last_answer_at = perf_counter()
        driver = self._closed_loop() if self._options.mode == "closed" else self._open_loop()
        tasks = [asyncio.create_task(driver), asyncio.create_task(self._probe_loop())]
        if on_progress is not None:
            tasks.append(asyncio.create_task(self._report(on_progress)))
        waits = [asyncio.create_task(self._closing.wait()), asyncio.create_task(self._stop.wait())]
        try:
            await asyncio.wait([tasks[0], *waits], timeout=self._time_limit_s, return_when=asyncio.FIRST_COMPLETED)
            self._closing.set()
            if not self._stop.is_set():
                waits.append(asyncio.create_task(self._idle.wait()))
                await asyncio.wait(waits[1:], return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done() and not tasks[0].cancelled():
                tasks[0].result()  # what went wrong in the driver goes to the caller
        finally:
            for task in [*tasks, *waits]:
                task.cancel()
            await asyncio.gather(*tasks, *waits, return_exceptions=True)
            for client in self._clients:
                client.close()
        if on_progress is not None:
            on_progress(self._progress())
        if self._connect_failures >= _CONNECT_FAILURES:
            raise ReplayError(f"{', '.join(self._options.urls)} stopped taking connections after {self._collector.requests} requests")
        took = max(0.0, self._last_answer_at - self._measured_from)  # nothing may have been answered
        result = self._collector.result(took)
        result.interrupted = self._stop.is_set()
        if self._options.kv_capacity_tokens is not None:
            result.hit_bound_lru = self._lru_bound(self._options.kv_capacity_tokens)
        return result

    # Who plays what when

    async def _closed_loop(self) -> None:
        lanes = max(1, self._options.live_sessions)
        async with asyncio.TaskGroup() as group:
            for lane in range(lanes):
                group.create_task(self._lane(self._started_at + self._options.ramp_s * lane / lanes))

    async def _lane(self, due: float) -> None:
        while not self._closing.is_set():
            play = next(self._plays, None)
            if play is None:
                return
            session, lap = play
            await self._play(session, session.id, lap, due)
            due = perf_counter()

    async def _open_loop(self) -> None:
        options = self._options
        rng = random.Random(options.seed)
        due = self._started_at
        first: float | None = None
        lap_offset = last_start = 0.0
        current_lap = 0
        async with asyncio.TaskGroup() as group:
            for session, lap in self._plays:
                if options.rate is not None:
                    due += rng.expovariate(options.rate)
                else:
                    first = session.start_s if first is None else first
                    if lap != current_lap:  # the next pass starts where the last session of this one did
                        current_lap, lap_offset = lap, lap_offset + last_start
                    last_start = session.start_s - first
                    due = self._started_at + (lap_offset + last_start) / options.speedup
                await _sleep_until(due)
                if self._closing.is_set():
                    return
                group.create_task(self._play(session, session.id, lap, due))
                await asyncio.sleep(0)

    async def _play(self, session: Session, scope: str, lap: int, due: float) -> None:
        """Play one session (or sub-agent) from its first request on."""
        options = self._options
        conversation = Conversation(
            session,
            scope=scope,
            salt=self._salt,
            lap=lap,
            model=self._model,
            dialect=options.dialect,
            ignore_eos=options.ignore_eos,
        )
        session_id = _HEADER_UNSAFE.sub("_", f"{session.id}.{self._salt}.{lap}") if options.session_header and session.named else None
        for index, request in enumerate(session.requests):
            prompt = conversation.prompt(index)  # rendered during the gap, so that the request leaves on time
            await _sleep_until(due)
            if self._closing.is_set():
                return
            sender = f"{scope} {lap}" if options.spread == "session" else f"{session.id} {lap} {index}"
            await self._send(self._client_for(sender), prompt, session_id, due)
            answered_at = perf_counter()
            if request.spawns:
                await asyncio.gather(*(self._play(child, scope, lap, answered_at) for child in request.spawns))
            if index + 1 < len(session.requests):
                gap = min(session.requests[index + 1].gap_s, options.max_gap_s) * options.time_scale
                due = max(answered_at + gap, perf_counter() if request.spawns else 0.0)
        if scope == session.id and self._first_measured is not None:
            self._collector.session_ended()

    def _client_for(self, sender: str) -> StreamClient:
        """The same gateway for the same sender in every run of the same seed, whatever the order in which requests come to be sent."""
        clients = self._clients
        return clients[0] if len(clients) == 1 else random.Random(f"{self._options.seed} {sender}").choice(clients)

    async def _send(self, client: StreamClient, prompt: Prompt, session_id: str | None, due: float) -> None:
        options = self._options
        measured = self._issue_count >= options.warmup and perf_counter() - self._started_at >= options.warmup_s
        if measured and self._first_measured is None:
            self._first_measured, self._measured_from = self._issue_count, perf_counter()
        self._issue_count += 1
        first = self._first_measured
        if options.requests is not None and first is not None and self._issue_count >= first + options.requests:
            self._closing.set()
        bound = self._infinite.add(prompt.chain, prompt.blocks, prompt.block_size, prompt.tokens)
        if options.kv_capacity_tokens is not None:
            self._issued.append((prompt.chain, prompt.blocks, prompt.block_size, prompt.tokens))
        if measured:
            self._collector.issued(prompt.tokens, bound, max(0.0, perf_counter() - due))
        self._in_flight += 1
        self._idle.clear()
        try:
            answer = await client.post(PATHS[options.dialect], prompt.body, session_id)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        self._connect_failures = 0 if answer.connected else self._connect_failures + 1
        if self._connect_failures >= _CONNECT_FAILURES:
            self._closing.set()
        if measured:
            self._last_answer_at = answer.ended_at
            self._collector.answered(answer, prompt.tokens)

    # What is seen of it

    @property
    def _time_limit_s(self) -> float | None:
        return None if self._options.duration_s is None else self._options.warmup_s + self._options.duration_s

    def _lru_bound(self, capacity_tokens: int) -> float | None:
        cache = LruCache(capacity_tokens)
        first = len(self._issued) if self._first_measured is None else self._first_measured
        hits = [cache.add(*prompt) for prompt in self._issued][first:]
        tokens = sum(prompt[3] for prompt in self._issued[first:])
        return sum(hits) / tokens if tokens else None

    def _progress(self) -> Progress:
        options, collector = self._options, self._collector
        total = options.requests
        if not self._endless:
            total = max(0, self._session_requests - options.warmup)
        return Progress(
            policy=self._policy,
            done=collector.requests,
            total=total,
            elapsed_s=perf_counter() - self._started_at,
            duration_s=self._time_limit_s,
            errors=sum(collector.errors.values()),
            hit_rate=collector.hit_rate,
            hit_bound=collector.hit_bound,
            ttft_p50_s=collector.ttft.percentile(50),
            in_flight=self._in_flight,
        )

    async def _report(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            on_progress(self._progress())
            await asyncio.sleep(0.5)

    async def _probe_loop(self) -> None:
        """How late the event loop wakes this task up: what everything else here is late by at least."""
        while True:
            due = perf_counter() + _LOOP_PROBE_S
            await asyncio.sleep(_LOOP_PROBE_S)
            self._collector.loop_lag(max(0.0, perf_counter() - due))


async def _sleep_until(due: float) -> None:
    delay = due - perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)
