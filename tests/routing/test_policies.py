"""Where requests go, by policy. `warm` is the product; the others are baselines and fallbacks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.router import Decision, NoWorker, Router, RouteRequest
from routing.sessions import SessionRecord
from routing.trust import WINDOW
from tests.routing.virtual import MODEL, VirtualFleet, agents, blocks, new_router, request
from workers.latency import QWEN3_32B_H100_TP2, LatencyModel
from workers.profile import WorkerProfile


def finish(decision: Decision, now: float) -> str:
    decision.reservation.first_token(now)
    decision.reservation.release(now)
    return decision.worker.id


def ask(router: Router, hashes: list[int], session: str | None, now: float) -> str:
    """One request that ends at once; its worker."""
    return finish(router.decide(request(hashes, session), now), now)


# --- warm ---


def test_a_session_stays_with_its_cache() -> None:
    router = new_router(4)
    prompt = blocks(50)
    home = ask(router, prompt, "s", 0.0)
    for turn in range(1, 20):
        prompt = prompt + blocks(5)
        decision = router.decide(request(prompt, "s"), turn * 5.0)
        assert (decision.worker.id, decision.reason) == (home, "home")
        assert decision.cached_tokens == (50 + 5 * (turn - 1)) * 128
        finish(decision, turn * 5.0)


def test_a_conversation_without_a_session_key_is_known_by_its_prefix() -> None:
    router = new_router(4)
    first, second = blocks(50), blocks(50)
    homes = ask(router, first, None, 0.0), ask(router, second, None, 0.1)
    for turn in range(1, 10):
        first, second = first + blocks(3), second + blocks(3)
        assert (ask(router, first, None, turn * 2.0), ask(router, second, None, turn * 2.0 + 1)) == homes
    assert len(router.sessions) == 2


def test_conversations_of_one_client_session_are_apart() -> None:
    """Sub-agents share their parent's session id but not its prompt: each lives where its own cache is."""
    router = new_router(4)
    main, sub = blocks(200), blocks(200)
    held = router.decide(request(main, "s"), 0.0)
    held_sub = router.decide(request(sub, "s"), 0.0)
    assert held.worker is not held_sub.worker  # the first one's worker is busy
    finish(held, 1.0), finish(held_sub, 1.0)
    assert ask(router, main + blocks(2), "s", 10.0) == held.worker.id
    assert ask(router, sub + blocks(2), "s", 11.0) == held_sub.worker.id


def test_a_home_that_is_busy_for_long_is_left_and_one_that_is_busy_for_a_moment_is_not() -> None:
    router = new_router(2)
    prompt = blocks(40)
    home = ask(router, prompt, "s", 0.0)
    prompt = prompt + blocks(4)

    momentary = router.decide(request(blocks(8), "other"), 10.0)
    while momentary.worker.id != home:  # something short stands in front
        momentary = router.decide(request(blocks(8), None), 10.0)
    assert ask(router, prompt, "s", 10.0) == home

    router = new_router(2)
    prompt = blocks(40)
    home = ask(router, prompt, "s", 0.0)
    long = router.decide(request(blocks(3000), "long"), 10.0)
    while long.worker.id != home:
        long = router.decide(request(blocks(3000), None), 10.0)
    router.sessions.find("s", prompt, 40, 10.0)
    decision = router.decide(request(prompt + blocks(4), "s"), 10.0)
    if all(w.prefilling for w in router.workers.values() if w is not decision.worker):
        assert decision.wait_s <= router.workers[home].wait_s(10.0)


def test_a_session_spills_to_an_idle_worker_when_waiting_costs_more_than_computing_again() -> None:
    router = new_router(2)
    prompt = blocks(40)
    home = ask(router, prompt, "s", 0.0)
    busy = router.workers[home]
    other = next(w for w in router.workers.values() if w is not busy)
    router.set_up(other, False)
    blocking = router.decide(request(blocks(5000)), 10.0)  # more than a minute of prefill
    router.set_up(other, True)
    assert blocking.worker is busy and blocking.prefill_s > 30.0
    moved = router.decide(request(prompt + blocks(4), "s"), 10.1)
    assert (moved.worker, moved.reason) == (other, "moved")
    # and it lives there from now on, though the old home is idle again
    finish(moved, 11.0)
    finish(blocking, 90.0)
    assert ask(router, prompt + blocks(8), "s", 100.0) == other.id


