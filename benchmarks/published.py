"""Published results beside the simulator's: Mooncake's cache and its four policies, llm-d's b2b-saas, the eviction cliff of GLM-5.2.

Every table has theirs, ours, ours over theirs, and why they differ. What was fitted is said: one number for Mooncake's policies, none
elsewhere. Recorded traces are read from ../shared/traces beside the repository; tables whose trace is absent are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadgen.bound import InfiniteCache, LruCache
from loadgen.readers import read_trace
from loadgen.simulate import FleetSpec, Load, PoolSpec, Simulation, simulate
from loadgen.trace import Session, block_ids, limit_context
from loadgen.workloads import b2b_saas
from routing.policies import Policy
from routing.policies.mooncake import Mooncake
from workers.hardware import kv_capacity_tokens, latency_model
from workers.latency import QWEN3_32B_H100_TP2
from workers.profile import WorkerProfile

TRACES = Path(__file__).parents[2] / "shared" / "traces"


@dataclass
class Table:
    """Rows of (what, theirs, ours); None where one side has no figure."""

    title: str
    unit: str
    rows: list[tuple[str, float | None, float | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # assumptions, and where and why it differs

    def print(self) -> None:
        print(f"\n## {self.title} ({self.unit})\n")
        print(f"{'':44} {'theirs':>10} {'ours':>10} {'ours/theirs':>12}")
        for what, theirs, ours in self.rows:
            ratio = f"{ours / theirs:12.2f}" if theirs and ours is not None else f"{'':12}"
            print(f"{what:44} {_number(theirs):>10} {_number(ours):>10} {ratio}")
        for note in self.notes:
            print(f"- {note}")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


# Mooncake: the cache model


def cache_model(sessions: Sequence[Session]) -> Table:
    """Hit rates of one LRU cache over the conversation trace, in the published figures' own count."""
    prompts = [(block_ids(session.requests[0].blocks), session.requests[0].input_tokens) for session in sessions]
    tokens, blocks = sum(n for _, n in prompts), sum(len(keys) for keys, _ in prompts)
    table = Table("Mooncake conversation: one LRU cache", "percent hit")
    for millions, theirs in ((1, 5.3), (3, 13.6), (10, 28.5), (30, 35.9), (50, 36.4)):
        padded, exact = LruCache(millions * 1_000_000), LruCache(millions * 1_000_000)
        hit = sum(padded.add(keys, len(keys), 512, len(keys) * 512 + 1) for keys, _ in prompts)
        table.rows.append((f"{millions}M tokens, blocks", theirs, 100 * hit / (blocks * 512)))
        hit = sum(exact.add(keys, len(keys), 512, n) for keys, n in prompts)
        table.rows.append((f"{millions}M tokens, tokens", theirs, 100 * hit / tokens))
    infinite = InfiniteCache()
    table.rows.append(("no bound, tokens", 37.4, 100 * sum(infinite.add(keys, len(keys), 512, n) for keys, n in prompts) / tokens))
    table.notes = [
        "the published LRU rates are blocks hit over blocks asked for, partial last blocks included; the bound is in tokens",
        "a partial last block counts 512 tokens there, so the same hits are up to 0.7 points more as a share of tokens",
    ]
    return table


# Mooncake: four policies


A800_PREFILL = latency_model("llama-3-70b", "a100", tp=8)
STORE_TOKENS = 3_000_000  # 1 TB of host memory at 327,680 bytes a token: the paper's own size of a local cache
TRANSFER_TOKEN_S = 327_680 / 87e9  # between nodes: 4 x 200 Gbit/s, 87 GB/s measured in the paper
MOST_TTFT_S = 30.0  # the paper's objective; what would miss it is refused there
SLOWDOWN = 2.65  # fitted: load balancing's mean TTFT is 5.27 s


def mooncake_policies(sessions: Sequence[Session]) -> Table:
    for session in sessions:
        for request in session.requests:
            request.output_tokens = 1  # decoded elsewhere
    fleet = FleetSpec(
        pools=[PoolSpec(count=16, profile=WorkerProfile(kv_capacity_tokens=STORE_TOKENS, latency=A800_PREFILL.scaled(SLOWDOWN)))]
    )
    table = Table("Mooncake conversation, 16 prefill nodes of 8 x A800, LLaMA3-70B", "mean TTFT in seconds; hits in percent")
    arms: list[tuple[str, str, Policy | None, float]] = [
        ("random", "random", None, 19.65),
        ("load balancing (fitted)", "mooncake-load-balance", None, 5.27),
        ("local cache-aware", "mooncake", None, 3.58),
        ("global cache-aware", "mooncake", Mooncake(TRANSFER_TOKEN_S), 3.07),
    ]
    hits: list[tuple[str, float | None, float | None]] = []
    for name, policy, instance, theirs in arms:
        result = simulate(sessions, fleet.model_copy(update={"policy": policy}), Load(mode="open"), policy=instance)
        table.rows.append((name, theirs, result.figures.ttft_mean_s))
        if name == "random":
            served = [turn.ttft_s for turn in result.turns if turn.ttft_s <= MOST_TTFT_S]
            hits.append(
                (f"random, of the {len(served) / len(result.turns):.0%} within {MOST_TTFT_S:.0f} s", theirs, statistics.mean(served))
            )
        hits.append((f"hit rate, {name}", None, 100 * (result.figures.hit_rate or 0.0)))
    table.rows += hits
    table.notes = [
        f"engine times are a roofline of the hardware x {SLOWDOWN} (the one fitted number): unscaled the fleet is busy for 31 % of the "
        "time and no policy queues as theirs do; the paper says neither its prefill speed nor its load",
        "random is twice theirs: near saturation its mean is that of a few long queues. The paper has an objective of 30 s to the first "
        "token and refuses what would miss it (429); ours refuses nothing, and whether theirs did in this experiment is not said. The "
        "mean of those within the objective is the other end of what is possible",
        "loading a hit from host memory to the GPUs is taken to hide behind the layers' computation, as the paper has it",
        "a fetch takes 3.8 us a token and nothing else: congestion on the network is not modelled",
    ]
    return table


