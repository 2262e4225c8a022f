"""Workers that register themselves: a gateway reads their entries in Redis every second, and lets them join and leave its fleet.

An entry counts when its signature is good, when it is fresh, and when its URL points where the configuration allows (see
`gateway.worker_entries` and `gateway.allowed_urls`). While Redis is away the last list stays, and so it does for a lease's time after
Redis has come back, since it may have lost the entries meanwhile; workers that fail are noticed by their probes as ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.allowed_urls import AllowedURLs, NotAllowed
from gateway.config import LEAST_SECRET, Config, WorkerConfig
from gateway.sharing import redis_target
from gateway.worker_entries import (
    BEAT_S,
    LEASE_S,
    LIST,
    MOST_BYTES,
    MOST_WORKERS,
    Beat,
    Entry,
    EntryRefused,
    EventsState,
    Seal,
    set_key,
    unpacked,
)  # fmt: skip
from kvindex.breaker import Breaker
from kvindex.redis_index import key_prefix
from kvindex.redis_line import Line, RedisRefused, RedisUnavailable
from kvindex.redis_target import RedisTarget

if TYPE_CHECKING:
    from gateway.fleet import Fleet

logger = logging.getLogger("warmroute.registry")

LINE_DEADLINE_S = 0.5  # not on a request's way
FIRST_S = 1.0  # how long a gateway's start waits for the first list
LINGER_S = 10.0  # what is known of a worker that has left is kept this long: its agent may be on its way back
RESOLVE_AGAIN_S = 30.0
RESOLVE_AT_ONCE = 16
INDEX_BLOCKS = 1_000_000  # the shared index is made for at least so many: nobody knows which workers will come
PORTION = 50  # entries proved (10 to 20 us each) before requests get their turn


@dataclass(slots=True)
class _Place:
    """Where an entry's URL leads, or why it is not used."""

    url: str
    used: str | None  # None: refused or not known yet
    until: float  # when to look again


@dataclass(slots=True)
class _Member:
    """A worker that has joined."""

    line: bytes  # its entry as it was signed
    entry: Entry
    used: str  # its URL, as it is used
    events: EventsState = "none"
    left_at: float | None = None