def test_a_long_context_waits_where_a_short_one_moves() -> None:
    """The same queue in front of two sessions: what decides is what each would have to compute again."""

    def after_a_wait(context: int) -> str:
        router = new_router(2)
        prompt = blocks(context)
        home = router.workers[ask(router, prompt, "s", 0.0)]
        other = next(w for w in router.workers.values() if w is not home)
        router.set_up(other, False)
        router.decide(request(blocks(80)), 100.0)  # about half a second
        router.set_up(other, True)
        return router.decide(request(prompt + blocks(2), "s"), 100.0).reason

    assert after_a_wait(5) == "moved"
    assert after_a_wait(800) == "home"


def test_new_sessions_go_where_the_kv_cache_still_has_room() -> None:
    """One worker is full of live sessions, the other has as many but small ones: same load, other cost."""
    router = new_router([WorkerProfile(kv_capacity_tokens=100_000)] * 2)
    sizes: dict[str, list[float]] = {"w0": [], "w1": []}
    for number in range(24):
        decision = router.decide(request(blocks(150), f"s{number}"), number * 1.0)
        sizes[finish(decision, number * 1.0)].append(decision.prompt_tokens)
    totals = [sum(sizes[w]) for w in sizes]
    assert max(totals) <= 1.25 * min(totals)

    small, big = new_router([WorkerProfile(kv_capacity_tokens=100_000), WorkerProfile(kv_capacity_tokens=400_000)]), Counter[str]()
    for number in range(25):
        big[ask(small, blocks(150), f"s{number}", number * 1.0)] += 1
    assert 3 * big["w0"] <= 1.5 * big["w1"], big  # 25 x 19,200 tokens: what fits the one is a quarter of what fits the other


def test_slow_workers_are_used_before_the_kv_memory_of_fast_ones_is_queued_for() -> None:
    """Lone requests that share nothing: each for itself would rather wait for a fast worker, and all would wait for each other."""
    fast = QWEN3_32B_H100_TP2.scaled(0.5)
    profiles = [WorkerProfile(latency=latency, kv_capacity_tokens=70_000) for latency in (fast, QWEN3_32B_H100_TP2.scaled(2.0))]
    router = new_router(profiles)
    chosen = Counter(router.decide(request(blocks(34)), 0.15 * number).worker.id for number in range(40))
    assert chosen["w0"] * 34 * 128 < 1.6 * 70_000, chosen
    assert chosen["w0"] > chosen["w1"]


def test_nobody_comes_back_where_no_request_begins_as_another() -> None:
    router = new_router(2)
    assert router.sessions.recurrence == 1.0, "until something is known"
    for number in range(300):
        ask(router, blocks(20), None, 0.5 * number)
    assert router.sessions.recurrence < 0.1
    known = [blocks(20) for _ in range(20)]
    for number in range(400):
        ask(router, known[number % 20], None, 200.0 + number)
    assert router.sessions.recurrence > 0.9


def test_faster_workers_get_more_and_none_is_left_out() -> None:
    fast, slow = WorkerProfile(latency=QWEN3_32B_H100_TP2.scaled(0.5)), WorkerProfile(latency=QWEN3_32B_H100_TP2.scaled(2.0))
    router = new_router([fast, fast, slow, slow])
    fleet = VirtualFleet(router)
    for number, client in enumerate(agents(60, 8, 3, shared=[], own=150)):
        fleet.start(client, number * 0.2)
    fleet.run()
    assert fleet.requests["w0"] + fleet.requests["w1"] > 1.5 * (fleet.requests["w2"] + fleet.requests["w3"])
    assert min(fleet.requests.values()) > 0


def test_a_burst_of_first_requests_is_spread_before_any_has_answered() -> None:
    router = new_router(4)
    counts = Counter(router.decide(request(blocks(40), f"s{n}"), 0.0).worker.id for n in range(40))
    assert max(counts.values()) <= 12, counts


def test_short_prompts_are_spread_by_what_is_in_flight() -> None:
    """They belong to no session and have no cache worth keeping."""
    router = new_router(4)
    ask(router, blocks(40), "s", 0.0)
    counts = Counter(router.decide(RouteRequest(MODEL, [], 100), 1.0).worker.id for _ in range(40))
    assert set(counts.values()) == {10}, counts
    assert len(router.sessions) == 1


