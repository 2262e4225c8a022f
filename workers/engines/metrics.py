"""What an engine's Prometheus metrics are called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineMetrics:
    """Names of one engine's metrics; None where the engine has no such metric. Samples are summed over data-parallel ranks."""

    path: str = "/metrics"
    # Load, all gauges.
    running: str
    waiting: str
    kv_use: str  # share of the KV cache in use, 0 to 1
    # KV capacity: an info metric with the labels block_size and num_gpu_blocks, or tokens, or blocks; the block's size in tokens.
    cache_info: str | None = None
    capacity_tokens: str | None = None
    capacity_blocks: str | None = None
    block_tokens: str | None = None
    # Prefix cache, in tokens, counters: what was looked up and what was found.
    prefix_queries: str
    prefix_hits: str
    # Speculation: counters of drafted and accepted tokens, or a gauge of the accepted share.
    drafted: str | None = None
    accepted: str | None = None
    acceptance_rate: str | None = None
