"""Where an engine publishes its KV events: one source per data-parallel rank, as the engine tells it or the configuration does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

MOST_RANKS = 1024  # data-parallel ranks behind one URL
_ANY_HOST = ("*", "0.0.0.0", "::", "[::]", "")
_LOCAL_HOST = ("127.0.0.1", "localhost", "::1", "[::1]")


@dataclass(frozen=True)
class KVEventSource:
    """One publisher of KV events (ZMQ endpoints as `tcp://host:port`)."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int = 0


def from_vllm(payload: Any, worker_url: str) -> list[KVEventSource]:
    """vLLM's `GET /kv_event_sources`: rank -> publisher, ports already offset by the rank."""
    sources = []
    for rank, publisher in payload.items() if isinstance(payload, dict) else ():
        if not isinstance(publisher, dict) or not publisher.get("enable_kv_cache_events") or publisher.get("publisher") != "zmq":
            continue
        endpoint = publisher.get("endpoint")
        if isinstance(endpoint, str) and str(rank).isdigit():
            sources.append(_source(publisher, endpoint, worker_url, int(rank)))
    return sorted(sources, key=lambda source: source.rank)


def from_sglang(payload: Any, worker_url: str) -> list[KVEventSource]:
    """SGLang's `GET /server_info`: its arguments; one publisher per attention data-parallel rank, at port + rank."""
    if not isinstance(payload, dict):
        return []
    publisher = payload.get("kv_events_config")
    if isinstance(publisher, str):
        try:
            publisher = orjson.loads(publisher)
        except orjson.JSONDecodeError:
            return []
    if not isinstance(publisher, dict) or publisher.get("publisher", "zmq") != "zmq":
        return []
    endpoint = publisher.get("endpoint") or "tcp://*:5557"
    if not isinstance(endpoint, str):
        return []
    ranks = next((n for key in ("attn_dp_size", "dp_size") if isinstance(n := payload.get(key), int) and 1 < n <= MOST_RANKS), 1)
    return [_source(publisher, endpoint, worker_url, rank, offset=rank) for rank in range(ranks)]


def _source(publisher: dict[str, Any], endpoint: str, worker_url: str, rank: int, offset: int = 0) -> KVEventSource:
    replay = publisher.get("replay_endpoint")
    return KVEventSource(
        reachable(endpoint, worker_url, offset),
        reachable(replay, worker_url, offset) if isinstance(replay, str) and replay else None,
        str(publisher.get("topic") or ""),
        rank,
    )


def reachable(endpoint: str, worker_url: str, offset: int = 0) -> str:
    """The endpoint as seen from here: an address the engine binds becomes the worker's host; `offset` is added to the port."""
    scheme, _, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not port.isdigit():
        return endpoint
    worker_host = urlsplit(worker_url).hostname or "127.0.0.1"
    if host in _ANY_HOST or host in _LOCAL_HOST:
        host = f"[{worker_host}]" if ":" in worker_host else worker_host
    return f"tcp://{host}:{int(port) + offset}"