def test_siblings_with_a_long_common_prompt_go_where_it_is_being_computed() -> None:
    """Two requests with 95 % in common, one after the other: the second waits for the first's blocks."""
    router = new_router(4)
    shared = blocks(1000)
    first = router.decide(request(shared + blocks(20), "a"), 0.0)
    second = router.decide(request(shared + blocks(20), "b"), first.prefill_s * 0.9)
    assert second.worker is first.worker and second.reason == "prefix"


def test_a_decision_explains_itself() -> None:
    router = new_router(3)
    decision = router.decide(request(blocks(40), "s"), 0.0)
    explained = decision.explain()
    assert explained["worker"] == decision.worker.id and explained["reason"] == "cold" and explained["policy"] == "warm"
    candidates = explained["candidates"]
    assert isinstance(candidates, dict) and set(candidates) == {"w0", "w1", "w2"}
    assert all({"cost", "wait", "own", "evict"} <= set(terms) for terms in candidates.values())


# --- workers that come and go ---


def test_no_worker_says_whether_the_model_is_known() -> None:
    router = new_router(1)
    with pytest.raises(NoWorker) as unknown:
        router.decide(RouteRequest("other", blocks(3), 1536), 0.0)
    assert not unknown.value.known
    router.set_up(router.workers["w0"], False)
    with pytest.raises(NoWorker) as down:
        router.decide(request(blocks(3)), 0.0)
    assert down.value.known
    router.set_up(router.workers["w0"], True)
    with pytest.raises(NoWorker):
        router.decide(request(blocks(3)), 0.0, exclude=[router.workers["w0"]])


def test_sessions_of_a_dead_worker_are_placed_anew_and_stay_there() -> None:
    router = new_router(3)
    prompts = {f"s{n}": blocks(40) for n in range(12)}
    homes = {name: ask(router, prompt, name, 0.0) for name, prompt in prompts.items()}
    dead = router.workers["w0"]
    router.set_up(dead, False)
    router.lost_cache(dead)
    assert dead.live_sessions == 0 and router.memory.used_blocks("w0") == 0
    placed = {}
    for number, (name, prompt) in enumerate(prompts.items()):
        decision = router.decide(request(prompt + blocks(1), name), 10.0 + number)
        placed[name] = finish(decision, 10.0 + number)
        assert decision.reason == ("home" if homes[name] != "w0" else "cold")
    assert "w0" not in placed.values()
    router.set_up(dead, True)
    for number, (name, prompt) in enumerate(prompts.items()):
        assert ask(router, prompt + blocks(2), name, 100.0 + number) == placed[name]
    assert ask(router, blocks(40), "new", 200.0) == "w0"  # and the one that is back, empty, gets what is new


def test_models_are_apart() -> None:
    router = new_router(1)
    router.add_worker("x", ["other"], WorkerProfile())
    assert router.decide(RouteRequest("other", blocks(3), 1536), 0.0).worker.id == "x"
    assert router.decide(RouteRequest(MODEL, blocks(3), 1536), 0.0).worker.id == "w0"
    router.remove_worker("x")
    assert router.models == [MODEL]
    with pytest.raises(NoWorker):
        router.decide(RouteRequest("other", blocks(3), 1536), 0.0)


def test_nothing_is_kept_of_a_worker_that_has_left_even_where_a_request_is_under_way() -> None:
    router = new_router(1)
    router.add_worker("x", ["other"], WorkerProfile(max_num_seqs=7))
    first = router.decide(RouteRequest("other", blocks(3), 1536, "s"), 0.0)
    kept = router.workers["x"].trust
    for _ in range(WINDOW):
        kept.observe(exact_error=None, memory_error=1.0, exact_tolerance=0.0, memory_tolerance=0.0)
    router.learn(first, prompt_tokens=None, cached_tokens=0, ttft_s=None)
    assert kept.level == "load"
    under_way = router.decide(RouteRequest("other", blocks(300), 300 * 512, "t"), 0.0)
    router.remove_worker("x")
    under_way.reservation.first_token(1.0)
    under_way.reservation.release(2.0)
    router.learn(under_way, prompt_tokens=None, cached_tokens=0, ttft_s=1.0)
    assert under_way.session is not None and under_way.session.home is None
    with pytest.raises(KeyError):
        router.memory.capacity_blocks("x")
    assert not router._load_only and len(router._scales) == 1 and not router.sessions._at_home
    assert "x" not in {worker.id for worker in router.touched}


