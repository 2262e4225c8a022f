"""The figures that can be an axis of a chart or an objective: every one of `Figures`, and those per GPU and per price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from loadgen.results import Figures, Run

Better = Literal["higher", "lower"]


class FrontierError(ValueError):
    """What was asked for cannot be drawn from these results; the message says why and what can."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a run: how to read it, what to call it, which way is better. `of` gives None where it was not measured."""

    key: str
    label: str
    better: Better
    of: Callable[[Run], float | None]

    @property
    def higher(self) -> bool:
        return self.better == "higher"


LABELS: dict[str, tuple[str, Better]] = {
    "user_tokens_per_s": ("tokens/s/user (streaming)", "higher"),
    "user_tokens_per_s_e2e": ("tokens/s/user (end to end)", "higher"),
    "output_per_gpu": ("output tokens/s/GPU", "higher"),
    "uncached_per_gpu": ("uncached prompt tokens/s/GPU", "higher"),
    "total_per_gpu": ("total tokens/s/GPU, cached included", "higher"),
    "jobs_per_gpu_hour": ("jobs/h/GPU", "higher"),
    "ttft_p50_s": ("TTFT p50 (s)", "lower"),
    "ttft_p90_s": ("TTFT p90 (s)", "lower"),
    "ttft_p99_s": ("TTFT p99 (s)", "lower"),
    "ttft_mean_s": ("TTFT mean (s)", "lower"),
    "itl_p50_s": ("ITL p50 (s)", "lower"),
    "itl_p90_s": ("ITL p90 (s)", "lower"),
    "itl_p99_s": ("ITL p99 (s)", "lower"),
    "e2e_p50_s": ("E2E p50 (s)", "lower"),
    "e2e_p90_s": ("E2E p90 (s)", "lower"),
    "e2e_p99_s": ("E2E p99 (s)", "lower"),
    "e2e_mean_s": ("E2E mean (s)", "lower"),
    "price_per_million_output": ("price per million output tokens", "lower"),
    "price_per_million_total": ("price per million tokens, cached included", "lower"),
    "hit_rate": ("KV hit rate", "higher"),
    "queue_p50_s": ("queue p50 (s)", "lower"),
    "queue_p90_s": ("queue p90 (s)", "lower"),
}
_MORE_IS_BETTER = {"requests", "sessions", "prompt_tokens", "cached_tokens", "output_tokens", "hit_bound", "hit_bound_lru", "batch", "busy"}
_OF_RUN = (
    "output_per_gpu", "uncached_per_gpu", "total_per_gpu", "jobs_per_gpu_hour", "price_per_million_output", "price_per_million_total",
)  # fmt: skip


def _of_run(key: str) -> Callable[[Run], float | None]:
    return lambda run: getattr(run, key)


def _of_figures(key: str) -> Callable[[Run], float | None]:
    return lambda run: getattr(run.figures, key)


def _metrics() -> dict[str, Metric]:
    made: dict[str, Metric] = {}
    keys = [*_OF_RUN, *(field.name for field in fields(Figures)), "hit_rate", "uncached_tokens"]
    for key in sorted(keys, key=lambda key: list(LABELS).index(key) if key in LABELS else len(LABELS)):
        label, better = LABELS.get(key, (key.replace("_", " "), "higher" if key in _MORE_IS_BETTER else "lower"))
        made[key] = Metric(key, label, better, _of_run(key) if key in _OF_RUN else _of_figures(key))
    return made


METRICS: dict[str, Metric] = _metrics()

# What the report's selectors offer.
CHARTED = (
    "user_tokens_per_s", "user_tokens_per_s_e2e", "output_per_gpu", "uncached_per_gpu", "total_per_gpu", "jobs_per_gpu_hour",
    "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "e2e_p50_s", "e2e_p90_s", "price_per_million_output",
    "price_per_million_total", "hit_rate",
)  # fmt: skip


def metric(key: str) -> Metric:
    """The metric of this name. Raises FrontierError."""
    try:
        return METRICS[key]
    except KeyError:
        raise FrontierError(f"no figure is named {key!r}; there are: {', '.join(METRICS)}") from None
