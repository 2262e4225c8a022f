"""What this gateway shares with the other replicas through Redis: the index, load, sessions, and who follows which engine's events.

Redis is asked for one thing on a request's way (`ask`: the match and the session's record, in one round trip with a deadline) and fed
behind it. When it is away, `ask` answers nothing at once, and the gateway goes on with what it knows by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from gateway.config import LEAST_SECRET, IndexConfig, RedisConfig
from kvindex.chain import use_pool_secret
from kvindex.memory import MemoryIndex
from kvindex.redis_index import RedisIndex, ShardedIndex, key_prefix
from kvindex.redis_line import Command, Line, RedisRefused, RedisUnavailable, Script, Subscriber
from kvindex.redis_target import RedisTarget
from kvindex.shared_index import SharedIndex
from routing.others import Others
from routing.policies import POLICIES
from routing.router import Decision, Router, RouteRequest
from routing.sessions import SessionRecord

logger = logging.getLogger("warmroute.sharing")

clock = time.perf_counter  # the router's

TELL_S = 0.002  # changes of load wait this long for others to go with them
TELL_ALL_S = 0.5  # everything is told this often, so that what was lost is made good
SETTINGS_TURNS = 4  # so many of these between two looks at the pool's settings
LEASE_S = 3.0  # a gateway not heard of for longer is gone
CONNECT_S = 1.0
FOLLOW_S = 1.0  # who follows which worker's events is looked at this often
RESPONSE_TTL_S = 3600.0

# KEYS: one a lease; ARGV: who, for how long (ms), then "1" (take or keep) or "0" (give up) for each. Reply: 1 for each that is held.
_LEASES = Script(
    """#!lua flags=allow-oom
local held = {}
for at, key in ipairs(KEYS) do
  local holder = redis.call('GET', key)
  held[at] = 0
  if ARGV[at + 2] == '1' and (not holder or holder == ARGV[1]) then
    redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
    held[at] = 1
  elseif holder == ARGV[1] then
    redis.call('DEL', key)
  end
end
return held
"""
)

# KEYS: the counter of new sessions (a hash), then the session's record, if it has a key. Reply: the record; for a new session its ticket.
_RECORD_OR_TICKET = Script(
    """#!lua flags=allow-oom
