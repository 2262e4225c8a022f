"""An estimate of how many workers traffic needs, to decide what is worth simulating and where to begin.

Means only: nothing here knows of queues or evictions beyond a factor. The simulations decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.frontier.objectives import Objective
from loadgen.inspect import inspect
from loadgen.simulate.load import Load
from loadgen.trace import Session
from workers.profile import WorkerProfile

_BUSY = 0.7  # share of an engine's time that prefills may take
_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Demand:
    """A trace's mean request. Tokens and seconds."""

    prompt_tokens: float
    uncached_tokens: float  # with a cache that forgets nothing
    output_tokens: float
    gap_s: float
    requests_per_session: float
    longest_tokens: int  # of a prompt and its answer

    @classmethod
    def of(cls, sessions: list[Session], load: Load) -> Demand:
        """Of a trace as it is played."""
        shape = inspect(sessions)
        requests = [request for root in sessions for part in root.tree() for request in part.requests]
        gaps = [min(r.gap_s, load.max_gap_s) * load.time_scale for root in sessions for part in root.tree() for r in part.requests[1:]]
        prompt = shape.input_tokens / shape.requests
        return cls(
            prompt, prompt * (1 - shape.hit_bound), shape.output_tokens / shape.requests, sum(gaps) / len(gaps) if gaps else 0.0,
            shape.requests / shape.sessions, max(r.input_tokens + r.output_tokens for r in requests),
        )  # fmt: skip


def workers_needed(profile: WorkerProfile, demand: Demand, load: Load, objectives: Sequence[Objective], most: int) -> int | None:
    """The estimate; None where more than `most` would be needed."""
    if not _suffice(most, profile, demand, load, objectives):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if _suffice(middle, profile, demand, load, objectives):
            high = middle
        else:
            low = middle
    return high


def _suffice(workers: int, profile: WorkerProfile, demand: Demand, load: Load, objectives: Sequence[Objective]) -> bool:
    latency = profile.latency_model()
    prefill = latency.prefill_s(demand.uncached_tokens, demand.prompt_tokens)
    itl, ttft = latency.step_s(1, demand.prompt_tokens) / latency.tokens_per_step, prefill
    busy = 0.0
    sessions = 0.0
    for _ in range(_ROUNDS):  # to a fixed point: slow answers slow a closed loop down
        turn = demand.gap_s + ttft + demand.output_tokens * itl
        if load.rate is not None:
            rate = load.rate * demand.requests_per_session / workers
            sessions = rate * turn
        else:
            sessions = load.live_sessions / workers
            rate = sessions / turn
        batch = min(rate * demand.output_tokens * itl, sessions, profile.max_num_seqs)
        busy = rate * prefill
        left = max(0.05, 1 - busy)
        itl = (itl + latency.step_s(max(1.0, batch), batch * demand.prompt_tokens) / latency.tokens_per_step / left) / 2
        ttft = (ttft + prefill / left) / 2
    if busy > _BUSY or sessions * demand.prompt_tokens > profile.kv_capacity_tokens:
        return False
    for objective in objectives:
        if objective.key.startswith("ttft") and 2 * ttft > objective.bound:
            return False
        if objective.key.startswith("itl") and 1.2 * itl > objective.bound:
            return False
        if objective.key == "user_tokens_per_s" and 1 / itl < objective.bound:
            return False
    return True
