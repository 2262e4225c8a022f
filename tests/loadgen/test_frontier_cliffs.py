"""Cliffs are found where they are, not where a fair trade is made, and are named with the right cause."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.frontier.cliffs import Cliff, distinct, find_cliffs
from loadgen.frontier.points import gather
from loadgen.results import Run
from tests.loadgen.frontier_runs import agentic_sweep, run


def cliffs(*runs: Run, limit: float = 1.5) -> list[Cliff]:
    return find_cliffs(gather(runs), limit)


def step(before: dict[str, Any], after: dict[str, Any], axis: str = "load.live_sessions", values: tuple[Any, Any] = (8, 16)) -> list[Cliff]:
    """The cliffs between two neighbours that are equal but for these figures."""
    common = {"user": 60.0, "out": 100.0, "ttft_p50_s": 0.5, "ttft_p90_s": 1.0, "hit_bound": 0.97}
    return cliffs(*(run({axis: value, "tp": 8}, **{**common, **figures}) for value, figures in zip(values, (before, after), strict=True)))


def only(found: list[Cliff]) -> Cliff:
    assert len(found) == 1
    return found[0]


def published(topology: str, concurrency: int, total_per_gpu: float, hit_rate: float, ttft_p50_s: float | None = None) -> Run:
    """A published point of GLM-5.2 (NVFP4, B300, SGLang), as total tokens/s/GPU and hit rate; an output token for each 280 of prompt."""
    tokens = round(total_per_gpu * 8 * 100)
    arm = {"topology": topology, "concurrency": concurrency}
    return run(
        arm, None, total_per_gpu / 281, gpus=8, prompt_tokens=tokens * 280 // 281, hit_rate=hit_rate, ttft_p50_s=ttft_p50_s, source="live"
    )


def test_the_published_eviction_cliffs() -> None:
    found = cliffs(
        published("TP8", 8, 12_603, 0.97, 1.1),
        published("TP8", 16, 3_421, 0.39, 14.2),
        published("TP8/DPA", 48, 19_465, 0.95),
        published("TP8/DPA", 64, 3_797, 0.64),
    )
    assert [(cliff.before.arm["topology"], cliff.step, cliff.cause.kind) for cliff in found] == [
        ("TP8", (8, 16), "eviction"),
        ("TP8/DPA", (48, 64), "eviction"),
    ]
    assert found[0].cause.text == "hit rate fell 0.97 -> 0.39 (KV working set exceeds capacity)"
    assert {change.key: round(change.factor, 1) for change in found[0].changes} == {"ttft_p50_s": 12.9, "output_per_gpu": 3.7}
    assert found[1].factor == pytest.approx(19_465 / 3_797, rel=1e-3)


def test_less_memory_is_a_cliff_in_the_other_direction() -> None:
    less, more = {"hit_rate": 0.4, "ttft_p90_s": 20.0, "out": 40.0, "evicted_tokens": 560_000}, {"hit_rate": 0.96}
    cliff = only(step(less, more, "profile.kv_capacity_tokens", (1_000_000, 2_000_000)))
    assert cliff.step == (2_000_000, 1_000_000) and cliff.cause.kind == "eviction"


def test_twice_the_load_at_half_the_speed_is_a_fair_share() -> None:
    assert step({"user": 60, "ttft_p90_s": 1.0}, {"user": 30, "ttft_p90_s": 2.0}) == []


def test_what_throughput_gained_in_exchange_is_no_cliff() -> None:
    assert step({"user": 60, "out": 100}, {"user": 28, "out": 190}) == []


def test_asking_less_of_each_gpu_is_no_cliff() -> None:
    # the same load on twice as many workers: half the tokens per GPU, and faster for users
    assert step({"out": 100, "ttft_p90_s": 1.0}, {"out": 50, "ttft_p90_s": 0.8, "user": 65}, "count", (4, 8)) == []


def test_less_load_is_no_cliff() -> None:
    # half the sessions, half the tokens; that TTFT was a little worse is chance
    assert step({"out": 40, "ttft_p90_s": 1.2}, {"out": 100, "ttft_p90_s": 1.0}) == []


def test_a_rise_that_nobody_sees_is_no_cliff() -> None:
    assert step({"ttft_p90_s": 0.01, "ttft_p50_s": 0.01}, {"ttft_p90_s": 0.08, "ttft_p50_s": 0.08}) == []


def test_what_the_seeds_spread_covers_is_no_cliff() -> None:
    def runs(noisy: float) -> list[Run]:
        arms = [({"n": 1}, 1.0), ({"n": 2}, 9.0)]
        return [run(arm, 50, 100, seed, ttft_p90_s=ttft) for arm, usual in arms for seed, ttft in enumerate((usual, usual, noisy))]

    assert len(cliffs(*runs(1.0)[:3], *runs(9.0)[3:])) == 1
    assert cliffs(*runs(9.5)) == []  # one seed was as slow before


def test_neighbours_differ_in_one_axis_only() -> None:
    assert cliffs(run({"tp": 1, "n": 1}, 90, 100, ttft_p90_s=1), run({"tp": 2, "n": 2}, 20, 10, ttft_p90_s=50)) == []


def test_words_have_no_neighbours() -> None:
    assert cliffs(run({"policy": "a"}, 90, 100, ttft_p90_s=1), run({"policy": "b"}, 20, 10, ttft_p90_s=50)) == []


def test_a_larger_limit_finds_steeper_cliffs_only() -> None:
    runs = [run({"n": 10}, 60, 100, ttft_p90_s=1), run({"n": 11}, 60, 100, ttft_p90_s=3)]
    assert len(cliffs(*runs, limit=2)) == 1 and cliffs(*runs, limit=4) == []


SLOW = {"ttft_p50_s": 4.0, "ttft_p90_s": 9.0}
LIVE = {"source": "live"}  # does not report evicted tokens
WARM = {"hit_rate": 0.96, **LIVE}


@pytest.mark.parametrize(
    ("before", "after", "kind", "text"),
    [
        ({"hit_rate": 0.96}, {**SLOW, "hit_rate": 0.7, "evicted_tokens": 240_000}, "eviction", "0.96 -> 0.70"),
        ({"hit_rate": 0.96}, {**SLOW, "hit_rate": 0.7, "evicted_tokens": 20_000}, "placement", "lost to eviction only went 0.00 -> 0.02"),
        # a full batch at home sends sessions past their cache: the slots are the cause
        (
            {"hit_rate": 0.94, "queue_p90_s": 0.1},
            {**SLOW, "hit_rate": 0.9, "queue_p90_s": 8.0, "batch": 31.0, "evicted_tokens": 1_000},
            "queueing",
            "hit rate fell 0.94 -> 0.90 as sessions went elsewhere",
        ),
        (WARM, {**SLOW, **LIVE, "hit_rate": 0.7}, "eviction", "0.96 -> 0.70"),
        (
            {"hit_rate": 0.96},
            {**SLOW, "hit_rate": 0.7, "preemptions": 120, "evicted_tokens": 250_000},
            "eviction",
            "(KV working set exceeds capacity); preemptions a request 0 -> 0.12",
        ),
        ({"hit_rate": 0.96, "hit_bound": 0.97}, {**SLOW, "hit_rate": 0.7, "hit_bound": 0.72}, "sharing", "0.97 -> 0.72"),
        ({**WARM, "hit_bound_lru": 0.97}, {**SLOW, **LIVE, "hit_rate": 0.7, "hit_bound_lru": 0.95}, "placement", "past their cache"),
        ({**WARM, "hit_bound_lru": 0.97}, {**SLOW, **LIVE, "hit_rate": 0.7, "hit_bound_lru": 0.73}, "eviction", "exceeds capacity"),
        ({"preemptions": 2}, {**SLOW, "preemptions": 300, "kv_use": 0.99}, "preemption", "0.002 -> 0.3, 99% of KV blocks held"),
        ({"queue_p90_s": 0.1}, {**SLOW, "queue_p90_s": 7.0, "batch": 31.0}, "queueing", "batch slots full: 31 of 32"),
        ({"queue_p90_s": 0.1}, {**SLOW, "queue_p90_s": 7.0, "batch": 9.0, "kv_use": 0.95}, "queueing", "KV blocks full: 95%"),
        ({"queue_p90_s": 0.1}, {**SLOW, "queue_p90_s": 7.0, "batch": 9.0, "busy": 0.99}, "queueing", "engines busy 99%"),
        # already queueing before, and twice as long now (a simulated fleet of twelve sessions a GPU)
        ({"ttft_p90_s": 23.1, "queue_p90_s": 22.0}, {"ttft_p90_s": 49.4, "queue_p90_s": 43.9, "kv_use": 0.86}, "queueing", "KV blocks"),
        ({"queue_p90_s": 0.1, "busy": 0.5}, {**SLOW, "queue_p90_s": 7.0, "busy": 0.6}, "queueing", "bursts or behind long prefills"),
        ({"itl_p50_s": 0.01}, {**SLOW, "itl_p50_s": 0.011}, "queueing", "queue not measured"),
        ({"imbalance": 1.1, "queue_p90_s": 0.1}, {**SLOW, "imbalance": 3.0, "queue_p90_s": 0.2}, "imbalance", "1.1 -> 3"),
        (
            {"itl_p50_s": 0.02, "itl_p99_s": 0.05, "queue_p90_s": 0.0},
            {"user": 20.0, "itl_p50_s": 0.03, "itl_p99_s": 0.9, "queue_p90_s": 0.0},
            "interference",
            "ITL p99 0.05 -> 0.9 s",
        ),
        (
            {"itl_p50_s": 0.02, "itl_p99_s": 0.05, "batch": 8.0, "queue_p90_s": 0.0},
            {"user": 20.0, "itl_p50_s": 0.06, "itl_p99_s": 0.15, "batch": 40.0, "queue_p90_s": 0.0},
            "batch",
            "8 -> 40, ITL p50 3.00x",
        ),
        ({"queue_p90_s": 0.0}, {**SLOW, "queue_p90_s": 0.1}, "unknown", "none of"),
    ],
)  # fmt: skip
def test_causes(before: dict[str, Any], after: dict[str, Any], kind: str, text: str) -> None:
    runs = [
        run({"n": n, "profile.max_num_seqs": 32}, **{"user": 60.0, "out": 100.0, "ttft_p50_s": 0.5, "ttft_p90_s": 1.0, **figures})
        for n, figures in ((8, before), (16, after))
    ]
    cause = only(cliffs(*runs)).cause
    assert cause.kind == kind, cause.text
    assert text in cause.text


def test_alike_cliffs_are_told_once_and_those_beside_the_front_first() -> None:
    points = gather(agentic_sweep(1))
    found = find_cliffs(points)
    told = distinct(found)
    assert sum(1 + cliff.likewise for cliff in told) == len(found)
    assert len({(cliff.axis, cliff.step, cliff.cause.kind) for cliff in told}) == len(told)
    assert told[0].factor == max(cliff.factor for cliff in found)
    gentle = min((c for c in found if c.axis == "load.live_sessions"), key=lambda cliff: cliff.factor)
    first = distinct(found, {gentle.before.id})[0]
    assert first.beside and first.before is gentle.before


def test_a_swept_closed_loop_falls_where_memory_ends() -> None:
    found = [cliff for cliff in find_cliffs(gather(agentic_sweep(2))) if cliff.axis == "load.live_sessions" and cliff.factor > 10]
    assert found and {cliff.cause.kind for cliff in found} == {"eviction"}
