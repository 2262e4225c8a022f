"""Watches the workers: health probes, model discovery and load from each engine's own /metrics.

A worker is down at once when it refuses a connection, and after `failures` probes in a row that time out; it is up again
after one good probe. What follows from a change is the caller's business (`on_change`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from workers.engines import ENGINE_METRICS
from workers.kv_sources import KVEventSource, from_sglang, from_vllm
from workers.profile import WorkerProfile

logger = logging.getLogger("warmroute.monitor")

_LIVELY_S = 2.0  # a worker that has answered a request this lately needs no probe
LOCAL_ERRORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^}]*)\})?\s+([^\s]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(eq=False)
class Endpoint:
    """A worker to watch."""

    id: str
    url: str
    profile: WorkerProfile
    api_key: str | None = None
    models: list[str] = field(default_factory=list)
    loras: frozenset[str] = frozenset()  # those of the models that are LoRA adapters
    kv_sources: list[KVEventSource] = field(default_factory=list)  # by data-parallel rank
    up: bool = False
    told: bool = False  # whether the log has said yet that it is up or down
    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0
    probe_s: float = 0.0  # round trip of the last good probe
    max_model_len: int | None = None
    failures: int = 0
    stated: frozenset[str] = frozenset()  # profile fields that the configuration gave: discovery leaves them alone
    heard: Callable[[], float] = lambda: 0.0  # loop time of the last byte of an answer: a busy worker may be slow to a probe
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


def _is_our_own(error: BaseException | None) -> bool:
    """Whether a connection failed for want of something on this side (file descriptors, ports): no worker's fault."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in LOCAL_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def parse_samples(text: str) -> dict[str, float]:
    """Prometheus text -> sample name -> sum over its label sets (an engine has one per data-parallel rank)."""
    values: dict[str, float] = {}
    for name, _, value in _SAMPLE.findall(text):
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return values


def kv_capacity(text: str) -> tuple[int | None, int | None]:
    """(KV capacity in tokens, block size) as an engine's metrics tell them; None where they do not."""
    tokens = block_size = None
    samples = parse_samples(text)
    for metrics in ENGINE_METRICS.values():
        if metrics.block_tokens in samples:  # the same on each data-parallel rank
            block_size = max((int(number) for number in _values(text, metrics.block_tokens)), default=0) or None
        if metrics.capacity_tokens in samples:
            tokens = sum(int(number) for number in _values(text, metrics.capacity_tokens))
        if metrics.capacity_blocks in samples and block_size:
            tokens = sum(int(number) for number in _values(text, metrics.capacity_blocks)) * block_size
        for labels in (labels for name, labels, _ in _SAMPLE.findall(text) if name == metrics.cache_info):
            found = dict(_LABEL.findall(labels))
            if found.get("block_size", "").isdigit() and found.get("num_gpu_blocks", "").isdigit():
                block_size = int(found["block_size"])
                tokens = (tokens or 0) + block_size * int(found["num_gpu_blocks"])
    return tokens or None, block_size


def _values(text: str, metric: str | None) -> list[float]:
    """The finite values of a metric, one for each label set."""
    values = []
    for name, _, value in _SAMPLE.findall(text):
        if name == metric:
            try:
                values.append(float(value))
            except ValueError:
                continue
    return [value for value in values if math.isfinite(value)]


