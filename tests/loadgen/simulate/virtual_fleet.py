"""Small fleets and traces for tests of the simulator. Blocks are of 10 tokens."""

from __future__ import annotations

from typing import Any

from loadgen.simulate import FleetSpec, Load, PoolSpec, Simulation, simulate
from loadgen.trace import Request, Session
from workers.latency import LatencyModel
from workers.profile import WorkerProfile

BLOCK = 10
LATENCY = LatencyModel(
    prefill_base=0.1, prefill_token=1e-3, prefill_attention=1e-6, decode_base=0.1, decode_seq=0.01, decode_kv=1e-5
)  # fmt: skip


def pool(count: int = 1, **fields: Any) -> PoolSpec:
    own = {name: fields.pop(name) for name in ("name", "speed", "tiers") if name in fields}
    settings = {"latency": LATENCY, "kv_capacity_tokens": 100_000, "max_num_batched_tokens": 8192}
    return PoolSpec(count=count, profile=WorkerProfile.model_validate(settings | fields), **own)


def fleet(*pools: PoolSpec, **fields: Any) -> FleetSpec:
    return FleetSpec(pools=list(pools) or [pool()], **{"index_block_tokens": BLOCK, **fields})


def turn(stream: int, blocks: int, output: int = 3, more: int = 5, **fields: Any) -> Request:
    """A prompt of a stream's first blocks and `more` tokens behind them."""
    return Request(blocks * BLOCK + more, output, ((stream << 20, blocks),), **fields)


def session(name: str, turns: list[Request], **fields: Any) -> Session:
    return Session(name, turns, **{"block_size": BLOCK, "scope": "global", **fields})


def growing(name: str, stream: int, turns: int = 3, gap_s: float = 0.0, **fields: Any) -> Session:
    return session(name, [turn(stream, 10 * (n + 1), gap_s=gap_s if n else 0.0) for n in range(turns)], **fields)


def play(sessions: list[Session], spec: FleetSpec | None = None, seed: int = 0, **load: Any) -> Simulation:
    return simulate(sessions, spec or fleet(), Load(**{"ramp_s": 0.0, "live_sessions": 1, **load}), seed)