return KEYS[2] and redis.call('GET', KEYS[2]) or redis.call('HINCRBY', KEYS[1], 'placed', 1)
"""
)


class Sharing:
    """One gateway's part in a pool. `index` is the KVIndex to use; `attach` the router before `start`. Raises ValueError."""

    def __init__(self, config: IndexConfig, local: MemoryIndex):
        redis = config.redis
        secret = os.environ.get(redis.secret_env, "")
        if len(secret) < LEAST_SECRET:
            raise ValueError(
                f"index.backend redis needs a secret of {LEAST_SECRET} characters or more in {redis.secret_env}, the same on every "
                "gateway of the pool; make one with: openssl rand -hex 32"
            )
        use_pool_secret(secret)
        self._secret = blake2b(secret.encode(), digest_size=32, person=b"warmroute-ids").digest()
        self.gateway_id = secrets.token_hex(6)
        self._session_ttl_s = round(config.session_ttl_s)
        self._target = redis_target(redis)
        self._prefix = key_prefix(redis.pool)
        self._channel = f"{self._prefix}load"
        self._line = self._new_line(redis, self._prefix, "redis", on_up=self._came_back)
        self._lines = [self._line]
        bulk = self._new_line(redis, self._prefix, "redis writes", on_up=lambda: self.index.resync())
        self._lines.append(bulk)

        def lines_of(shard: int | None) -> tuple[Line, Line]:
            if shard is None or not redis.cluster:
                return self._line, bulk
            key = key_prefix(redis.pool, shard)  # its hash tag may be on another node
            own = self._new_line(redis, key, f"redis shard {shard}")
            own_bulk = self._new_line(redis, key, f"redis shard {shard} writes", on_up=lambda: self.index.resync())
            self._lines += [own, own_bulk]
            return own, own_bulk

        self.remote = remote_index(redis, self.gateway_id, lines_of)
        self.index = SharedIndex(local, self.remote, bulk, lease_s=LEASE_S)
        self._subscriber = Subscriber(self._target, self._channel, self._heard, name="redis load channel")
        self.lookups = 0
        self.lookups_failed = 0
        self.settled = 0  # requests that needed no lookup
        self.lookup_s = 0.0
        self._tell_soon: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._down_since: float | None = None
        self._connected = asyncio.Event()
        self._background: set[asyncio.Future[None]] = set()
        self._stopped = False
        self._policy: str | None = None  # the pool's, where one was set
        self._policy_told = True  # Redis has it
        self.followed: set[str] = set()  # workers whose events this gateway is to follow

    def _new_line(self, redis: RedisConfig, key: str, name: str, on_up: Callable[[], None] = lambda: None) -> Line:
        return Line(self._target, key.encode(), deadline_s=redis.deadline_ms / 1000, on_up=on_up, name=name)

    def attach(self, router: Router) -> None:
        """Share what this router decides."""
        self.router = router
        self.others = Others(router, self.gateway_id, LEASE_S)

    @property
    def degraded(self) -> bool:
        """Redis cannot be asked now: this gateway goes by what it knows itself."""
        return not self._line.up

    async def connect(self) -> None:
        """Connect; returns when Redis is there, or has not been for a moment: it is waited for in the background then."""
        for line in self._lines:
            await line.start()
        await self._subscriber.start()
        self._tasks = [asyncio.create_task(self._keep_telling(), name="load to the other gateways")]
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._connected.wait()
        except TimeoutError:
            logger.warning("Redis at %s is not there yet; starting with what this gateway knows itself", self._target)

    async def start(self, capacity_blocks: int) -> None:
        """Share the index. `capacity_blocks`: what all workers' caches hold together, in index blocks."""
        self.remote.resize(capacity_blocks)
        await self.index.start()

    async def stop(self) -> None:
        """Say goodbye, so that nobody waits for a lease to end."""
        self._stopped = True  # after the goodbye nothing more is said
        ending = [*self._tasks, *self._background]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._tell_soon is not None:
            self._tell_soon.cancel()
        try:
            await self._line.call("PUBLISH", self._channel, orjson.dumps(self.others.gone()))
            if self.followed:
                await self._claim(dict.fromkeys(self.followed, False))
        except (RedisUnavailable, RedisRefused):
            pass
        await self._subscriber.close()
        await self.index.close()
        for line in self._lines:
            await line.close()

    def gauges(self) -> Iterable[tuple[str, str, dict[str, float]]]:
        """For /metrics: (name, help, value)."""
        index = self.index
        values = [
            ("redis_degraded", "Whether Redis cannot be asked now, so that this gateway goes by what it knows itself", self.degraded),
            ("gateways", "Gateways of the pool that are heard of, this one included", 1 + len(self.others)),
            ("shared_index_synced", "Whether Redis has all that this gateway knows", index.synced),
            ("shared_index_uploads", "Times that everything was uploaded to Redis", index.resyncs),
            ("shared_index_written_blocks", "Blocks stored and removed in Redis", index.written_blocks),
            ("shared_index_refused_blocks", "Blocks that others do not learn of because Redis is full", index.refused_blocks),
            ("shared_lookups", "Requests for which Redis was asked", self.lookups),
            ("shared_lookups_failed", "Those that got no answer in time", self.lookups_failed),
            ("shared_lookups_spared", "Requests of which the home was known and free, so that Redis had nothing to add", self.settled),
            ("shared_lookup_seconds", "Seconds spent waiting for Redis's answers, in all", self.lookup_s),
        ]
        for name, text, value in values:
            yield name, text, {"": float(value)}
        yield "worker_events_followed", "Whether this gateway follows the worker's KV events", {
            worker: float(worker in self.followed) for worker in self.router.workers
        }

    # --- on a request's way ---

    async def ask(self, request: RouteRequest) -> Mapping[str, int] | None:
        """The match of what the other gateways know; what they know of its session, or the ticket of a new one, is put into the
        request. None where Redis is away, or where nothing it could say would change the decision."""
        session_id = self.router.session_id(request)
        if not request.hashes or self.degraded:
            return None
        if self.router.is_settled(request):
            self.settled += 1
            return None
        started = clock()
        keys = [self._key(b"S", session_id)] if session_id is not None else []
        commands: list[Command] = [("GET", key) for key in keys]
        if self.others.names:  # else there is nobody to stay in order with
            commands = [_RECORD_OR_TICKET.command([self._key(b"T", b""), *keys], ())]
        told = self._line.pipeline(commands)
        known = await self.index.lookup(request.hashes)  # in the same write
        self.lookups += 1
        if known is None:
            self.lookups_failed += 1
        try:
            (reply,) = await told or [None]
        except RedisUnavailable:
            reply = None
        if isinstance(reply, bytes):
            request.shared = SessionRecord.decode(reply)
        elif isinstance(reply, int):
            request.ticket = reply
        self.lookup_s += clock() - started
        return known

    def placed(self, decision: Decision) -> None:
        """Tell the others of a decision: its load within a few milliseconds, its session behind it."""
        self.changed()
        session_id = decision.request.session_id
        record = decision.session_record()
        if session_id is not None and record is not None:
            self.index.behind("SET", self._key(b"S", session_id), record.encode(), "EX", self._session_ttl_s)

    def changed(self) -> None:
        """The load has changed (a decision, a first token, an end)."""
        if self._tell_soon is None:
            self._tell_soon = asyncio.get_running_loop().call_later(TELL_S, self._tell)

    def answered(self, response_id: str, worker_id: str) -> None:
        """A worker keeps a response that later requests may continue."""
        self.index.behind("SET", self._key(b"R", self._digest(response_id)), worker_id, "EX", round(RESPONSE_TTL_S))

    async def worker_of(self, response_id: str) -> str | None:
        """The worker that keeps a response, as any gateway knows."""
        try:
            reply = await self._line.call("GET", self._key(b"R", self._digest(response_id)))
        except (RedisUnavailable, RedisRefused):
            return None
        return reply.decode("utf-8", "replace") if reply is not None else None

    def _key(self, kind: bytes, name: bytes) -> bytes:
        return self._prefix.encode() + kind + name

    def _digest(self, name: str) -> bytes:
        return blake2b(name.encode("utf-8", "surrogatepass"), key=self._secret, digest_size=16).digest()

    # --- load and sessions ---

    def _tell(self, full: bool = False) -> None:
        if self._tell_soon is not None:
            self._tell_soon.cancel()
            self._tell_soon = None
        if self._stopped or not self._line.up:
            return  # what has changed is told when it is back
        message = self.others.message(clock(), full)
        if message is not None:
            self._line.pipeline([("PUBLISH", self._channel, orjson.dumps(message))])

    def _heard(self, data: bytes) -> None:
        try:
            message = orjson.loads(data)
        except orjson.JSONDecodeError:
            message = None
        if isinstance(message, dict) and isinstance(policy := message.get("policy"), str):
            if message.get("gateway") != self.gateway_id and self._policy_told:  # else there is a newer one to be told
                self.use_policy(policy)
            return
        self.others.heard(message, clock())

    async def _keep_telling(self) -> None:
        for turn in itertools.count():
            try:
                self._tell(full=True)
                self.others.expire(clock())
                if turn % SETTINGS_TURNS == 0:  # what was published may have been missed
                    await self._settle_policy()
            except Exception:  # a fault in one turn must not be the end of all
                logger.exception("telling the other gateways failed")
            await asyncio.sleep(TELL_ALL_S)

    # --- settings of the pool ---

    def share_policy(self, name: str) -> None:
        """Let all gateways of the pool use this policy, also those that start later."""
        self._policy, self._policy_told = name, False
        self._in_background(self._settle_policy())

    def use_policy(self, name: str) -> None:
        """Use the policy that the pool uses."""
        if name in POLICIES:
            self._policy, self._policy_told = name, True
            if name != self.router.policy.name:
                logger.info("the pool's policy is %s", name)
                self.router.use_policy(name)

    def _came_back(self) -> None:
        self._connected.set()
        self._in_background(self._settle_policy())

    async def _settle_policy(self) -> None:
        """Tell the pool the policy that was set here, or learn the one that is; a Redis that has lost it gets it again."""
        name, told = self._policy, self._policy_told
        try:
            kept = await self._line.call("GET", f"{self._prefix}P") if told else None
            if (name, told) != (self._policy, self._policy_told):
                return  # set meanwhile: that is settled by itself
            if kept is not None:
                self.use_policy(kept.decode("utf-8", "replace"))
            elif name is not None:
                await self._line.call("SET", f"{self._prefix}P", name, *(("NX",) if told else ()))
                if name == self._policy:
                    self._policy_told = True
                await self._line.call("PUBLISH", self._channel, orjson.dumps({"gateway": self.gateway_id, "policy": name}))
        except (RedisUnavailable, RedisRefused):
            pass  # again when it is back

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- who follows which worker's events ---

    async def follow(self, workers: Iterable[str]) -> set[str]:
        """Which of these workers' KV events this gateway has to follow now: those whose lease it gets. To be asked every second.

        Each worker has one gateway that is to follow it, by rendezvous hash over the gateways that live; its lease sees to it that
        no two do. While Redis is away for longer than a lease, everybody follows all, and gives up what is not theirs afterwards.
        """
        now = clock()
        wanted = {worker: self._is_mine(worker) for worker in workers}
        try:
            self.followed = await self._claim(wanted)
            self._down_since = None
        except (RedisUnavailable, RedisRefused):
            self._down_since = self._down_since or now
            if now - self._down_since > LEASE_S:
                self.followed = set(wanted)
        return self.followed

    def _is_mine(self, worker: str) -> bool:
        def weight(gateway: str) -> bytes:
            return blake2b(f"{gateway}|{worker}".encode(), digest_size=8).digest()

        return all(weight(self.gateway_id) > weight(other) for other in self.others.names)

    async def _claim(self, wanted: Mapping[str, bool]) -> set[str]:
        if not wanted:
            return set()
        keys = [f"{self._prefix}E:{worker}" for worker in wanted]
        flags = ["1" if want else "0" for want in wanted.values()]
        held = await self._line.run(_LEASES, keys, [self.gateway_id, round(LEASE_S * 1000), *flags])
        return {worker for worker, mine in zip(wanted, held, strict=True) if mine}


def remote_index(redis: RedisConfig, owner: str, lines_of: Callable[[int | None], tuple[Line, Line]]) -> RedisIndex | ShardedIndex:
    """The pool's index as `owner` writes it. `lines_of` gives a shard's lines for matches and for bulk; None: the index is one."""
    indexes = []
    for shard in [None] if redis.shards == 1 else range(redis.shards):
        line, bulk = lines_of(shard)
        indexes.append(RedisIndex(line, redis.pool, owner, capacity_blocks=1, shard=shard, bulk=bulk))
    return indexes[0] if redis.shards == 1 else ShardedIndex(indexes)


def redis_target(redis: RedisConfig) -> RedisTarget:
    """The server that a configuration names. Raises ValueError."""
    password = os.environ.get(redis.password_env) if redis.password_env else None
    if redis.password_env and not password:
        raise ValueError(f"index.redis.password_env names {redis.password_env}, which is not set in the environment")
    return RedisTarget(
        url=redis.url, nodes=tuple(redis.nodes), sentinel_master=redis.sentinel_master, cluster=redis.cluster, password=password,
        ca_file=redis.ca_file, cert_file=redis.cert_file, key_file=redis.key_file,
    )  # fmt: skip
