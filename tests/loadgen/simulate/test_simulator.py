"""The fleet simulator: times, hits, sub-agents, tiers, prefill/decode, and that nothing is lost whatever the trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.bound import LruCache
from loadgen.simulate import FleetSpec, Load, PoolSpec, simulate
from loadgen.trace import Request, Session
from routing.policies import POLICIES
from routing.policies.mooncake import Mooncake
from tests.loadgen.simulate.virtual_fleet import BLOCK, LATENCY, fleet, growing, play, pool, session, turn


def test_lone_request_takes_the_latency_models_time() -> None:
    result = play([session("a", [turn(1, 100, output=4)])])
    (alone,) = result.turns
    prefill = LATENCY.prefill_s(1005, 1005)
    steps = [LATENCY.step_s(1, 1005 + n) for n in (1, 2, 3)]
    assert alone.ttft_s == pytest.approx(prefill)
    assert alone.e2e_s == pytest.approx(prefill + sum(steps))
    assert result.virtual_s == pytest.approx(alone.e2e_s)
    assert result.figures.ttft_mean_s == pytest.approx(prefill)
    assert result.workers["w0"].busy == pytest.approx(1.0)


def test_second_turn_pays_for_what_is_new() -> None:
    result = play([session("a", [turn(1, 100, output=1), turn(1, 150, output=1)])])
    assert [t.cached_tokens for t in result.turns] == [0, 1000]
    assert result.turns[1].ttft_s == pytest.approx(LATENCY.prefill_s(505, 1505))
    assert result.turns[1].asked_at == pytest.approx(result.turns[0].e2e_s)


def test_engine_speed_and_overhead_count() -> None:
    trace = [session("a", [turn(1, 100, output=1)])]
    alone = play(trace).turns[0].ttft_s
    assert play(trace, fleet(pool(speed=2.0))).turns[0].ttft_s == pytest.approx(alone / 2)
    assert play(trace, fleet(overhead_s=0.5)).turns[0].ttft_s == pytest.approx(alone + 0.5)


def test_requests_together_wait_for_each_other() -> None:
    """Two prompts that do not fit one chunk: the second one's first token comes after both."""
    sessions = [session(name, [turn(number, 100, output=1)]) for number, name in enumerate("ab")]
    result = play(sessions, fleet(pool(max_num_batched_tokens=1005)), live_sessions=2)
    first, second = result.turns
    assert first.ttft_s == pytest.approx(LATENCY.prefill_s(1005, 1005))
    assert second.ttft_s == pytest.approx(2 * first.ttft_s)
    assert second.scheduled_at == pytest.approx(first.ended_at)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=40), st.integers(20, 80))
@settings(deadline=None)
def test_hit_rate_is_that_of_an_independent_lru(drawn: list[tuple[int, int, int]], capacity: int) -> None:
    """One engine, prompts one after the other, one token each: an LRU cache of its size, but for the block behind the last whole one."""
    sessions = [session(str(n), [turn(stream, blocks, output=1, more=more)]) for n, (stream, blocks, more) in enumerate(drawn)]
    result = play(sessions, fleet(pool(kv_capacity_tokens=capacity * BLOCK)))
    large, small = LruCache(capacity * BLOCK), LruCache((capacity - 1) * BLOCK)
    for record, (stream, blocks, _) in zip(result.turns, drawn, strict=True):
        keys = [stream * 1000 + n for n in range(blocks)]
        most = large.add(keys, blocks, BLOCK, record.prompt_tokens)
        assert small.add(keys, blocks, BLOCK, record.prompt_tokens) <= record.cached_tokens <= most
    cached = sum(record.cached_tokens for record in result.turns)
    assert result.figures.hit_rate == cached / sum(record.prompt_tokens for record in result.turns)


def test_what_was_evicted_is_told_from_what_was_never_there() -> None:
    again = [session("a", [turn(1, 40, output=1)]), session("b", [turn(2, 40, output=1)]), session("c", [turn(1, 40, output=1)])]
    assert play(again, fleet(pool(kv_capacity_tokens=500))).figures.evicted_tokens > 0
    assert play(again, fleet(pool(kv_capacity_tokens=2000))).figures.evicted_tokens == 0


