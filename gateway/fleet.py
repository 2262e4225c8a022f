"""Ties the workers together: their connection pools, the monitor that watches them, and the router that places requests."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from gateway.config import Config, WorkerConfig
from gateway.upstream import Pool
from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory
from routing.router import Router
from routing.sessions import SessionTable
from workers.monitor import Endpoint, Monitor
from workers.profile import WorkerProfile

logger = logging.getLogger("warmroute.fleet")

TEXT_BYTES_PER_TOKEN = 4


class Fleet:
    """The workers of one gateway. `start` returns when every worker has been probed once."""

    def __init__(self, config: Config):
        self.config = config
        block_bytes = config.index.block_tokens * TEXT_BYTES_PER_TOKEN
        index = MemoryIndex()
        memory = RoutingMemory(index, ttl_s=config.index.ttl_s)
        sessions = SessionTable(ttl_s=config.index.session_ttl_s)
        self.router = Router(index, memory, block_units=block_bytes, policy=config.policy, sessions=sessions)
        self.aliases = {alias: model.name for model in config.models for alias in model.aliases}
        self.pools: dict[str, Pool] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self._authorization: dict[str, bytes] = {}
        for worker in config.workers:
            self._add(worker)
        upstream = config.upstream
        self.monitor = Monitor(
            list(self.endpoints.values()), self._changed,
            interval_s=upstream.probe_interval_s, timeout_s=upstream.probe_timeout_s, failures=upstream.probe_failures,
        )  # fmt: skip

    def _add(self, worker: WorkerConfig) -> None:
        key = os.environ.get(worker.api_key_env or "")
        stated = frozenset(worker.model_fields_set & WorkerProfile.model_fields.keys())
        endpoint = Endpoint(worker.id, worker.url, worker.profile(), api_key=key, stated=stated)
        self.endpoints[worker.id] = endpoint
        if key:
            self._authorization[worker.id] = b"authorization: Bearer " + key.encode() + b"\r\n"
        models = [worker.model] if worker.model else []
        self.router.set_up(self.router.add_worker(worker.id, models, endpoint.profile), False)

    async def start(self) -> None:
        upstream = self.config.upstream
        for endpoint in self.endpoints.values():
            pool = Pool(endpoint.url, connect_timeout_s=upstream.connect_timeout_s, idle_s=upstream.idle_s)
            self.pools[endpoint.id] = pool
            endpoint.heard = lambda pool=pool: pool.heard_at  # type: ignore[misc]
        await self.monitor.start()

    async def stop(self) -> None:
        await self.monitor.stop()
        for pool in self.pools.values():
            pool.close()

    def _changed(self, endpoint: Endpoint, what: str) -> None:
        worker = self.router.workers[endpoint.id]
        if what == "discovered":
            self.router.add_worker(endpoint.id, endpoint.models, endpoint.profile)
        elif what == "up":
            self.router.set_up(worker, True)
        elif what == "down":
            self.router.set_up(worker, False)
            # whatever it answers when it is back, it may have lost its cache
            self.router.lost_cache(worker)
            ended = self.pools[endpoint.id].interrupt_all()
            if ended:
                logger.warning("worker %s went down with %d unanswered requests; they go to others", endpoint.id, ended)
        elif what == "load":
            worker.scraped_running, worker.scraped_waiting = endpoint.running, endpoint.waiting
            worker.scraped_kv_use = endpoint.kv_use
            pool = self.pools[endpoint.id]
            if pool.connections:
                worker.network_s = pool.rtt_s

    def suspect(self, worker_id: str, why: str, *, refused: bool) -> None:
        """A request failed there: out at once where it refused a connection, probed at once otherwise."""
        endpoint = self.endpoints[worker_id]
        if refused and endpoint.up:
            endpoint.up = False
            logger.warning("worker %s is down: %s", worker_id, why)
            self._changed(endpoint, "down")
        elif endpoint.up and not endpoint.checking.locked():
            task = asyncio.ensure_future(self.monitor.check(endpoint))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    _probes: set[asyncio.Future[bool]] = set()

    def request_head(self, worker_id: str, path: bytes, length: int, extra: bytes) -> bytes:
        """The head of a request to this worker."""
        pool = self.pools[worker_id]
        return b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b\r\n" % (
            pool.prefix, path, pool.authority, length, extra, self._authorization.get(worker_id, b""),
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
        lengths = [e.max_model_len for e in self.endpoints.values() if model in e.models and e.max_model_len]
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
        }
        for name, text in help_texts.items():
            yield f"worker_{name}", text, {worker_id: values[name] for worker_id, values in load.items()}
        yield "worker_connections", "Open connections to the worker", {i: float(p.open_connections) for i, p in self.pools.items()}
        workers = self.router.workers.values()
        yield "worker_engine_running", "Requests running, as the engine reports", {w.id: w.scraped_running for w in workers}
        yield "worker_engine_waiting", "Requests waiting, as the engine reports", {w.id: w.scraped_waiting for w in workers}
        yield "worker_engine_kv_use", "KV cache use, as the engine reports", {w.id: w.scraped_kv_use for w in workers}


def worker_from_url(url: str) -> WorkerConfig:
    """A worker given by its URL alone. Raises ValueError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return WorkerConfig(url=f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"))
