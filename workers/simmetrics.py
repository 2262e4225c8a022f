"""The simulated engine's /metrics page, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping

from workers.simengine import SimEngine


def metrics_page(engine: SimEngine, model: str, finished: Mapping[str, int]) -> bytes:
    """Prometheus text; `finished` counts requests by finished_reason."""
    counters, cache = engine.counters, engine.cache
    labels = f'engine="0",model_name="{_escape(model)}"'
    lines: list[str] = []

    def family(name: str, kind: str, help: str, samples: Mapping[str, float]) -> None:
        lines.extend((f"# HELP vllm:{name} {help}", f"# TYPE vllm:{name} {kind}"))
        lines.extend(f"vllm:{name}{{{labels}{more}}} {float(value)}" for more, value in samples.items())

    def metric(name: str, kind: str, help: str, value: float) -> None:
        family(name, kind, help, {"": value})

    metric("num_requests_running", "gauge", "Number of requests in model execution batches.", engine.running)
    metric("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", engine.waiting)
    metric("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", engine.kv_use)
    metric("prefix_cache_queries_total", "counter", "Prefix cache queries, in tokens.", counters.prefix_queries)
    metric("prefix_cache_hits_total", "counter", "Prefix cache hits, in tokens.", counters.prefix_hits)
    metric("prompt_tokens_total", "counter", "Number of prefill tokens processed.", counters.prompt_tokens)
    metric("generation_tokens_total", "counter", "Number of generation tokens processed.", counters.generation_tokens)
    metric("num_preemptions_total", "counter", "Cumulative number of preemptions.", counters.preemptions)
    reasons = {f',finished_reason="{reason}"': count for reason, count in finished.items()}
    family("request_success_total", "counter", "Requests successfully processed.", reasons)
    sizes = f',block_size="{engine.block_size}",num_gpu_blocks="{cache.capacity}",enable_prefix_caching="True"'
    family("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig.", {sizes: 1})
    return ("\n".join(lines) + "\n").encode()


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
