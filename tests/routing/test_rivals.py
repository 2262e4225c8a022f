"""The rules of other routers, each by what defines it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.fleet import Reservation, Share, Worker
from routing.policies import POLICIES, Congestion, Placement, Policy, Terms, new_policy
from routing.policies.baselines import PowerOfTwo
from routing.policies.dynamo import Dynamo, DynamoTwoTier
from routing.policies.llmd import StickyUntilSaturated, peak_prefill_rate
from routing.policies.mooncake import Mooncake, MooncakeLoadBalance
from routing.policies.preble import Preble
from routing.policies.prefill_work import LPWL, LMetric
from routing.policies.sglang import PrefixThreshold
from routing.sessions import Session, SessionTable
from tests.routing.virtual import VirtualFleet, agents, blocks, new_router, request, stayed
from workers.latency import QWEN3_32B_H100_TP2
from workers.profile import WorkerProfile


def fleet(count: int, profile: WorkerProfile | None = None) -> list[Worker]:
    return [Worker(f"w{number}", profile or WorkerProfile()) for number in range(count)]


def assign(worker: Worker, uncached: float, total: float | None = None, *, now: float = 0.0, decoding: bool = False) -> Reservation:
    """One request there: of `total` prompt tokens, `uncached` to compute."""
    total = uncached if total is None else total
    reservation = Reservation(worker, worker.prefill_s(uncached, total), total, True, now, uncached=uncached)
    if decoding:
        reservation.first_token(now)
    return reservation


def asked(
    total: float,
    cached: dict[str, float] | None = None,
    *,
    now: float = 0.0,
    restore: dict[str, float] | None = None,
    session: Session | None = None,
) -> Placement:
    return Placement(total, cached or {}, session, SessionTable(), 200.0, 1.0, Congestion(), now, restore or {})


def choice(policy: Policy, placement: Placement, workers: list[Worker]) -> str:
    chosen: Worker = policy.rank(placement, workers)[0][4]
    return chosen.id


# --- by load alone ---


def test_power_of_two_takes_the_less_loaded_of_two_and_never_the_most_loaded_of_all() -> None:
    workers = fleet(4)
    for number, worker in enumerate(workers):
        for _ in range(number):
            assign(worker, 100.0, decoding=True)
    policy = PowerOfTwo(seed=1)
    counts = Counter(choice(policy, asked(1000.0), workers) for _ in range(600))
    assert counts["w3"] == 0
    # w0 wins in 3 of the 6 pairs, w1 in 2, w2 in 1
    assert [counts[f"w{n}"] / 600 for n in range(3)] == pytest.approx([1 / 2, 1 / 3, 1 / 6], abs=0.07)
    assert choice(policy, asked(1000.0), workers[3:]) == "w3"


def test_mooncakes_load_balance_looks_at_seconds_of_queue() -> None:
    workers = fleet(2)
    assign(workers[0], 50_000.0)
    for _ in range(5):
        assign(workers[1], 1_000.0)
    assert choice(MooncakeLoadBalance(), asked(8000.0, {"w0": 8000.0}), workers) == "w1"


# --- prefill work ---


def test_lpwl_leaves_a_warm_worker_as_soon_as_more_is_pending_there_than_the_cache_saves() -> None:
    workers = fleet(2)
    placement = asked(10_000.0, {"w0": 9_000.0})
    assign(workers[0], 8_990.0)
    assert choice(LPWL(), placement, workers) == "w0"
    assign(workers[0], 20.0)
    assert choice(LPWL(), placement, workers) == "w1"


def test_lpwl_breaks_ties_by_requests_and_then_in_turn() -> None:
    workers = fleet(3)
    policy = LPWL()
    assert [choice(policy, asked(500.0), workers) for _ in range(6)] == ["w0", "w1", "w2"] * 2
    assign(workers[0], 100.0, decoding=True), assign(workers[1], 100.0, decoding=True)
    assert [choice(policy, asked(500.0), workers) for _ in range(3)] == ["w2"] * 3


def test_prefill_work_ends_with_the_first_token_and_is_never_left_over() -> None:
    worker = fleet(1)[0]
    first, second, third = assign(worker, 300.0), assign(worker, 500.0, 900.0), assign(worker, 70.0)
    assert worker.pending_tokens == 870.0
    first.first_token(1.0)
    assert worker.pending_tokens == 570.0
    second.recount(second.prefill_s / 2, second.uncached / 2)
    assert worker.pending_tokens == pytest.approx(320.0)
    for reservation in (third, second, first):
        reservation.release(2.0)
    assert worker.pending_tokens == 0.0


def test_what_other_gateways_have_sent_counts_as_prefill_work() -> None:
    workers = fleet(2)
    workers[0].hear("b", Share(5.0, 3, 0, 100_000.0, 3, 0.0, 0.0, 100_000.0), 0.0)
    placement = asked(10_000.0, {"w0": 9_000.0})
    assert choice(LPWL(), placement, workers) == "w1"
    workers[0].hear("b", None, 0.0)
    assert choice(LPWL(), placement, workers) == "w0"


def test_lmetric_multiplies_by_the_batch() -> None:
    workers = fleet(2)
    placement = asked(10_000.0, {"w0": 6_000.0})
    assert choice(LMetric(seed=1), placement, workers) == "w0"
    assign(workers[0], 100.0, decoding=True)
    assert choice(LMetric(seed=1), placement, workers) == "w0"  # 4,000 x 2 against 10,000 x 1
    assign(workers[0], 100.0, decoding=True)
    assert choice(LMetric(seed=1), placement, workers) == "w1"  # 4,000 x 3: LPWL would have stayed
    assert choice(LPWL(), placement, workers) == "w0"


def test_lmetric_is_blind_to_the_batch_where_nothing_is_left_to_prefill() -> None:
    workers = fleet(2)
    for _ in range(200):
        assign(workers[0], 100.0, decoding=True)
    assert choice(LMetric(seed=1), asked(10_000.0, {"w0": 10_000.0, "w1": 9_999.0}), workers) == "w0"


# --- llm-d ---


def test_llmd_stays_on_the_warm_worker_until_the_gap_exceeds_its_patience() -> None:
    workers = fleet(2)
    most = 18.0 * peak_prefill_rate(workers[0])
    placement = asked(50_000.0, {"w0": 40_000.0})
    assign(workers[0], most - 10.0)
    assert choice(StickyUntilSaturated(seed=1), placement, workers) == "w0"
    assert choice(StickyUntilSaturated(14.0, seed=1), placement, workers) == "w1"
    assign(workers[0], 20.0)
    assert choice(StickyUntilSaturated(seed=1), placement, workers) == "w1"


def test_llmd_goes_by_token_load_below_its_affinity_threshold_and_among_warm_workers() -> None:
    workers = fleet(3)
    assign(workers[0], 45_000.0)
    assert choice(StickyUntilSaturated(seed=1), asked(50_000.0, {"w0": 39_900.0}), workers) != "w0"  # 79.8 %
    assert choice(StickyUntilSaturated(seed=1), asked(50_000.0, {"w0": 40_000.0, "w1": 40_000.0}), workers) == "w1"


def test_llmds_peak_rate_is_each_workers_own() -> None:
    """The same tokens in front of a slow and of a fast worker: only the slow one is left."""
    slow, fast = (Worker("w0", WorkerProfile(latency=QWEN3_32B_H100_TP2.scaled(factor))) for factor in (2.0, 0.5))
    assert peak_prefill_rate(fast) == pytest.approx(4.0 * peak_prefill_rate(slow))
    idle = Worker("idle")
    for worker, expected in ((slow, "idle"), (fast, "w0")):
        assign(worker, 18.0 * peak_prefill_rate(idle))
        assert choice(StickyUntilSaturated(seed=1), asked(50_000.0, {"w0": 50_000.0}), [worker, idle]) == expected


# --- cache threshold, load thresholds ---


def test_prefix_threshold_falls_to_the_least_loaded_below_its_threshold() -> None:
    workers = fleet(3)
    assign(workers[0], 10.0), assign(workers[1], 10.0)
    assert choice(PrefixThreshold(), asked(1000.0, {"w0": 301.0, "w1": 200.0}), workers) == "w0"
    assert choice(PrefixThreshold(), asked(1000.0, {"w0": 300.0, "w1": 200.0}), workers) == "w2"


@pytest.mark.parametrize(("policy", "spread", "factor"), [(PrefixThreshold(), 64, 1.5), (DynamoTwoTier(), 32, 1.1)])
def test_balance_goes_first_only_where_both_thresholds_are_exceeded(policy: Policy, spread: int, factor: float) -> None:
    placement = asked(1000.0, {"w1": 1000.0})

    def chosen(idle: int, busy: int) -> str:
        workers = fleet(2)
        for worker, requests in zip(workers, (idle, busy), strict=True):
            for _ in range(requests):
                assign(worker, 1.0, decoding=True)
        return choice(policy, placement, workers)

    assert chosen(0, spread) == "w1"
    assert chosen(0, spread + 1) == "w0"
    many = 20 * spread
    assert chosen(many, int(factor * many)) == "w1"  # far apart, but not by the factor
    assert chosen(many, int(factor * many) + 1) == "w0"


def test_two_tier_takes_the_least_loaded_of_those_that_hold_most() -> None:
    """And only what is on the accelerator counts."""
    workers = fleet(4)
    assign(workers[0], 10.0), assign(workers[0], 10.0), assign(workers[1], 10.0), assign(workers[3], 10.0)
    held = {"w0": 600.0, "w1": 600.0, "w2": 500.0}
    assert choice(DynamoTwoTier(), asked(1000.0, held), workers) == "w1"
    assert choice(DynamoTwoTier(), asked(1000.0, {"w0": 500.0}), workers) == "w2"  # half is not more than half
    restore = {"w1": 600.0 * workers[1].profile.restore_host_s}
    assert choice(DynamoTwoTier(), asked(1000.0, held, restore=restore), workers) == "w0"


# --- Dynamo's default ---


def test_dynamo_counts_a_request_in_flight_by_its_whole_prompt() -> None:
    """One decoding request on the holder costs as much as computing its prompt elsewhere: why agents bounce."""
    workers = fleet(2)
    placement = asked(10_000.0, {"w0": 10_000.0})
    assign(workers[0], 100.0, 9_900.0, decoding=True)
    assert choice(Dynamo(seed=1), placement, workers) == "w0"
    assign(workers[0], 100.0, 200.0, decoding=True)
    assert choice(Dynamo(seed=1), placement, workers) == "w1"
    assert choice(Dynamo(prefill_load_scale=16.0, seed=1), placement, workers) == "w0"


def test_dynamo_credits_a_block_in_host_memory_by_three_quarters() -> None:
    workers = fleet(2)
    restore = {"w0": 8_000.0 * workers[0].profile.restore_host_s}
    assert choice(Dynamo(seed=1), asked(10_000.0, {"w0": 8_000.0, "w1": 6_100.0}, restore=restore), workers) == "w1"
    assert choice(Dynamo(seed=1), asked(10_000.0, {"w0": 8_000.0, "w1": 5_900.0}, restore=restore), workers) == "w0"


def test_dynamos_temperature_spreads_by_cost() -> None:
    workers = fleet(3)
    placement = asked(10_000.0, {"w0": 10_000.0, "w1": 5_000.0})
    policy = Dynamo(temperature=0.5, seed=1)
    counts = Counter(choice(policy, placement, workers) for _ in range(600))
    assert counts["w0"] > counts["w1"] > counts["w2"] > 0
    # exp(0), exp(-1) and exp(-2): costs scaled to 0, 0.5 and 1, over a temperature of 0.5
    assert counts["w1"] / counts["w0"] == pytest.approx(0.37, abs=0.12)


# --- Preble ---


def test_preble_exploits_a_match_of_more_than_half_whatever_the_load_and_explores_below() -> None:
    workers = fleet(2)
    policy = Preble()
    for _ in range(5):
        assert choice(policy, asked(8_000.0, {"w0": 4_001.0}), workers) == "w0"
    assert choice(policy, asked(8_000.0, {"w0": 4_000.0}), workers) == "w1"


def test_preble_forgets_what_is_older_than_its_window() -> None:
    workers = fleet(2)
    policy = Preble()
    for _ in range(5):
        assert choice(policy, asked(8_000.0, {"w0": 4_001.0}), workers) == "w0"
    assert choice(policy, asked(8_000.0, now=170.0), workers) == "w1"
    # the first five have left the window, the sixth has not
    assert choice(policy, asked(8_000.0, now=181.0), workers) == "w0"


def test_preble_takes_the_holder_with_fewer_requests() -> None:
    workers = fleet(2)
    policy = Preble()
    both = {"w0": 8_000.0, "w1": 8_000.0}
    assert [choice(policy, asked(8_000.0, both), workers) for _ in range(4)] == ["w0", "w1"] * 2


def test_preble_moves_prefixes_off_a_worker_that_carries_too_much_until_it_no_longer_does() -> None:
    workers = fleet(2)
    policy = Preble()
    sessions = [Session(f"s{number}", 1, 0.0) for number in range(10)]
    homes = dict.fromkeys(sessions, "w0")
    counts: list[int] = []
    for _ in range(15):
        for session in sessions:
            homes[session] = choice(policy, asked(8_000.0, {homes[session]: 5_000.0}, session=session), workers)
        counts.append(list(homes.values()).count("w1"))
    assert counts[:5] == [0] * 5  # 50 requests
    assert counts[-1] in (4, 5) and counts[5:] == sorted(counts[5:])  # they moved, and stay


def test_preble_prices_the_eviction_of_what_is_hit() -> None:
    workers = fleet(2, WorkerProfile(kv_capacity_tokens=100_000))
    policy = Preble()
    for _ in range(3):
        choice(policy, asked(8_000.0, {"w0": 7_000.0, "w1": 7_000.0}), workers)
    assert choice(policy, asked(8_000.0), workers) == "w1"
    policy = Preble()
    for _ in range(3):
        choice(policy, asked(8_000.0, {"w0": 7_000.0, "w1": 7_000.0}), workers)
    workers[1].working_set = 100_000.0  # its sessions fill it
    assert choice(policy, asked(8_000.0), workers) == "w0"


# --- Mooncake ---


def test_mooncake_takes_the_least_time_to_first_token() -> None:
    workers = fleet(2)
    placement = asked(10_000.0, {"w0": 9_000.0})
    gap = workers[1].prefill_s(10_000.0, 10_000.0) - workers[0].prefill_s(1_000.0, 10_000.0)
    head = assign(workers[0], 1.0)
    head.prefill_s = workers[0].pending_s = 0.99 * gap
    assert choice(Mooncake(), placement, workers) == "w0"
    head.prefill_s = workers[0].pending_s = 1.01 * gap
    assert choice(Mooncake(), placement, workers) == "w1"


def test_mooncake_fetches_a_prefix_where_that_pays() -> None:
    workers = fleet(3)
    assign(workers[0], 10_000.0)
    assign(workers[1], 400.0)
    placement = asked(10_000.0, {"w0": 9_000.0, "w1": 6_000.0})
    assert choice(Mooncake(), placement, workers) == "w1"  # local caches only
    terms = Terms(*Mooncake(transfer_token_s=5e-6).rank(placement, workers)[0])
    assert terms.worker is workers[2]
    assert (terms.cached, terms.restore) == (9_000.0, pytest.approx(0.045))
    # 9,000 is not twice 6,000: what w1 has is good enough
    entries = [Terms(*entry) for entry in Mooncake(transfer_token_s=5e-6).rank(placement, workers)]
    assert {t.worker.id: t.restore > 0.0 for t in entries if t.worker} == {"w0": False, "w1": False, "w2": True}
    # a slow network: not worth it
    assert choice(Mooncake(transfer_token_s=1e-3), placement, workers) == "w1"


# --- all of them ---


def snapshot(workers: list[Worker]) -> list[tuple[Any, ...]]:
    return [
        (w.pending_s, w.pending_tokens, w.decoding, list(w.prefilling), w.active_tokens, w.live_sessions, w.working_set, w.others_pending_s)
        for w in workers
    ]


loads = st.lists(st.tuples(st.floats(1.0, 60_000.0), st.floats(0.0, 1.0), st.booleans()), max_size=6)
placements = st.lists(st.tuples(st.floats(1.0, 200_000.0), st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4)), min_size=1, max_size=12)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(assigned=st.lists(loads, min_size=1, max_size=4), asks=placements, seed=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_every_rule_takes_a_candidate_leaves_the_fleet_alone_and_repeats_itself(
    name: str, assigned: list[list[tuple[float, float, bool]]], asks: list[tuple[float, list[float]]], seed: int
) -> None:
    workers = fleet(len(assigned), WorkerProfile(kv_capacity_tokens=150_000))
    for worker, requests in zip(workers, assigned, strict=True):
        worker.live_sessions, worker.working_set = len(requests), sum([total for total, *_ in requests])
        for total, uncached, decoding in requests:
            assign(worker, uncached * total, total, decoding=decoding)
    workers[0].hear("b", Share(0.5, 1, 2, 9_000.0, 3, 30_000.0, 0.0, 9_000.0), 0.0)
    before = snapshot(workers)
    policies = new_policy(name, seed), new_policy(name, seed)
    for now, (total, shares) in enumerate(asks):
        cached = {worker.id: share * total for worker, share in zip(workers, shares, strict=False) if share > 0.1}
        placement = asked(total, cached, now=now * 1e-9)
        first, second = (policy.rank(placement, workers) for policy in policies)
        assert first == second
        chosen = [Terms(*entry).worker for entry in first]
        assert chosen[0] in workers and len(set(chosen)) == len(chosen)
        assert [Terms(*entry).place for entry in first[1:]] == [workers.index(worker) for worker in chosen[1:] if worker]
        assert placement.cached == cached and snapshot(workers) == before


@pytest.mark.parametrize("name", ["lpwl", "lmetric", "llm-d", "dynamo-two-tier", "prefix-threshold", "preble", "mooncake"])
def test_cache_aware_rules_keep_agents_at_home_and_use_every_worker(name: str) -> None:
    """A fleet with room to spare: sessions that share nothing hardly move, and none of the workers is left out."""
    router = new_router(4, policy=name)
    router.policy = new_policy(name, 1)
    virtual = VirtualFleet(router)
    clients = agents(24, 8, 5, shared=[], own=100)
    draw = random.Random(2)
    for client in clients:
        virtual.start(client, draw.uniform(0.0, 5.0))
    virtual.run()
    assert stayed(clients) > 0.75
    assert len(virtual.requests) == 4


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_decision_explains_itself_under_every_rule(name: str) -> None:
    router = new_router(3, policy=name)
    router.decide(request(blocks(40), "s"), 0.0)
    decision = router.decide(request(blocks(40), "t"), 0.0)
    explained = decision.explain()
    weighed = explained["candidates"]
    assert explained["policy"] == name and isinstance(weighed, dict)
    assert decision.worker.id in weighed
    if name not in ("warm", "round-robin", "random", "least-loaded", "session-affinity", "power-of-two"):
        assert set(weighed) == {"w0", "w1", "w2"}
