"""Constructed runs: what a sweep would have written, small enough to reason about."""

from __future__ import annotations

from typing import Any

from loadgen.results import Figures, Run, Scalar


def run(arm: dict[str, Scalar], user: float | None = None, out: float | None = None, seed: int = 0, **more: Any) -> Run:
    """A run of 100 s on `gpus` GPUs with this streaming speed and this many output tokens/s/GPU. `more`: figures, or fields of Run."""
    fields = {name: more.pop(name) for name in ("gpus", "price_per_hour", "source", "trace", "error") if name in more}
    gpus = fields.get("gpus", 1)
    hit_rate = more.pop("hit_rate", 0.95)
    prompt_tokens = more.pop("prompt_tokens", 1_000_000)
    figures = Figures(
        duration_s=100, requests=more.pop("requests", 1000), sessions=more.pop("sessions", 20), prompt_tokens=prompt_tokens,
        cached_tokens=round(prompt_tokens * hit_rate), output_tokens=round((out or 0) * 100 * gpus), user_tokens_per_s=user, **more,
    )  # fmt: skip
    return Run(arm, seed, figures, **{"trace": "made.jsonl", **fields})


def agentic_sweep(seeds: int = 2) -> list[Run]:
    """288 configurations of a model of a closed loop: service slows with the batch, and beyond KV capacity prompts are computed again."""
    runs = []
    for accelerator, speed, memory, price in (("H100", 1.0, 0.7e6, 2.0), ("H200", 1.05, 2.2e6, 2.4), ("B200", 2.0, 4.0e6, 4.5)):
        for tp in (1, 2, 4):
            for quantization in ("bf16", "fp8"):
                for policy in ("round-robin", "warm"):
                    for sessions in (1, 2, 4, 8, 16, 32, 64, 128):
                        for seed in range(seeds):
                            runs.append(_modelled(accelerator, speed, memory, price, tp, quantization, policy, sessions, seed))
    return runs


def _modelled(
    accelerator: str, speed: float, memory: float, price: float, tp: int, quantization: str, policy: str, sessions: int, seed: int
) -> Run:
    noise = 1 + 0.02 * ((seed * 7 + sessions * 3 + tp) % 5 - 2)
    speed *= (1.6 if quantization == "fp8" else 1.0) * tp**0.85
    capacity = memory * (1.4 if quantization == "fp8" else 1.0) * tp**1.1
    fits = min(1.0, capacity / (sessions * 100_000))
    hit = 0.96 * fits**2 * (1.0 if policy == "warm" else 0.82)
    prefill_s = 60_000 * (1 - hit) / (14_000 * speed) + 0.03
    step_s = (0.011 + 0.00035 * sessions) / speed
    busy = min(1.0, sessions * prefill_s / (sessions * prefill_s + 12))
    queue_s = prefill_s * busy * max(0, sessions - 1) * 0.5
    ttft = prefill_s + queue_s
    e2e = ttft + 300 * step_s
    rate = sessions / (e2e + 4) * noise
    requests = max(1, round(rate * 1000))
    figures = Figures(
        duration_s=1000, requests=requests, sessions=requests // 60, prompt_tokens=requests * 60_000,
        cached_tokens=round(requests * 60_000 * hit), output_tokens=requests * 300, hit_bound=0.965,
        evicted_tokens=round(requests * 60_000 * 0.96 * (1 - fits**2)),
        ttft_p50_s=ttft * noise, ttft_p90_s=ttft * 2.2 * noise, ttft_p99_s=ttft * 5 * noise, itl_p50_s=step_s, itl_p99_s=step_s * 4,
        e2e_p50_s=e2e * noise, e2e_p90_s=e2e * 1.8 * noise, user_tokens_per_s=noise / step_s, user_tokens_per_s_e2e=300 / e2e,
        queue_p90_s=queue_s * 2, batch=min(sessions, rate * 300 * step_s), kv_use=min(0.98, 0.2 / fits), busy=busy, imbalance=1.1,
    )  # fmt: skip
    arm: dict[str, Scalar] = {
        "profile.accelerator": accelerator, "profile.tp": tp, "profile.quantization": quantization, "policy": policy,
        "load.live_sessions": sessions,
    }  # fmt: skip
    return Run(arm, seed, figures, gpus=tp, price_per_hour=price * tp, trace="agentic.jsonl")