def test_equal_seeds_give_equal_runs_and_others_differ() -> None:
    sessions = [growing(f"s{n}", n, 4, gap_s=1.0) for n in range(12)]
    spec = fleet(pool(3, kv_capacity_tokens=2000), policy="random")
    runs = [play(sessions, spec, seed, live_sessions=6, shuffle=True, requests=60) for seed in (1, 1, 2)]
    figures = [(asdict(run.figures), {name: asdict(worker) for name, worker in run.workers.items()}) for run in runs]
    assert figures[0] == figures[1]
    assert figures[0] != figures[2]


def test_knowledge_of_the_caches_decides_where_a_lone_prompt_goes() -> None:
    """Prompts without a session that come again: exact knowledge follows what engines hold, so that all but the first are warm."""
    sessions = [session(str(n), [turn(n % 4, 50)], named=False, start_s=20.0 * n) for n in range(24)]
    spec = fleet(pool(4), policy="mooncake", knowledge="exact")
    result = play(sessions, spec, mode="open")
    assert sum(record.cached_tokens == 500 for record in result.turns) == 20


def test_exact_knowledge_stays_exact(caplog: pytest.LogCaptureFixture) -> None:
    sessions = [session(str(n), [turn(n % 4, 50)], named=False, start_s=20.0 * n) for n in range(24)]
    play(sessions, fleet(pool(2), knowledge="exact"), mode="open")
    assert caplog.messages == []  # a router that no longer believes events says so


def test_sub_agents_are_awaited() -> None:
    child = session("a/child", [turn(2, 100), turn(2, 120)])
    other = session("a/other", [turn(3, 20)])
    parent = session("a", [turn(1, 50, spawns=[child, other]), turn(1, 60, gap_s=0.01)])
    result = play([parent])
    by_prompt = {record.prompt_tokens: record for record in result.turns}
    first, last = by_prompt[505], by_prompt[605]
    children = [by_prompt[tokens] for tokens in (1005, 1205, 205)]
    assert {by_prompt[1005].asked_at, by_prompt[205].asked_at} == {first.ended_at}
    assert last.asked_at == max(record.ended_at for record in children if record.ended_at is not None)
    assert result.figures.sessions == 3


def test_tiers_use_their_pools_and_are_told_apart() -> None:
    spec = fleet(pool(1, name="fast", tiers=["latency"]), pool(1, name="bulk", tiers=["throughput"]))
    sessions = [growing(f"s{n}", n, 2) for n in range(40)]
    result = play(sessions, spec, live_sessions=4, tiers={"latency": 0.25, "throughput": 0.75})
    assert {record.tier: record.worker for record in result.turns} == {"latency": "fast0", "throughput": "bulk0"}
    counts = Counter(record.tier for record in result.turns)
    assert {tier: figures.requests for tier, figures in result.tiers.items()} == counts
    assert 4 <= counts["latency"] <= 36
    assert sum(figures.prompt_tokens for figures in result.tiers.values()) == result.figures.prompt_tokens


def test_prefill_and_decode_workers_hand_prompts_over() -> None:
    spec = fleet(pool(1, name="p", role="prefill"), pool(1, name="d", role="decode"), transfer_base_s=0.5, transfer_token_s=1e-3)
    result = play([session("a", [turn(1, 100, output=3), turn(1, 100, output=1)])], spec)
    first, second = result.turns
    assert first.ttft_s == pytest.approx(LATENCY.prefill_s(1005, 1005) + 0.5 + 1.005)
    assert first.e2e_s > first.ttft_s + 2 * LATENCY.decode_base
    assert second.cached_tokens == 1000  # the prefill worker has kept it
    assert second.e2e_s == second.ttft_s
    assert (result.workers["p0"].batch, result.workers["d0"].requests) == (0.0, 0)
    assert result.workers["d0"].batch > 0


def test_request_that_fits_no_cache_is_an_error_and_its_session_goes_on() -> None:
    trace = [session("a", [turn(1, 500), turn(1, 20)])]
    result = play(trace, fleet(pool(kv_capacity_tokens=1000)))
    assert (result.figures.errors, result.figures.requests) == (1, 1)
    assert result.error_kinds == {"the request exceeds the worker's KV cache": 1}
    assert [record.ended_at is None for record in result.turns] == [True, False]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("knowledge", ["memory", "exact"])