@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["turn", "lose", "elsewhere", "expire"]), st.integers(0, 2)), max_size=60)
)
@settings(max_examples=100, deadline=None)
def test_the_sessions_at_home_on_a_worker_are_those_that_say_so(steps: list[tuple[int, str, int]]) -> None:
    router = new_router(3, session_ttl_s=20.0)
    workers = list(router.workers.values())
    prompts = [blocks(4) for _ in range(6)]
    for number, (session, what, worker) in enumerate(steps):
        asked = request(prompts[session], f"s{session}")
        if what == "lose":
            router.lost_cache(workers[worker])
            assert workers[worker].live_sessions == 0 and workers[worker].working_set == 0.0
        elif what == "expire":
            router.expire(2.0 * number)
        else:
            if what == "elsewhere":
                router.session_id(asked)
                asked.shared = SessionRecord(f"w{worker}", "b", 99, 1000.0, 0.0)
            router.decide(asked, 2.0 * number).reservation.release(2.0 * number)
        homes = {w: {s for s in router.sessions._sessions.values() if s.home is w} for w in workers}
        assert router.sessions._at_home == {w: there for w, there in homes.items() if there}


def test_idle_sessions_expire() -> None:
    router = new_router(2, session_ttl_s=60.0)
    ask(router, blocks(10), "old", 0.0)
    assert sum(w.live_sessions for w in router.workers.values()) == 1
    ask(router, blocks(10), "new", 100.0)
    assert len(router.sessions) == 1 and sum(w.live_sessions for w in router.workers.values()) == 1


def test_switching_the_policy_starts_cold() -> None:
    router = new_router(2)
    prompt = blocks(50)
    ask(router, prompt, "s", 0.0)
    router.use_policy("round-robin")
    router.use_policy("warm")
    decision = router.decide(request(prompt, "s"), 1.0)
    assert decision.cached_tokens == 0 and decision.reason == "cold"
    with pytest.raises(KeyError):
        router.use_policy("best")


# --- the baselines ---


def test_round_robin_takes_turns() -> None:
    router = new_router(3, policy="round-robin")
    assert [ask(router, blocks(3), "s", float(n)) for n in range(6)] == ["w0", "w1", "w2"] * 2


def test_random_uses_every_worker() -> None:
    router = new_router(3, policy="random")
    counts = Counter(ask(router, blocks(3), "s", float(n)) for n in range(300))
    assert len(counts) == 3 and min(counts.values()) > 50


def test_least_loaded_looks_at_what_is_in_flight() -> None:
    router = new_router(3, policy="least-loaded")
    held = [router.decide(request(blocks(3), "s"), 0.0) for _ in range(3)]
    assert {d.worker.id for d in held} == {"w0", "w1", "w2"}
    finish(held[1], 1.0)
    assert router.decide(request(blocks(3), "s"), 1.0).worker is held[1].worker


def test_session_affinity_holds_and_moves_only_the_sessions_of_a_worker_that_leaves() -> None:
    router = new_router(4, policy="session-affinity")
    prompts = {f"s{n}": blocks(10) for n in range(60)}
    homes = {name: ask(router, prompt, name, 0.0) for name, prompt in prompts.items()}
    assert len(set(homes.values())) == 4
    assert {name: ask(router, prompt + blocks(1), name, 1.0) for name, prompt in prompts.items()} == homes
    router.set_up(router.workers["w2"], False)
    after = {name: ask(router, prompt + blocks(2), name, 2.0) for name, prompt in prompts.items()}
    assert all(after[name] == homes[name] for name in homes if homes[name] != "w2")


def test_a_worker_that_takes_no_time_is_no_fault() -> None:
    nothing = dict.fromkeys(("prefill_base", "prefill_token", "prefill_attention", "decode_base", "decode_seq", "decode_kv"), 0.0)
    router = new_router([WorkerProfile(latency=LatencyModel(**nothing))] * 2)
    for number in range(3):
        assert router.decide(request(blocks(20), f"s{number}"), float(number)).worker.id in router.workers
