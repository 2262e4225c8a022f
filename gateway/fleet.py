"""Ties the workers together: their connection pools, the monitor that watches them, and the router that places requests."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.config import Config, KVEvents, WorkerConfig
from gateway.upstream import Pool
from kvindex.index import KVIndex
from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory
from routing.fleet import Worker
from routing.router import Router
from routing.sessions import SessionTable
from routing.trust import LEVELS
from workers.kv_sources import KVEventSource, reachable
from workers.monitor import Endpoint, Monitor
from workers.profile import WorkerProfile

if TYPE_CHECKING:  # these need the extras `exact` and `redis`
    from gateway.cache_feed import CacheFeed
    from gateway.registry import Registry
    from gateway.sharing import Sharing
    from gateway.token_mode import TokenMode

logger = logging.getLogger("warmroute.fleet")

TEXT_BYTES_PER_TOKEN = 4
LEAST_BLOCK_TOKENS = 16  # smaller blocks of an engine are indexed several at a time
FOLLOW_S = 1.0  # of several gateways, which one follows a worker's events is looked at this often
CATCH_UP_S = 30.0  # how long a worker that comes up is held back while its KV events are replayed


class Fleet:
    """The workers of one gateway. Raises TokenizerError for a tokenizer that cannot be used.

    `start` returns when every worker has been probed once and its KV events were replayed.

    An endpoint is a URL; a worker is what the router places requests on. They are the same, but for an engine with several
    data-parallel ranks behind one URL: each rank has a cache and a batch of its own, so each is a worker.
    """

    def __init__(self, config: Config):
        self.config = config
        block_bytes = config.index.block_tokens * TEXT_BYTES_PER_TOKEN
        self.index: KVIndex = MemoryIndex()
        self.sharing: Sharing | None = None
        if config.index.backend == "redis":
            from gateway.sharing import Sharing

            self.sharing = Sharing(config.index, self.index)
            self.index = self.sharing.index
        memory = RoutingMemory(self.index, ttl_s=config.index.ttl_s)
        sessions = SessionTable(ttl_s=config.index.session_ttl_s)
        self.router = Router(self.index, memory, block_units=block_bytes, policy=config.policy, sessions=sessions)
        if self.sharing is not None:
            self.sharing.attach(self.router)
        self.aliases = {alias: model.name for model in config.models for alias in model.aliases}
        self.models = {model.name: model for model in config.models}
        self.token_modes: dict[str, TokenMode] = {}  # model -> how its prompts become tokens
        self.loras: set[str] = set()  # served models that are LoRA adapters
        self.pools: dict[str, Pool] = {}  # by worker
        self.endpoints: dict[str, Endpoint] = {}  # by worker
        self.feeds: dict[str, CacheFeed] = {}  # by worker
        self._watched: list[Endpoint] = []
        self._workers_of: dict[str, list[str]] = {}  # endpoint -> workers
        self._headers: dict[str, bytes] = {}  # worker -> request headers that only it gets
        self._sources_of: dict[str, KVEventSource] = {}  # worker -> its publisher of events
        self._event_config = {worker.id: worker.kv_events for worker in config.workers}
        self._ranks: dict[str, int] = {}  # endpoint -> data-parallel ranks, where its agent tells them
        self._left: set[str] = set()  # endpoints that get no new requests, however healthy
        self._tasks: set[asyncio.Future[Any]] = set()
        for model in config.models:
            if model.tokenizer is not None:
                from gateway.token_mode import token_mode

                self.token_modes[model.name] = token_mode(model)
        for worker in config.workers:
            self._watched.append(self._add(worker))
        upstream = config.upstream
        self.monitor = Monitor(
            self._watched, self._changed,
            interval_s=upstream.probe_interval_s, timeout_s=upstream.probe_timeout_s, failures=upstream.probe_failures,
        )  # fmt: skip
        self.registry: Registry | None = None
        if config.registry.enabled:
            from gateway.registry import Registry

            self.registry = Registry(config, self)

    def _add(self, worker: WorkerConfig) -> Endpoint:
        key = os.environ.get(worker.api_key_env or "")
        stated = frozenset(worker.model_fields_set & WorkerProfile.model_fields.keys())
        endpoint = Endpoint(worker.id, worker.url, worker.profile(), api_key=key, stated=stated)
        models = [worker.model] if worker.model else []
        self._place(endpoint, [worker.id], models)
        return endpoint

    def _place(self, endpoint: Endpoint, worker_ids: list[str], models: list[str]) -> None:
        """Let the router know an endpoint by these workers, one per rank; those it had before go."""
        pool = self._pool_of(endpoint)
        for gone in self._workers_of.get(endpoint.id, []):
            if gone not in worker_ids:
                self._forget(gone)
        self._workers_of[endpoint.id] = worker_ids
        profile = endpoint.profile
        if len(worker_ids) > 1:  # capacity is told as a sum over the ranks
            profile = profile.model_copy(update={"kv_capacity_tokens": max(1, profile.kv_capacity_tokens // len(worker_ids))})
        for rank, worker_id in enumerate(worker_ids):
            headers = b"authorization: Bearer " + endpoint.api_key.encode() + b"\r\n" if endpoint.api_key else b""
            if len(worker_ids) > 1:
                headers += b"x-data-parallel-rank: %d\r\n" % rank
            self._headers[worker_id] = headers
            self.endpoints[worker_id] = endpoint
            if pool is not None:
                self.pools[worker_id] = pool
            known = worker_id in self.router.workers
            worker = self.router.add_worker(worker_id, models, profile)
            if not known:
                self.router.set_up(worker, False)

    def _forget(self, worker_id: str) -> None:
        self.router.remove_worker(worker_id)
        self.router.events.pop(worker_id, None)
        for by_worker in (self.endpoints, self.pools, self._headers, self._sources_of):
            by_worker.pop(worker_id, None)
        if (feed := self.feeds.pop(worker_id, None)) is not None:
            self._in_background(feed.stop())

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pool_of(self, endpoint: Endpoint) -> Pool | None:
        return next((self.pools[w] for w, e in self.endpoints.items() if e is endpoint and w in self.pools), None)

    async def start(self) -> None:
        for worker_id, endpoint in self.endpoints.items():
            self._open_pool(worker_id, endpoint)
        if self.sharing is not None:
            await self.sharing.connect()
        if self.registry is not None:
            await self.registry.start()
        await self.monitor.start()
        if self.registry is not None:
            self._in_background(self.registry.follow())
        if self.sharing is not None:
            blocks = sum(self.router.memory.capacity_blocks(worker_id) for worker_id in self.router.workers)
            await self.sharing.start(max(1 if self.registry is None else self.registry.least_blocks, blocks))
            self._in_background(self._keep_following())

    def _open_pool(self, worker_id: str, endpoint: Endpoint) -> None:
        upstream = self.config.upstream
        pool = Pool(endpoint.url, connect_timeout_s=upstream.connect_timeout_s, idle_s=upstream.idle_s)
        self.pools[worker_id] = pool
        endpoint.heard = lambda: pool.heard_at

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.registry is not None:
            await self.registry.stop()
        await self.monitor.stop()
        for feed in self.feeds.values():
            await feed.stop()
        for pool in self.pools.values():
            pool.close()
        if self.sharing is not None:
            await self.sharing.stop()

    # --- workers that come and go while the gateway runs ---

    def join(self, worker: WorkerConfig, models: list[str], ranks: int) -> None:
        """Add a worker: it takes requests once a probe has found it healthy. Its KV events, if any, are followed elsewhere."""
        self._event_config[worker.id] = "off"
        self._ranks[worker.id] = ranks
        endpoint = self._add(worker)
        endpoint.models = models
        self._open_pool(worker.id, endpoint)
        self._place(endpoint, _rank_names(worker.id, ranks), models)
        self.monitor.add(endpoint)

    def leave(self, endpoint_id: str) -> None:
        """Take a worker out at once: it gets no new requests, and those in flight go on. What is known of its cache stays."""
        self._left.add(endpoint_id)
        for worker in self.workers_of(endpoint_id):
            self.router.set_up(worker, False)

    def come_back(self, endpoint_id: str) -> None:
        """Undo `leave`."""
        self._left.discard(endpoint_id)
        for worker in self.workers_of(endpoint_id):
            self.router.set_up(worker, self.endpoints[worker.id].up)

    def reconfigure(self, endpoint_id: str, models: list[str], profile: WorkerProfile) -> None:
        """Take over what is newly known of a worker."""
        names = self._workers_of[endpoint_id]
        endpoint = self.endpoints[names[0]]
        endpoint.models, endpoint.profile = models, profile
        self._place(endpoint, names, models)

    def remove(self, endpoint_id: str) -> None:
        """Forget a worker altogether. Its requests in flight go on, if there are any."""
        self.leave(endpoint_id)
        self._left.discard(endpoint_id)
        names = self._workers_of.pop(endpoint_id)
        self.monitor.remove(self.endpoints[names[0]])
        self._in_background(_close_when_idle(self.pools[names[0]]))
        for worker_id in names:
            self._forget(worker_id)
            self.index.clear(f"kv:{worker_id}")  # what was expected of events that are followed elsewhere
        del self._event_config[endpoint_id], self._ranks[endpoint_id]

    def workers_of(self, endpoint_id: str) -> list[Worker]:
        """The workers at an endpoint, by data-parallel rank; none for one that is not known."""
        return [self.router.workers[worker_id] for worker_id in self._workers_of.get(endpoint_id, ())]

    def report_load(self, endpoint_id: str, running: float, waiting: float, kv_use: float) -> None:
        """What a worker's agent read from its engine."""
        endpoint = self.endpoints[self._workers_of[endpoint_id][0]]
        endpoint.running, endpoint.waiting, endpoint.kv_use = running, waiting, kv_use
        self._changed(endpoint, "load")

    # --- what the monitor tells ---

    def _changed(self, endpoint: Endpoint, what: str) -> Coroutine[Any, Any, None] | None:
        names = self._workers_of.get(endpoint.id)
        if not names or self.endpoints[names[0]] is not endpoint:  # a probe that was under way when it was removed
            return None
        if what == "up":
            return self._came_up(endpoint)
        if what == "discovered":
            self._discovered(endpoint)
        elif what == "down":
            self._went_down(endpoint)
        elif what == "load":
            for worker_id in self._workers_of[endpoint.id]:
                worker = self.router.workers[worker_id]
                worker.scraped_running, worker.scraped_waiting = endpoint.running, endpoint.waiting
                worker.scraped_kv_use = endpoint.kv_use
                pool = self.pools[worker_id]
                if pool.connections:
                    worker.network_s = pool.rtt_s
        return None

    def _discovered(self, endpoint: Endpoint) -> None:
        self.loras |= endpoint.loras - self.models.keys()
        configured = [model for model in endpoint.models if model in self.models and model in self.token_modes]
        for number, model in enumerate(configured):
            self._use_tokens(model, endpoint, endpoint.loras if not number else ())
        ranks = self._ranks.get(endpoint.id) or len(self._sources(endpoint))
        self._place(endpoint, _rank_names(endpoint.id, ranks), endpoint.models)

    def _use_tokens(self, base: str, endpoint: Endpoint, loras: Iterable[str]) -> None:
        """Token mode for a model of this endpoint and its adapters; the first worker's block decides the index block."""
        token_mode = self.token_modes[base]
        if not token_mode.block_tokens:
            block = endpoint.profile.block_size
            token_mode.block_tokens = block * -(-LEAST_BLOCK_TOKENS // block) if block < LEAST_BLOCK_TOKENS else block
        for model in (base, *(lora for lora in loras if lora not in self.models)):
            self.token_modes[model] = token_mode
            self.router.token_blocks[model] = token_mode.block_tokens

    def _sources(self, endpoint: Endpoint) -> list[KVEventSource]:
        given = self._event_config[endpoint.id]
        if given == "off":
            return []
        if isinstance(given, KVEvents):
            return [
                KVEventSource(
                    reachable(given.endpoint, endpoint.url, rank),
                    reachable(given.replay_endpoint, endpoint.url, rank) if given.replay_endpoint else None, given.topic, rank,
                )
                for rank in range(given.ranks)
            ]  # fmt: skip
        return endpoint.kv_sources

    async def _came_up(self, endpoint: Endpoint) -> None:
        sources = self._sources(endpoint)
        workers = [self.router.workers[worker_id] for worker_id in self._workers_of[endpoint.id]]
        if not sources:
            for worker in workers:
                self._sources_of.pop(worker.id, None)
                await self._unfollow(worker, "it publishes no KV events any more")
        elif len(sources) == len(workers):
            self._sources_of |= {worker.id: source for worker, source in zip(workers, sources, strict=True)}
            mine = await self._mine()
            try:
                async with asyncio.timeout(CATCH_UP_S):
                    await asyncio.gather(*(self._follow(worker, self._sources_of[worker.id]) for worker in workers if worker.id in mine))
            except TimeoutError:
                logger.warning("worker %s: the replay of its KV events took longer than %g s; it is used without", endpoint.id, CATCH_UP_S)
            except OSError as error:  # what ZMQ cannot connect to; never a reason to do without the worker
                logger.warning("worker %s: its KV events cannot be followed: %s", endpoint.id, error)
        if endpoint.up and endpoint.id not in self._left:  # it may have gone away in the meantime
            for worker in workers:
                self.router.set_up(worker, True)

    async def _mine(self) -> set[str]:
        """The workers whose events this gateway has to follow: all, but for those that another gateway of the pool follows."""
        if self.sharing is None:
            return set(self._sources_of)
        return await self.sharing.follow(self._sources_of)

    async def _keep_following(self) -> None:
        """Follow what another gateway has left, and leave what another one has taken over."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                sources = dict(self._sources_of)  # those that are asked for: one that comes up meanwhile is not another's
                mine = await self._mine()
                changes = []
                for worker_id, source in sources.items():
                    worker = self.router.workers.get(worker_id)
                    if worker is None or self._sources_of.get(worker_id) != source:
                        continue
                    if worker_id not in mine:
                        changes.append(self._unfollow(worker, "another gateway follows its KV events"))
                    elif worker_id not in self.feeds and self.endpoints[worker_id].up and self._index_block(worker_id) is not None:
                        changes.append(self._follow(worker, source))
                await asyncio.gather(*changes)
            except Exception:  # never the end of it
                logger.exception("following the workers' KV events failed")

    def _index_block(self, worker_id: str) -> int | None:
        """Tokens of the index block of the worker's model; None where that is not in token mode."""
        return next((self.router.token_blocks[m] for m in self.endpoints[worker_id].models if m in self.router.token_blocks), None)

    async def _unfollow(self, worker: Worker, why: str) -> None:
        """The events of this worker are no longer to be followed here."""
        feed = self.feeds.pop(worker.id, None)
        if feed is not None:
            del self.router.events[worker.id]
            await feed.stop()
            worker.trust.events_detached(why)

    async def _follow(self, worker: Worker, source: KVEventSource) -> None:
        endpoint = self.endpoints[worker.id]
        feed = self.feeds.get(worker.id)
        if feed is not None and feed.source != source:  # restarted with other ports
            await self._unfollow(worker, "it publishes its KV events elsewhere now")
            feed = None
        if self.router.workers.get(worker.id) is not worker:
            return  # it went away meanwhile
        if feed is None:
            block_tokens = self._index_block(worker.id)
            if block_tokens is None:
                names = ", ".join(endpoint.models)
                logger.info("worker %s publishes KV events; name the tokenizer of %s under 'models' to make use of them", worker.id, names)
                return
            from gateway.cache_feed import CacheFeed

            feed = CacheFeed(source, worker, self.index, block_tokens)
            self.feeds[worker.id] = feed
            self.router.events[worker.id] = feed.blocks
        await feed.start()

    def _went_down(self, endpoint: Endpoint) -> None:
        workers = self._workers_of[endpoint.id]
        for worker_id in workers:
            worker = self.router.workers[worker_id]
            self.router.set_up(worker, False)
            # whatever it answers when it is back, it may have lost its cache
            self.router.lost_cache(worker)
        ended = self.pools[workers[0]].interrupt_all()
        if ended:
            logger.warning("worker %s went down with %d unanswered requests; they go to others", endpoint.id, ended)

    def suspect(self, worker_id: str, why: str, *, refused: bool) -> None:
        """A request failed there: out at once where it refused a connection, probed at once otherwise."""
        endpoint = self.endpoints.get(worker_id)
        if endpoint is None:  # a rank that is gone
            return
        if refused and endpoint.up:
            endpoint.up = False
            logger.warning("worker %s is down: %s", endpoint.id, why)
            self._went_down(endpoint)
        elif endpoint.up and not endpoint.checking.locked():
            self._in_background(self.monitor.check(endpoint))

    # --- what requests need ---

    def request_head(self, worker_id: str, path: bytes, length: int, extra: bytes) -> bytes:
        """The head of a request to this worker."""
        pool = self.pools[worker_id]
        return b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b\r\n" % (
            pool.prefix, path, pool.authority, length, extra, self._headers[worker_id],
        )  # fmt: skip

    def resolve(self, model: str) -> str:
        """The served name behind an alias."""
        return self.aliases.get(model, model)

    def model_names(self) -> list[str]:
        """Every name a client may use now: served models, then aliases of served models."""
        served = self.router.models
        return served + [alias for alias, name in self.aliases.items() if name in served]

    def max_model_len(self, model: str) -> int | None:
        """The longest context any worker of this model offers."""
        lengths = [e.max_model_len for e in self._watched if model in e.models and e.max_model_len]
        return max(lengths, default=None)

    @property
    def ready(self) -> bool:
        """Whether at least one worker is up."""
        return any(worker.up for worker in self.router.workers.values())

    def gauges(self) -> Iterable[tuple[str, str, dict[str, float]]]:
        """Per-worker gauges for /metrics: (name, help, worker -> value)."""
        load = self.router.load()
        help_texts = {
            "up": "Whether the worker takes requests",
            "prefilling": "Requests assigned and waiting for their first token",
            "decoding": "Requests assigned and past their first token",
            "pending_prefill_s": "Seconds of prefill assigned and not yet done",
            "active_tokens": "Prompt tokens of the requests in flight",
            "live_sessions": "Sessions at home on the worker",
            "working_set_tokens": "Expected peak contexts of the sessions at home on the worker, tokens",
            "prefill_scale": "Observed over modelled prefill time",
            "decode_scale": "Observed over modelled decode time",
            "memory_blocks": "Index blocks believed cached on the worker",
            "others_in_flight": "Requests that other gateways have assigned to the worker",
        }
        for name, text in help_texts.items():
            yield f"worker_{name}", text, {worker_id: values[name] for worker_id, values in load.items()}
        yield "worker_connections", "Open connections to the worker", {i: float(p.open_connections) for i, p in self.pools.items()}
        workers = self.router.workers.values()
        yield "worker_engine_running", "Requests running, as the engine reports", {w.id: w.scraped_running for w in workers}
        yield "worker_engine_waiting", "Requests waiting, as the engine reports", {w.id: w.scraped_waiting for w in workers}
        yield "worker_trust", "How its cache is known: 2 by its KV events, 1 by routing memory, 0 not at all", {
            w.id: float(LEVELS.index(w.trust.level)) for w in workers
        }
        yield "worker_trust_changes", "Times that has changed", {w.id: float(w.trust.changes) for w in workers}
        # 0 for workers without events
        feeds = {worker_id: self.feeds.get(worker_id) for worker_id in self.router.workers}
        held = {i: float(feed.blocks.blocks) if feed else 0.0 for i, feed in feeds.items()}
        gaps = {i: float(feed.stream.gaps) if feed else 0.0 for i, feed in feeds.items()}
        orphans = {i: float(feed.blocks.orphaned) if feed else 0.0 for i, feed in feeds.items()}
        yield "worker_event_blocks", "Engine blocks that its KV events say it holds", held
        yield "worker_event_gaps", "Gaps seen in its KV events", gaps
        yield "worker_event_orphans", "Blocks reported on a parent that is not known", orphans
        yield "worker_engine_kv_use", "KV cache use, as the engine reports", {w.id: w.scraped_kv_use for w in workers}
        if self.sharing is not None:
            yield from self.sharing.gauges()


def _rank_names(endpoint_id: str, ranks: int) -> list[str]:
    """The workers at an endpoint."""
    return [endpoint_id] if ranks < 2 else [f"{endpoint_id}#{rank}" for rank in range(ranks)]


async def _close_when_idle(pool: Pool) -> None:
    """Close a pool that is no longer used, once the last answer over it has ended (or the gateway ends)."""
    try:
        while pool.active_connections:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    finally:
        pool.close()


def worker_from_url(url: str) -> WorkerConfig:
    """A worker given by its URL alone. Raises ValueError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return WorkerConfig(url=f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"))