class Monitor:
    """Probes every endpoint each `interval_s`. `on_change(endpoint, what)` with what in up, down, discovered, load."""

    def __init__(
        self,
        endpoints: list[Endpoint],
        on_change: Callable[[Endpoint, str], Awaitable[None] | None],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        failures: int = 3,
        scrape_s: float = 10.0,
    ):
        self.endpoints = endpoints
        self.on_change = on_change
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self.failures = failures
        self.scrape_s = scrape_s
        self._client: httpx.AsyncClient | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Probe every worker once, so that what answers is known before the first request, then go on in the background."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # the system's certificates, as for the requests themselves; httpx would take its own list
        verify = ssl.create_default_context()
        self._client = httpx.AsyncClient(verify=verify, timeout=self.timeout_s, limits=limits, follow_redirects=False, trust_env=False)
        endpoints = list(self.endpoints)
        first = await asyncio.gather(*(self.check(endpoint) for endpoint in endpoints), return_exceptions=True)
        for endpoint, outcome in zip(endpoints, first, strict=True):
            if isinstance(outcome, Exception):  # one odd worker must not keep the others from being used
                logger.error("probe of worker %s failed unexpectedly", endpoint.id, exc_info=outcome)
        for endpoint in endpoints:
            self._tasks[endpoint.id] = asyncio.create_task(self._watch(endpoint), name=f"watch {endpoint.id}")

    def add(self, endpoint: Endpoint) -> None:
        """Watch one more; where the monitor runs already, it is probed at once."""
        self.endpoints.append(endpoint)
        if self._client is not None:
            self._tasks[endpoint.id] = asyncio.create_task(self._watch(endpoint, pause=False), name=f"watch {endpoint.id}")

    def remove(self, endpoint: Endpoint) -> None:
        """Watch it no longer. Nothing is told of it any more, but for a probe that somebody else asked for."""
        self.endpoints.remove(endpoint)
        if (task := self._tasks.pop(endpoint.id, None)) is not None:
            task.cancel()

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _watch(self, endpoint: Endpoint, pause: bool = True) -> None:
        until_scrape = 0.0
        while True:
            if pause:
                await asyncio.sleep(self.interval_s if endpoint.up else self.interval_s / 2)
            pause = True
            try:
                if not endpoint.up or self._silent_s(endpoint) > max(self.interval_s, _LIVELY_S):
                    await self.check(endpoint)
                until_scrape -= self.interval_s
                if endpoint.up and until_scrape <= 0:
                    until_scrape = self.scrape_s
                    await self._scrape(endpoint)
            except Exception:
                logger.exception("probe of worker %s failed unexpectedly", endpoint.id)

    async def check(self, endpoint: Endpoint) -> bool:
        """Probe once and act on the answer; true when the worker is healthy."""
        async with endpoint.checking:
            return await self._check(endpoint)

    async def _check(self, endpoint: Endpoint) -> bool:
        loop = asyncio.get_running_loop()
        started = loop.time()
        ill = False
        try:
            response = await self._get(endpoint, "/health")
            healthy, refused, why = response.status_code == 200, False, f"/health answered {response.status_code}"
            ill = not healthy  # it says so itself, so what else it answers is no sign of health
        except httpx.ConnectError as error:
            if _is_our_own(error):
                logger.error("worker %s cannot be probed: %s", endpoint.id, error)
                return endpoint.up
            healthy, refused, why = False, True, f"connection refused: {error}"
        except httpx.HTTPError as error:
            healthy, refused, why = False, False, f"no answer to /health: {type(error).__name__}"
        if healthy:
            endpoint.failures = 0
            endpoint.probe_s = loop.time() - started
            if not endpoint.up:
                await self._discover(endpoint)
                endpoint.up = endpoint.told = True
                logger.info("worker %s is up (models: %s)", endpoint.id, ", ".join(endpoint.models) or "none")
                await self._tell(endpoint, "up")
            return True
        endpoint.failures += 1
        gave_up = endpoint.failures >= self.failures and (ill or self._silent_s(endpoint) > self.failures * self.timeout_s)
        if refused or gave_up:
            await self.mark_down(endpoint, why)
        return False

    @staticmethod
    def _silent_s(endpoint: Endpoint) -> float:
        return asyncio.get_running_loop().time() - endpoint.heard()

    async def mark_down(self, endpoint: Endpoint, why: str) -> None:
        """Take a worker out until a probe succeeds again."""
        if endpoint.up:
            endpoint.up = False
            logger.warning("worker %s is down: %s", endpoint.id, why)
            await self._tell(endpoint, "down")
        elif not endpoint.told:
            endpoint.told = True
            logger.warning("worker %s is not up: %s; it is used once /health answers", endpoint.id, why)

    async def _get(self, endpoint: Endpoint, path: str) -> httpx.Response:
        assert self._client is not None
        headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        try:
            async with asyncio.timeout(self.timeout_s):  # in all: httpx's limit is for each read, and an answer may drip
                return await self._client.get(endpoint.url + path, headers=headers)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer from {path} within {self.timeout_s:g} s") from None

    async def _discover(self, endpoint: Endpoint) -> None:
        """Ask a worker that came up what it serves. What cannot be read is left as configured."""
        try:
            response = await self._get(endpoint, "/v1/models")
            entries = [entry for entry in response.json().get("data", []) if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        except (httpx.HTTPError, ValueError, AttributeError, TypeError):
            entries = []
        if entries:
            endpoint.models = [entry["id"] for entry in entries]
            endpoint.loras = frozenset(entry["id"] for entry in entries if entry.get("parent"))
            lengths = [entry["max_model_len"] for entry in entries if isinstance(entry.get("max_model_len"), int)]
            endpoint.max_model_len = max(lengths, default=None)
        elif endpoint.profile.model:
            endpoint.models = [endpoint.profile.model]
        sources = await self._find_kv_sources(endpoint)
        if sources is not None:
            endpoint.kv_sources = sources
        await self._scrape(endpoint, discover=True)
        await self._tell(endpoint, "discovered")

    async def _find_kv_sources(self, endpoint: Endpoint) -> list[KVEventSource] | None:
        """Where the engine publishes its KV events; empty where it does not, None where it could not be asked."""
        answered = False
        for path, read in (("/kv_event_sources", from_vllm), ("/server_info", from_sglang)):
            try:
                response = await self._get(endpoint, path)
                answered = True
                if response.status_code == 200 and (sources := read(response.json(), endpoint.url)):
                    return sources
            except (httpx.HTTPError, ValueError):
                continue
        return [] if answered else None

    async def _scrape(self, endpoint: Endpoint, discover: bool = False) -> None:
        try:
            known = ENGINE_METRICS.get(endpoint.profile.engine)
            response = await self._get(endpoint, known.path if known else "/metrics")
        except httpx.HTTPError:
            return
        if response.status_code != 200:
            return
        text = response.text
        samples = parse_samples(text)
        for engine, metrics in ENGINE_METRICS.items():
            if metrics.running in samples:
                endpoint.running = samples[metrics.running]
                endpoint.waiting = samples.get(metrics.waiting, 0.0)
                endpoint.kv_use = samples.get(metrics.kv_use, 0.0)
                if endpoint.profile.engine == "auto":
                    endpoint.profile = endpoint.profile.model_copy(update={"engine": engine})
        if discover:
            tokens, block_size = kv_capacity(text)
            found = {"kv_capacity_tokens": tokens, "block_size": block_size, "model": endpoint.models[0] if endpoint.models else None}
            update = {name: value for name, value in found.items() if value and name not in endpoint.stated}
            endpoint.profile = endpoint.profile.model_copy(update=update)
        else:
            await self._tell(endpoint, "load")

    async def _tell(self, endpoint: Endpoint, what: str) -> None:
        result = self.on_change(endpoint, what)
        if result is not None:
            await result