class Registry:
    """Lets registered workers join a fleet. Raises ValueError where its secret is missing."""

    least_blocks = INDEX_BLOCKS

    def __init__(self, config: Config, fleet: Fleet) -> None:
        registry, redis = config.registry, config.index.redis
        self._seal = seal(registry.secret_env, redis.pool)
        self._allowed = AllowedURLs(registry.allow)
        self._api_key_env = registry.api_key_env
        self._fleet = fleet
        self._prefix = key_prefix(redis.pool)
        self._configured = {worker.id for worker in config.workers}
        self._configured_at = {_host_port(worker.url): worker.id for worker in config.workers}
        self._line = registry_line(redis_target(redis), self._prefix, self._came_back)
        self._connected = asyncio.Event()
        self._members: dict[str, _Member] = {}
        self._at: dict[tuple[str, int], str] = {}  # host and port -> the member there, unless it has left
        self._lines: dict[bytes, Entry] = {}  # those that were read lately, so that they are not read anew each second
        self._places: dict[str, _Place] = {}  # by worker
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._resolvers = asyncio.Semaphore(RESOLVE_AT_ONCE)
        self._told: dict[tuple[str, str], None] = {}  # refusals that were logged: worker, reason
        self._looked_at: float | None = None
        self._patient_until = 0.0  # until then, who is missing in the list is not taken out

    @property
    def members(self) -> list[str]:
        """Ids of the registered workers that take requests, or will once a probe has found them healthy."""
        return [worker_id for worker_id, member in self._members.items() if member.left_at is None]

    async def start(self) -> None:
        """Connect, and let those join who are registered already; Redis is waited for in the background when it is not there."""
        await self._line.start()
        try:
            async with asyncio.timeout(FIRST_S):
                await self._connected.wait()
                await self._look()
                while self._resolving:
                    await asyncio.wait(self._resolving.values())
                    await self._look()
        except TimeoutError:
            if not self._connected.is_set():
                logger.warning("the registry of workers cannot be read yet: Redis is not there")

    async def follow(self) -> None:
        """Look every second, for good."""
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self._look()
            except Exception:  # never the end of it
                logger.exception("reading the registry of workers failed")

    async def stop(self) -> None:
        for task in self._resolving.values():
            task.cancel()
        await self._line.close()

    def _came_back(self) -> None:
        if self._looked_at is not None:
            self._patient_until = asyncio.get_running_loop().time() + LEASE_S
        self._connected.set()

    # --- the list ---

    async def _look(self) -> None:
        try:
            reply = await self._line.run(LIST, [set_key(self._prefix)], [MOST_WORKERS, MOST_BYTES])
        except RedisUnavailable:
            return  # the line tells of it
        except RedisRefused as error:
            self._warn_once("", f"the registry of workers cannot be read: {error}")
            return
        now = asyncio.get_running_loop().time()
        if (
            self._looked_at is not None and now - self._looked_at > LEASE_S / 2
        ):  # Redis may have been frozen, and leases ended without anybody's fault
            self._patient_until = now + LEASE_S
        self._looked_at = now
        genuine: dict[str, tuple[bytes, Entry, Beat]] = {}
        refused: set[str] = set()
        lines: dict[bytes, Entry] = {}
        for number, (raw_id, stored) in enumerate(zip(reply[::2], reply[1::2], strict=True)):
            if number % PORTION == PORTION - 1:
                await asyncio.sleep(0)
            worker_id = raw_id.decode("utf-8", "backslashreplace")[:256]
            try:
                if not stored:
                    raise EntryRefused(f"its entry has more than {MOST_BYTES} bytes")
                line, beat = self._seal.open(stored, time.time())
                entry = self._lines.get(line)
                if entry is None or entry.id != worker_id:
                    entry = unpacked(line, worker_id)
                    self._check_name(entry)
            except EntryRefused as why:
                self._refuse(worker_id, str(why))
                refused.add(worker_id)
                continue
            lines[line] = entry
            genuine[worker_id] = line, entry, beat
        self._lines = lines
        self._take_out(genuine, refused, now)
        for number, (worker_id, (line, entry, beat)) in enumerate(genuine.items()):
            if number % PORTION == PORTION - 1:
                await asyncio.sleep(0)
            self._take_in(worker_id, line, entry, beat, now)
        for worker_id in self._places.keys() - genuine.keys() - self._members.keys():
            del self._places[worker_id]

    def _check_name(self, entry: Entry) -> None:
        if entry.id in self._configured:
            raise EntryRefused("a worker of that name is in this gateway's configuration")
        place = _host_port(entry.url)
        if place in self._configured_at:
            raise EntryRefused(f"its URL is that of worker {self._configured_at[place]} in this gateway's configuration")

    def _refuse(self, worker_id: str, why: str) -> None:
        self._warn_once(worker_id, f"registered worker {worker_id!r} is not used: {why}")

    def _warn_once(self, worker_id: str, text: str) -> None:
        if (worker_id, text) in self._told:
            return
        while len(self._told) >= MOST_WORKERS:
            del self._told[next(iter(self._told))]
        self._told[worker_id, text] = None
        logger.warning("%s", text)

    # --- who leaves, who comes ---

    def _take_out(self, genuine: dict[str, tuple[bytes, Entry, Beat]], refused: set[str], now: float) -> None:
        for worker_id, member in list(self._members.items()):
            if member.left_at is None:
                # an entry that is there and refused is no doing of a Redis that lost its data
                if worker_id in refused or (worker_id not in genuine and now >= self._patient_until):
                    self._leaves(worker_id, "its entry is refused" if worker_id in refused else "its agent is gone, or its engine is down")
            elif worker_id not in genuine and now - member.left_at > LINGER_S and self._is_idle(worker_id):
                self._forget(worker_id)

    def _leaves(self, worker_id: str, why: str) -> None:
        logger.warning("worker %s has left: %s", worker_id, why)
        member = self._members[worker_id]
        member.left_at = asyncio.get_running_loop().time()
        self._at.pop(_host_port(member.entry.url), None)
        self._fleet.leave(worker_id)

    def _is_idle(self, worker_id: str) -> bool:
        return not any(worker.in_flight for worker in self._fleet.workers_of(worker_id))

    def _forget(self, worker_id: str) -> None:
        member = self._members.pop(worker_id)
        if member.left_at is None:
            self._at.pop(_host_port(member.entry.url), None)
        self._fleet.remove(worker_id)

    def _take_in(self, worker_id: str, line: bytes, entry: Entry, beat: Beat, now: float) -> None:
        used = self._place(worker_id, entry.url, now)
        member = self._members.get(worker_id)
        if used is None:
            if member is not None and member.left_at is None and worker_id not in self._resolving:
                self._leaves(worker_id, "its address is no longer allowed")
            return
        if member is not None and (member.used, member.entry.ranks) != (used, entry.ranks):
            logger.info("worker %s is another one now", worker_id)
            self._forget(worker_id)
            member = None
        arrives = member is None or member.left_at is not None
        if arrives and (other := self._at.setdefault(_host_port(entry.url), worker_id)) != worker_id:
            self._refuse(worker_id, f"its URL is that of the registered worker {other}")
            return
        if member is None:
            member = self._members[worker_id] = _Member(line, entry, used)
            logger.info("worker %s has registered, at %s", worker_id, used)
            self._fleet.join(self._as_configured(entry, used), entry.models, entry.ranks)
        elif member.line != line:
            member.line, member.entry = line, entry
            self._fleet.reconfigure(worker_id, entry.models, entry.profile)
        if member.left_at is not None:
            member.left_at = None
            logger.info("worker %s has come back", worker_id)
            self._fleet.come_back(worker_id)
        self._fleet.report_load(worker_id, beat.running, beat.waiting, beat.kv_use)
        if member.events != beat.events:
            self._events_changed(worker_id, member.events, beat.events)
            member.events = beat.events
        self._check_blocks(entry)

    def _as_configured(self, entry: Entry, used: str) -> WorkerConfig:
        profile = {name: getattr(entry.profile, name) for name in entry.profile.model_fields_set}
        return WorkerConfig(url=used, name=entry.id, api_key_env=self._api_key_env, kv_events="off", **profile)

    def _events_changed(self, worker_id: str, before: EventsState, state: EventsState) -> None:
        """The shared index tells what the agent writes there; this is how far that can be believed."""
        for worker in self._fleet.workers_of(worker_id):
            if before == "lost":
                worker.trust.events_recovered()
            if state == "none":
                worker.trust.events_detached("its agent follows no KV events")
            elif state == "lost":
                worker.trust.events_lost("its agent no longer gets its KV events")
            elif state == "incomplete":
                worker.trust.events_incomplete("its agent could not get the KV events of what it held before")

    def _check_blocks(self, entry: Entry) -> None:
        if entry.block_tokens is None:
            return
        for model in entry.models:
            ours = self._fleet.router.token_blocks.get(model)
            if ours and ours != entry.block_tokens:
                self._warn_once(
                    entry.id,
                    f"the KV events of worker {entry.id} are of no use: its agent makes index blocks of {entry.block_tokens} tokens, "
                    f"this gateway of {ours}; give both the same block_tokens for model {model}",
                )

    # --- where they are ---

    def _place(self, worker_id: str, url: str, now: float) -> str | None:
        """The URL to use, as far as it is known by now."""
        place = self._places.get(worker_id)
        if place is None or place.url != url:
            place = self._places[worker_id] = _Place(url, None, float("-inf"))
        if now >= place.until and worker_id not in self._resolving:
            self._resolving[worker_id] = asyncio.ensure_future(self._resolve(worker_id, place))
        return place.used

    async def _resolve(self, worker_id: str, place: _Place) -> None:
        try:
            async with self._resolvers:
                place.used = await self._allowed.place(place.url)
        except NotAllowed as why:
            place.used = None
            self._refuse(worker_id, str(why))
        except OSError as error:  # a name server's trouble is no reason to do without a worker that was found before
            if place.used is None:
                self._refuse(worker_id, f"its URL cannot be used now: {error}")
        finally:
            place.until = asyncio.get_running_loop().time() + (RESOLVE_AGAIN_S if place.used is not None else RESOLVE_AGAIN_S / 6)
            del self._resolving[worker_id]


def seal(secret_env: str, pool: str) -> Seal:
    """With the secret from the environment. Raises ValueError."""
    try:
        return Seal(os.environ.get(secret_env, ""), pool)
    except ValueError:
        raise ValueError(
            f"the registry of workers needs a secret of {LEAST_SECRET} characters or more in {secret_env}, the same for agents and "
            "gateways; make one with: openssl rand -hex 32"
        ) from None


def registry_line(target: RedisTarget, prefix: str, on_up: Callable[[], None], name: str = "redis registry") -> Line:
    """A line for what is not on a request's way: it gives a slow Redis more time, and a dead connection up within seconds all the same."""
    breaker = Breaker(failures=3, within_s=3.0)
    return Line(target, prefix.encode(), deadline_s=LINE_DEADLINE_S, breaker=breaker, on_up=on_up, name=name)


def _host_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    return (parts.hostname or "").rstrip("."), port or (443 if parts.scheme == "https" else 80)
