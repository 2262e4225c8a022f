"""What `policies.py` compares policies on: cells of (workload, fleet, pressure).

Pressure is the live working sets (mean context x live sessions; for lone requests what they would have cached) over the fleet's KV
memory: the load stays the same and the KV memory is chosen, so that cells of one workload differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from loadgen.readers import read_trace
from loadgen.simulate import FleetSpec, Load, PoolSpec
from loadgen.trace import Session, limit_context
from loadgen.workloads import b2b_saas, code_gen, uniform
from workers.hardware.preset import preset
from workers.latency import QWEN3_32B_H100_TP2
from workers.profile import WorkerProfile

ROOT = Path(__file__).parents[1]
RECORDED = ROOT.parent / "shared" / "traces"  # recorded traces are no part of the repository
WEKA, MOONCAKE, AGENTIC = RECORDED / "weka_agentic.jsonl.gz", RECORDED / "mooncake_conversation.jsonl.gz", ROOT / "traces" / "agentic.jsonl"
WEKA_CONTEXT = 200_000
PRESSURES = {"below": 0.5, "near": 1.0, "above": 1.6}
FLEETS = ("equal", "mixed", "hardware")


@dataclass(frozen=True)
class Workload:
    """Sessions, the load they are played at, and what a user of them would call good."""

    sessions: Callable[[int], list[Session]]  # of a seed
    load: Load
    workers: int
    working_set: float  # tokens of all live sessions
    ttft_slo_s: float = 2.0
    itl_slo_s: float = 0.1
    needs: Path | None = None  # a file


@dataclass(frozen=True)
class Cell:
    """One comparison: a workload on a fleet whose KV memory is under some pressure."""

    trace: str
    fleet: str
    pressure: str
    workload: Workload = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.trace}/{self.fleet}/{self.pressure}"

    def fleet_spec(self) -> FleetSpec:
        workload = self.workload
        kv = workload.working_set / PRESSURES[self.pressure]  # of the whole fleet
        return FleetSpec(pools=_pools(self.fleet, workload.workers, kv))


def cells() -> list[Cell]:
    return [Cell(trace, fleet, pressure, workload) for trace, workload in WORKLOADS.items() for fleet in FLEETS for pressure in PRESSURES]


def cell_named(name: str) -> Cell:
    trace, fleet, pressure = name.split("/")
    return Cell(trace, fleet, pressure, WORKLOADS[trace])


def _pools(fleet: str, workers: int, kv: float) -> list[PoolSpec]:
    each, half = int(kv / workers), workers // 2
    latency = QWEN3_32B_H100_TP2
    if fleet == "equal":
        return [PoolSpec(count=workers, profile=WorkerProfile(latency=latency, kv_capacity_tokens=each))]
    if fleet == "mixed":  # the sketch's: half twice as fast, half half as fast, the same KV memory each
        return [
            PoolSpec(name="fast", count=half, profile=WorkerProfile(latency=latency.scaled(0.5), kv_capacity_tokens=each)),
            PoolSpec(name="slow", count=workers - half, profile=WorkerProfile(latency=latency.scaled(2.0), kv_capacity_tokens=each)),
        ]
    # one model on three generations of accelerators: KV memory in proportion to what is left beside the weights
    presets = [preset("qwen3-32b", "h100", tp=2), preset("qwen3-32b", "h200", tp=1), preset("qwen3-32b", "b200", tp=1)]
    counts = [workers - half, half // 2, half - half // 2]
    scale = kv / sum(count * profile.kv_capacity_tokens for count, profile in zip(counts, presets, strict=True))
    return [
        PoolSpec(name=f"{profile.accelerator}-", count=count,
                 profile=profile.model_copy(update={"kv_capacity_tokens": int(profile.kv_capacity_tokens * scale)}))
        for count, profile in zip(counts, presets, strict=True) if count
    ]  # fmt: skip


@lru_cache(maxsize=4)
def _recorded(path: Path) -> list[Session]:
    return limit_context(read_trace(path), WEKA_CONTEXT)


def _mooncake(seed: int, requests: int = 4_000, step: int = 1_600) -> list[Session]:
    """A window of the trace, another one for every seed."""
    sessions = _recorded(MOONCAKE)
    begin = seed * step % (len(sessions) - requests)
    return sessions[begin : begin + requests]


def _closed(lanes: int, requests: int, warmup: int) -> Load:
    """A closed loop that begins in the middle of its sessions, so that the fleet is as it would be long after."""
    return Load(live_sessions=lanes, requests=requests, warmup=warmup, advance=1.0, ramp_s=60.0, shuffle=True)


WORKLOADS: dict[str, Workload] = {
    "weka": Workload(lambda _: _recorded(WEKA), _closed(64, 2_000, 700), 8, 64 * 94e3, ttft_slo_s=5.0, needs=WEKA),
    "agentic": Workload(lambda _: _recorded(AGENTIC), _closed(48, 2_000, 700), 4, 48 * 34e3),
    "mooncake": Workload(_mooncake, Load("open", requests=2_800, warmup=1_000), 4, 7e6, needs=MOONCAKE),
    "uniform": Workload(lambda seed: uniform(3_000, seed), Load(live_sessions=64, requests=2_000, warmup=200), 4, 64 * 4.4e3),
    "b2b": Workload(lambda seed: b2b_saas([(7.0, 320.0)], seed), Load("open", requests=1_200, warmup=900), 8, 1.8e6),
    # its lanes never pause, so that all of their contexts are held by running requests: 66k tokens on average, and 15 % to vary
    "code-gen": Workload(lambda seed: code_gen(600, seed), _closed(64, 1_500, 500), 8, 64 * 76e3, ttft_slo_s=5.0),
}