# llm-d: b2b-saas

LADDER = (
    (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21), (40, 38), (43, 36), (46, 33), (49, 30), (52, 29),
    (55, 27), (57, 26), (60, 25),
)  # fmt: skip
DRAINED_S = 2000.0  # between stages: the harness awaits a stage's answers before it goes on
B2B_ARMS = (
    # rule, knowledge, TTFT p90 s, output tokens/s
    ("random", "memory", 92.6, 4429.0),
    ("least-loaded", "memory", 94.9, 4266.0),
    ("llm-d", "memory", 31.1, 6944.0),
    ("llm-d", "exact", 0.54, 8730.0),
    ("warm", "memory", None, None),
)


def b2b(seeds: int, stages: Sequence[tuple[int, int]]) -> tuple[Table, dict[str, object]]:
    pool = PoolSpec(count=8, profile=WorkerProfile(kv_capacity_tokens=307_328, latency=QWEN3_32B_H100_TP2, tp=2))
    table = Table(
        f"llm-d b2b-saas, 8 x Qwen3-32B on 2 x H100, {seeds} seeds (median)", "TTFT p90 in seconds, output tokens/s, hits in percent"
    )
    details: dict[str, object] = {}
    steps: list[tuple[float, float]] = [(15.0, 50.0)]
    for rate, seconds in stages:
        steps += [(0.0, DRAINED_S), (float(rate), float(seconds))]
    for policy, knowledge, ttft, speed in B2B_ARMS:
        fleet = FleetSpec(pools=[pool], policy=policy, knowledge=knowledge, memory_ttl_s=1e6)
        results = []
        for seed in range(seeds):
            sessions = b2b_saas(steps, seed)
            results.append(_b2b_figures(simulate(sessions, fleet, Load(mode="open", warmup_s=DRAINED_S), seed)))
        name = f"{policy}, {'precise' if knowledge == 'exact' else 'approximate'}" if policy in ("llm-d", "warm") else policy
        medians = [statistics.median(column) for column in zip(*results, strict=True)]
        table.rows += [
            (f"{name}: TTFT p90", ttft, medians[0]),
            (f"{name}: output tokens/s", speed, medians[1]),
            (f"{name}: hits", None, 100 * medians[2]),
        ]
        details[name] = [dict(zip(("ttft_p90_s", "output_tokens_per_s", "hit_rate"), result, strict=True)) for result in results]
    table.notes = [
        "stages and drains as in the study's report: 15 requests/s for 50 s to warm, then 3 to 60 requests/s, each awaited",
        "the study's rules of 2025 were weighted sums of prefix, KV use and queue, which are not here: the llm-d rows play its "
        "rule of 2026 (sticky until saturated), so that theirs and ours are of different rules. Ours has no 31 s: in llm-d's "
        "own later runs tuned approximate knowledge was as good as precise (13,163 tokens/s, 0.21 s against 12,598 and 0.26)",
        f"{len(stages)} of the 16 stages are played",
        "the study's output tokens/s are the harness's, over the whole ladder; ours are over the times from a stage's first request to its "
        "last answer",
    ]
    return table, details


def _b2b_figures(result: Simulation) -> tuple[float, float, float]:
    """(TTFT p90, output tokens per second of stages, hit rate)."""
    stages: dict[int, tuple[float, float]] = {}
    turns = [turn for turn in result.turns if turn.ended_at is not None]
    begun = -1
    last = -DRAINED_S
    for turn in turns:
        assert turn.ended_at is not None
        if turn.asked_at - last > DRAINED_S / 2:
            begun += 1
            stages[begun] = (turn.asked_at, turn.ended_at)
        last = turn.asked_at
        begin, end = stages[begun]
        stages[begun] = (begin, max(end, turn.ended_at))
    ttft = sorted(turn.ttft_s for turn in turns)
    took = sum(end - begin for begin, end in stages.values())
    prompt = sum(turn.prompt_tokens for turn in turns)
    return ttft[int(0.9 * len(ttft))], sum(t.output_tokens for t in turns) / took, sum(t.cached_tokens for t in turns) / prompt


