"""What runs beside an engine and registers it: `warmroute worker agent`.

It watches the engine as a gateway would, keeps its entry in Redis while the engine is healthy, and follows the engine's KV events into
the shared index, as an owner of its own, so that no gateway needs to reach the engine's publisher.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.config import KVEvents, RedisConfig
from gateway.registry import INDEX_BLOCKS, registry_line
from gateway.sharing import redis_target, remote_index
from gateway.worker_entries import (
    BEAT_S,
    LEASE_S,
    LEAVE,
    MOST_WORKERS,
    REGISTER,
    RUN_BYTES,
    Beat,
    Entry,
    EventsState,
    Seal,
    entry_key,
    packed,
    set_key,
)  # fmt: skip
from kvindex.memory import MemoryIndex
from kvindex.redis_index import key_prefix
from kvindex.redis_line import Line, RedisRefused, RedisUnavailable
from kvindex.shared_index import SharedIndex
from routing.fleet import Worker
from workers.kv_sources import KVEventSource, reachable
from workers.monitor import Endpoint, Monitor
from workers.profile import WorkerProfile

if TYPE_CHECKING:  # needs the extra `exact`
    from gateway.cache_feed import CacheFeed

logger = logging.getLogger("warmroute.agent")

CATCH_UP_S = 30.0  # how long a healthy engine is held back while its KV events are replayed
FLUSH_S = 5.0  # and until the shared index has what was replayed
LEAST_BLOCK_TOKENS = 16  # as gateways have it: smaller blocks of an engine are indexed several at a time


@dataclass
class Registration:
    """What an agent is to register. `profile` has only the fields that are stated; what is left out is asked from the engine."""

    id: str
    url: str  # as the agent reaches it
    advertise: str  # as gateways reach it
    profile: WorkerProfile
    api_key: str | None = None
    kv_events: str | KVEvents = "auto"  # auto, off, or where they are published
    block_tokens: int | None = None  # index block; None: the engine's own


class Agent:
    """Registers one engine in one pool. `run` returns once `stop` is set and the entry is gone.

    Raises ValueError for an id or URL that gateways would refuse. With `kv_events` on, the pool's secret must be in use
    (`kvindex.chain.use_pool_secret`).
    """

    def __init__(self, registration: Registration, redis: RedisConfig, seal: Seal) -> None:
        self.registration = registration
        self.registered = False  # as of the last answer of Redis
        profile = registration.profile
        Entry(id=registration.id, url=registration.advertise, models=[], profile=profile)
        self._seal = seal
        self._redis = redis
        self._prefix = key_prefix(redis.pool)
        self._run = secrets.token_hex(RUN_BYTES // 2).encode()
        self._stated = frozenset(profile.model_fields_set)
        self.endpoint = Endpoint(registration.id, registration.url, profile, api_key=registration.api_key, stated=self._stated)
        # a busy engine may be slow to one probe, but its load is to be known every second
        self._monitor = Monitor([self.endpoint], self._changed, interval_s=BEAT_S, scrape_s=BEAT_S)
        self._line = registry_line(redis_target(redis), self._prefix, self._now)
        self._due = asyncio.Event()
        self._ready = False  # the engine is up, and its events are replayed
        self._refusal = ""
        self._feeds: list[CacheFeed] = []  # by data-parallel rank
        self._index: SharedIndex | None = None
        self._block_tokens: int | None = None

    async def run(self, stop: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            await self._line.start()
            stack.push_async_callback(self._line.close)
            if self.registration.kv_events != "off":
                await self._share(stack)
            stack.push_async_callback(self._stop_feeds)
            stack.push_async_callback(self._monitor.stop)
            await self._monitor.start()
            if not self.endpoint.up:
                logger.info("waiting for the engine at %s to be healthy", self.registration.url)
            beating = asyncio.create_task(self._keep_beating(), name="entry in the registry")
            await stop.wait()
            self._ready = False
            beating.cancel()
            await asyncio.wait([beating])
            await self._leave("stopped")

    # --- the entry ---

    def _now(self) -> None:
        """Renew the entry at once: something has changed, or Redis is back."""
        self._due.set()

    async def _keep_beating(self) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            if not self._ready:
                continue
            try:
                await self._beat()
            except RedisUnavailable:
                self.registered = False  # the line tells of it
            except (RedisRefused, ValueError) as error:
                self._not_registered(str(error))
            except Exception:  # never the end of it
                logger.exception("registering worker %s failed", self.registration.id)

    async def _beat(self) -> None:
        endpoint = self.endpoint
        entry = packed(self._entry())
        beat = Beat(at=time.time(), running=endpoint.running, waiting=endpoint.waiting, kv_use=endpoint.kv_use, events=self._events_state())
        keys = [set_key(self._prefix), entry_key(self._prefix, self.registration.id)]
        stored = self._seal.sign(self._run, entry, beat)
        done = await self._line.run(REGISTER, keys, [self.registration.id, stored, round(LEASE_S * 1000), MOST_WORKERS])
        if done == 1:
            self._refusal = ""
            if not self.registered:
                self.registered = True
                where, models = self.registration.advertise, ", ".join(endpoint.models)
                logger.info("worker %s is registered in pool %s, at %s (models: %s)", self.registration.id, self._redis.pool, where, models)
        elif done == 0:
            self._not_registered("another agent has registered a worker of that name")
        else:
            self._not_registered(f"the pool has {MOST_WORKERS} workers already")

    def _not_registered(self, why: str) -> None:
        self.registered = False
        if why != self._refusal:
            self._refusal = why
            logger.warning("worker %s cannot be registered, trying again every second: %s", self.registration.id, why)

    def _entry(self) -> Entry:
        profile = self.endpoint.profile
        told = self._stated | profile.model_dump(exclude_defaults=True).keys()
        return Entry(
            id=self.registration.id,
            url=self.registration.advertise,
            models=self.endpoint.models,
            profile=WorkerProfile(**{name: getattr(profile, name) for name in told}),
            ranks=max(1, len(self._feeds)),
            block_tokens=self._block_tokens if self._feeds else None,
        )

    async def _leave(self, why: str) -> None:
        """Take the entry away."""
        keys = [set_key(self._prefix), entry_key(self._prefix, self.registration.id)]
        try:
            await self._line.run(LEAVE, keys, [self.registration.id, self._run])
        except (RedisUnavailable, RedisRefused):
            pass  # its lease ends soon
        if self.registered:
            logger.info("worker %s is no longer registered: %s", self.registration.id, why)
        self.registered = False

    # --- the engine ---

    def _changed(self, endpoint: Endpoint, what: str) -> Coroutine[Any, Any, None] | None:
        if what == "up":
            return self._came_up()
        if what == "down":
            self._ready = False
            return self._leave("its engine is down")
        return None

    async def _came_up(self) -> None:
        if self._index is not None:
            try:
                async with asyncio.timeout(CATCH_UP_S):
                    await self._follow(self._index)
            except TimeoutError:
                logger.warning("the replay of the engine's KV events took longer than %g s; it is registered without", CATCH_UP_S)
            except OSError as error:  # what ZMQ cannot connect to; never a reason to do without the worker
                logger.warning("the engine's KV events cannot be followed: %s", error)
            try:
                async with asyncio.timeout(FLUSH_S):  # so that who learns of the worker finds what it holds
                    await self._index.flush()
            except (TimeoutError, RedisUnavailable):
                pass
        self._ready = True
        self._now()

    # --- its KV events ---

    async def _share(self, stack: AsyncExitStack) -> None:
        """Make this agent an owner in the pool's index."""
        redis, owner = self._redis, f"agent-{self._run.decode()}"
        target = redis_target(redis)

        lines: list[Line] = []

        # lines of its own: replays are bulk, and the entry must not wait behind them
        def lines_of(shard: int | None) -> tuple[Line, Line]:
            if not lines or redis.cluster:
                lines.append(registry_line(target, key_prefix(redis.pool, shard), lambda: index.resync(), "redis index"))
                stack.push_async_callback(lines[-1].close)
            return lines[-1], lines[-1]

        remote = remote_index(redis, owner, lines_of)
        remote.resize(INDEX_BLOCKS)
        index = SharedIndex(MemoryIndex(), remote, lines[0])
        for made in lines:
            await made.start()
        await index.start()
        stack.push_async_callback(index.close)
        self._index = index

    def _sources(self) -> list[KVEventSource]:
        given, url = self.registration.kv_events, self.registration.url
        if not isinstance(given, KVEvents):
            return self.endpoint.kv_sources
        return [
            KVEventSource(
                reachable(given.endpoint, url, rank),
                reachable(given.replay_endpoint, url, rank) if given.replay_endpoint else None, given.topic, rank,
            )
            for rank in range(given.ranks)
        ]  # fmt: skip

    async def _follow(self, index: SharedIndex) -> None:
        """Follow what the engine publishes now; returns when what it still has was replayed."""
        from gateway.cache_feed import CacheFeed

        sources = self._sources()
        engine_block = self.endpoint.profile.block_size
        block_tokens = self.registration.block_tokens or engine_block * -(-LEAST_BLOCK_TOKENS // engine_block)
        if [feed.source for feed in self._feeds] != sources or block_tokens != self._block_tokens:
            await self._stop_feeds()
            self._block_tokens = block_tokens
            name = self.registration.id
            names = [name] if len(sources) == 1 else [f"{name}#{rank}" for rank in range(len(sources))]
            profile = self.endpoint.profile
            self._feeds = [
                CacheFeed(source, Worker(rank_name, profile), index, block_tokens) for source, rank_name in zip(sources, names, strict=True)
            ]
            if not sources:
                logger.info("the engine publishes no KV events")
        await asyncio.gather(*(feed.start() for feed in self._feeds))

    async def _stop_feeds(self) -> None:
        feeds, self._feeds = self._feeds, []
        for feed in feeds:
            await feed.stop()

    def _events_state(self) -> EventsState:
        """The worst of all ranks."""
        if not self._feeds:
            return "none"
        trusts = [feed.worker.trust for feed in self._feeds]
        if all(trust.level == "exact" for trust in trusts):
            return "live"
        # what was missed makes predictions too low; where the publisher is away they may be anything
        followed = all(trust.has_events and (trust.level == "exact" or not trust.exact.believed) for trust in trusts)
        return "incomplete" if followed else "lost"