def test_every_policy_plays_a_trace_to_its_end(policy: str, knowledge: str) -> None:
    sessions = [growing(f"s{n}", n, 3, gap_s=0.5) for n in range(8)]
    result = play(sessions, fleet(pool(3, kv_capacity_tokens=2500), policy=policy, knowledge=knowledge), live_sessions=4)
    assert (result.figures.requests, result.figures.errors, result.figures.sessions) == (24, 0, 8)


def test_rule_that_fetches_has_the_prefix_where_it_decides_and_pays_for_the_way() -> None:
    class Fetching(Mooncake):
        """Every request to the worker that holds less."""

        def rank(self, placement: Any, candidates: Any) -> Any:
            return sorted(super().rank(placement, candidates), key=lambda entry: placement.cached.get(entry[4].id, 0.0))

    sessions = [session(str(n), [turn(1, 100, output=1)], start_s=60.0 * n, named=False) for n in range(2)]
    result = simulate(sessions, fleet(pool(2), knowledge="exact"), Load(mode="open"), policy=Fetching(1e-3))
    first, second = result.turns
    assert {first.worker, second.worker} == {"w0", "w1"}
    assert second.cached_tokens == 1000
    assert second.ttft_s == pytest.approx(1000 * 1e-3 + LATENCY.prefill_s(5, 1005))


# Whatever the trace: every request ends once, and tokens add up.

_turns = st.lists(
    st.builds(turn, st.integers(0, 4), st.integers(0, 30), st.integers(0, 6), st.integers(1, 9), gap_s=st.floats(0, 5)),
    min_size=1,
    max_size=4,
)


@st.composite
def _traces(draw: st.DrawFn) -> list[Session]:
    sessions = []
    for number in range(draw(st.integers(1, 6))):
        turns: list[Request] = draw(_turns)
        for place in range(draw(st.integers(0, 2))):
            turns[0].spawns.append(session(f"s{number}/{place}", draw(_turns), scope="local"))
        scope = draw(st.sampled_from(["local", "global"]))
        sessions.append(session(f"s{number}", turns, scope=scope, named=draw(st.booleans()), start_s=draw(st.floats(0, 20))))
    return sessions


@given(
    trace=_traces(),
    mode=st.sampled_from(["open", "closed"]),
    policy=st.sampled_from(sorted(POLICIES)),
    knowledge=st.sampled_from(["memory", "exact"]),
    lanes=st.integers(1, 4),
    capacity=st.integers(20, 200),
    disaggregated=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_request_ends_once_and_tokens_add_up(
    trace: list[Session], mode: Any, policy: str, knowledge: Any, lanes: int, capacity: int, disaggregated: bool
) -> None:
    small: dict[str, Any] = {"kv_capacity_tokens": capacity * BLOCK, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    pools: list[PoolSpec] = [pool(2, **small)]
    if disaggregated:
        pools = [pool(2, name="p", role="prefill", **small), pool(1, name="d", role="decode", **small)]
    spec: FleetSpec = fleet(*pools, policy=policy, knowledge=knowledge)
    result = play(trace, spec, mode=mode, live_sessions=lanes)
    asked = Counter((r.input_tokens, max(1, r.output_tokens)) for s in trace for part in s.tree() for r in part.requests)
    assert Counter((t.prompt_tokens, t.output_tokens) for t in result.turns) == asked
    ended = [t for t in result.turns if t.ended_at is not None]
    figures = result.figures
    assert figures.requests == len(ended)
    assert figures.requests + figures.errors == sum(asked.values())
    assert figures.prompt_tokens == sum(t.prompt_tokens for t in ended)
    assert figures.output_tokens == sum(t.output_tokens for t in ended)
    assert figures.sessions == sum(1 for s in trace for _ in s.tree())
    assert sum(w.requests for w in result.workers.values()) == len(ended)
    for t in ended:
        assert t.scheduled_at is not None and t.first_at is not None and t.ended_at is not None
        assert t.asked_at <= t.arrived_at <= t.scheduled_at < t.first_at <= t.ended_at <= result.virtual_s
        assert 0 <= t.cached_tokens <= t.bound_tokens < t.prompt_tokens
        assert 0 <= t.lost_tokens <= t.bound_tokens - t.cached_tokens