# GLM-5.2: the eviction cliff


def glm_cliff(sessions: Sequence[Session], seeds: int) -> Table:
    table = Table("GLM-5.2 NVFP4 on 8 x B300, agents in closed loop", "total tokens/s per GPU, hits in percent, seconds")
    arms: list[tuple[str, int, int, dict[int, tuple[float | None, float | None, float | None]]]] = [
        ("TP8", 8, 1, {4: (None, None, None), 8: (12603, 97, None), 16: (3421, 39, 14.2), 32: (None, None, None)}),
        (
            "attention DP8",
            1,
            8,
            {24: (None, None, None), 32: (None, None, None), 48: (19465, 95, None), 64: (3797, 64, None)},
        ),
    ]
    context = statistics.median(r.input_tokens for session in sessions for part in session.tree() for r in part.requests)
    for name, tp, ranks, points in arms:
        latency = latency_model(
            "glm-5.2", "b300", weights="nvfp4", kv_dtype="fp8", speculation="mtp", num_drafts=3, tp=tp, attention_dp=ranks
        )
        whole = kv_capacity_tokens("glm-5.2", "b300", weights="nvfp4", kv_dtype="fp8", tp=tp, attention_dp=ranks)
        capacity = GLM_KV_TOKENS[name]
        profile = WorkerProfile(kv_capacity_tokens=capacity, latency=latency, gpus=8, max_num_batched_tokens=16_384)
        for live, (speed, hit, ttft) in points.items():
            load = Load(live_sessions=live, duration_s=1800, warmup_s=900, advance=0.9, shuffle=True, max_gap_s=10.0)
            runs = [simulate(sessions, FleetSpec(pools=[PoolSpec(profile=profile)]), load, seed) for seed in range(seeds)]
            told = f"{name}, {live} sessions"
            table.rows.append((f"{told}: tokens/s/GPU", speed, statistics.median(run.run({}).total_per_gpu for run in runs)))
            table.rows.append((f"{told}: hits", hit, statistics.median(100 * (run.figures.hit_rate or 0.0) for run in runs)))
            table.rows.append((f"{told}: TTFT p50", ttft, statistics.median(run.figures.ttft_p50_s or 0.0 for run in runs)))
        table.notes.append(f"{name}: room for {whole:,} tokens of KV by the memory model, {capacity:,} of them simulated")
    table.notes += [
        f"sessions are Claude Code's, cut at 256k tokens: prompts of {context:,.0f} tokens at the median. Theirs are of another recording",
        "the place of TP8's cliff is fitted, since their KV capacity is not published: 0.6M puts it between 4 and 8 sessions, 2.1M between "
        "16 and 32. The memory model's 4.2M is for FP8 KV alone, without what SGLang sets aside. What is predicted is how deep it falls",
        "gaps are at most 10 s as in their benchmark, drawn from measured quantiles",
        "past the cliff ours hits less than theirs (not explained: a strict LRU loses all sessions that come round in turn; "
        "theirs has another scheduler and another recording)",
        "attention DP's cliff comes before 48 sessions here and after in theirs, so the ratio taken for its KV capacity is too "
        "small; it is simulated as one cache, where in reality every rank has an eighth",
    ]
    return table


# TP8 is fitted: the cliff is between 8 and 16 sessions of about 100k tokens. Attention DP has 1.77M / 598K times as much (llm-d's nodes).
GLM_KV_TOKENS = {"TP8": 1_200_000, "attention DP8": 3_550_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("cache", "mooncake", "b2b", "glm"), default=("cache", "mooncake", "b2b", "glm"))
    parser.add_argument("--seeds", type=int, default=5, help="of b2b, which is bimodal")
    parser.add_argument("--json", type=Path, help="write the tables here too")
    options = parser.parse_args()
    tables: list[Table] = []
    details: dict[str, object] = {}

    def show(make: Callable[[], Table]) -> None:
        began = time.perf_counter()
        table = make()
        table.notes.append(f"took {time.perf_counter() - began:.0f} s")
        table.print()
        tables.append(table)

    mooncake, weka = TRACES / "mooncake_conversation.jsonl.gz", TRACES / "weka_agentic.jsonl.gz"
    for name, file in (("cache", mooncake), ("mooncake", mooncake), ("glm", weka)):
        if name in options.only and not file.exists():
            print(f"{name}: left out, {file.name} is not here")
    if "cache" in options.only and mooncake.exists():
        show(lambda: cache_model(read_trace(mooncake)))
    if "mooncake" in options.only and mooncake.exists():
        show(lambda: mooncake_policies(read_trace(mooncake)))
    if "b2b" in options.only:

        def b2b_table() -> Table:
            table, details["b2b"] = b2b(options.seeds, LADDER[::3])
            return table

        show(b2b_table)
    if "glm" in options.only and weka.exists():
        show(lambda: glm_cliff(limit_context(read_trace(weka), 256_000), 1))
    if options.json:
        options.json.write_text(json.dumps({"tables": [asdict(table) for table in tables], "details": details}, indent=1) + "\n")


if __name__ == "__main__":
    main()
