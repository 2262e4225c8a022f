"""What is reserved is given back, whatever happens to a request and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.policies import POLICIES
from routing.router import Decision, NoWorker
from tests.routing.virtual import blocks, new_router, request
from workers.profile import WorkerProfile

PROMPTS = [blocks(n) for n in (1, 3, 8, 40, 300)]
steps = st.lists(
    st.tuples(
        st.sampled_from(["decide", "decide", "decide", "first_token", "release", "release again", "down", "up", "learn"]),
        st.integers(0, 9),
        st.floats(0.0, 3.0),
        st.booleans(),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(steps=steps)
@settings(max_examples=60, deadline=None)
def test_reservations_return_to_zero(policy: str, steps: list[tuple[str, int, float, bool]]) -> None:
    router = new_router([WorkerProfile(max_num_seqs=3, kv_capacity_tokens=20_000)] * 3, policy=policy)
    workers = list(router.workers.values())
    open_decisions: list[Decision] = []
    now = 0.0
    for what, number, passed, streamed in steps:
        now += passed
        if what == "decide":
            prompt = request(PROMPTS[number % len(PROMPTS)], None if number % 3 else f"s{number}", streamed=streamed)
            try:
                open_decisions.append(router.decide(prompt, now))
            except NoWorker as none:
                assert none.known and not any(w.up for w in workers)
        elif what in ("down", "up"):
            worker = workers[number % 3]
            router.set_up(worker, what == "up")
            if what == "down":
                router.lost_cache(worker)
        elif open_decisions:
            decision = open_decisions[number % len(open_decisions)]
            if what == "first_token":
                decision.reservation.first_token(now)
            elif what == "learn":
                router.learn(decision, prompt_tokens=number * 100, cached_tokens=number * 10, ttft_s=passed)
            elif what == "release":
                open_decisions.remove(decision)
                decision.reservation.release(now)
                decision.reservation.release(now)
            else:
                decision.reservation.release(now)
                decision.reservation.first_token(now)
        for worker in workers:
            assert worker.wait_s(now) >= 0.0 and worker.pending_s >= -1e-9 and worker.in_flight >= 0
            assert -1e-6 <= worker.kv_tokens <= worker.active_tokens + 1e-6
            assert worker.live_sessions >= 0 and worker.working_set >= -1e-6
        assert sum(w.in_flight for w in workers) <= len(open_decisions)
    for decision in open_decisions:
        decision.reservation.release(now)
    for worker in workers:
        assert (worker.in_flight, worker.decoding, len(worker.prefilling)) == (0, 0, 0)
        assert worker.pending_s == worker.pending_tokens == 0.0 and worker.wait_s(now) == 0.0
        assert worker.active_tokens == worker.kv_tokens == 0.0
    router.sessions.clear()
    assert all(w.live_sessions == 0 and w.working_set == pytest.approx(0.0, abs=1e-6) for w in workers)
    assert all(router.load()[w.id]["prefilling"] == 0.0 for w in workers)


def test_what_requests_begin_with_in_common_takes_kv_memory_once() -> None:
    """And what a session itself has brought, at each of its turns."""
    router = new_router([WorkerProfile(kv_capacity_tokens=20_000)])
    [worker] = router.workers.values()
    common = blocks(100)
    alike = [router.decide(request(common + blocks(10), f"s{n}"), 0.1 * n) for n in range(5)]
    assert worker.active_tokens == 5 * 110 * 128
    assert worker.kv_tokens == (110 + 4 * 10) * 128
    assert worker.wait_s(1.0, 700.0) == worker.wait_s(1.0), "there is room for one more"
    assert worker.wait_s(1.0, 2000.0) > worker.wait_s(1.0), "and for no more than that"
    router.decide(request(blocks(20), "other"), 1.0)
    for decision in alike:
        decision.reservation.first_token(2.0)
        decision.reservation.release(2.0)
    assert worker.kv_tokens == 20 * 128
    again = router.decide(request([*alike[1].request.hashes, *blocks(5)], "s1"), 3.0)
    assert again.reservation.kv_tokens == 15 * 128, "its own ten blocks and five more"


def test_the_wait_follows_what_is_assigned_and_what_time_has_done_of_it() -> None:
    router = new_router(1)
    [worker] = router.workers.values()
    first = router.decide(request(blocks(40)), 0.0)
    assert first.wait_s == 0.0 and worker.wait_s(0.0) == pytest.approx(first.prefill_s)
    second = router.decide(request(blocks(80)), 0.1)
    assert second.wait_s == pytest.approx(first.prefill_s - 0.1)
    first.reservation.first_token(0.2)
    assert worker.wait_s(0.2) == pytest.approx(second.prefill_s)
    first.reservation.release(0.2)
    second.reservation.release(0.3)
    assert worker.wait_s(0.3) == 0.0


def test_a_worker_whose_first_token_is_late_looks_as_slow_as_it_is() -> None:
    router = new_router(1)
    [worker] = router.workers.values()
    router.decide(request(blocks(40)), 0.0)
    waits = [worker.wait_s(now) for now in (1.0, 5.0, 20.0)]
    assert waits == sorted(waits) and waits[-1] > 19.0


def test_an_answer_that_comes_whole_counts_as_prefilled_when_it_should_be() -> None:
    router = new_router(1)
    [worker] = router.workers.values()
    decision = router.decide(request(blocks(40), streamed=False), 0.0)
    assert worker.wait_s(decision.prefill_s + 0.01) == 0.0 and worker.decoding == 1
    decision.reservation.release(9.0)
    assert worker.in_flight == 0


def test_a_full_batch_is_waited_for() -> None:
    router = new_router([WorkerProfile(max_num_seqs=2)])
    [worker] = router.workers.values()
    decisions = [router.decide(request(blocks(2)), 0.0) for _ in range(2)]
    for decision in decisions:
        decision.reservation.first_token(0.1)
    assert worker.wait_s(0.1) > 0.0
    decisions[0].reservation.release(0.2)
    assert worker.wait_s(0.2) == 0.0
