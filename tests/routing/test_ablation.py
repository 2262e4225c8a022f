"""`warm` without one of its terms: that term is gone, and nothing else."""

from __future__ import annotations

import random

import pytest

from routing.policies import Policy, Terms, Warm
from routing.policies.ablation import TERMS, Ablated, ablated
from routing.router import Decision
from tests.routing.virtual import VirtualFleet, agents, blocks, new_router, request
from workers.profile import WorkerProfile


def played(policy: Policy) -> list[Decision]:
    """Agents with a shared prompt on a fleet that is too small for them, through real decisions."""
    router = new_router([WorkerProfile(kv_capacity_tokens=100_000)] * 3)
    router.policy = policy
    virtual = VirtualFleet(router)
    draw = random.Random(3)
    for client in agents(30, 6, 4, shared=list(range(10**9, 10**9 + 40)), own=60):
        virtual.start(client, draw.uniform(0.0, 10.0))
    virtual.run()
    return virtual.decisions


def weighed(decisions: list[Decision]) -> list[Terms]:
    """The entries of all decisions that weighed anything."""
    return [Terms(*entry) for decision in decisions for entry in decision.candidates if len(decision.candidates) > 1]


@pytest.mark.parametrize("term", ["congestion", "evict", "crowd", "decode"])
def test_a_term_that_is_switched_off_is_zero_and_the_others_are_not(term: str) -> None:
    full, without = weighed(played(Warm())), weighed(played(ablated(term)))
    assert any(getattr(entry, term) > 0.0 for entry in full)
    assert all(getattr(entry, term) == 0.0 for entry in without)
    for other in {"congestion", "evict", "crowd", "decode"} - {term}:
        assert any(getattr(entry, other) > 0.0 for entry in without), other


def test_without_nothing_it_is_warm() -> None:
    full, same = played(Warm()), played(Ablated())
    assert [d.worker.id for d in full] == [d.worker.id for d in same]
    assert Ablated().name == "warm" and ablated("evict").name == "warm-without-evict"


def with_a_busy_home(policy: Policy) -> Decision:
    """A session of 200 blocks whose home has 230 others to compute first: more than the session would cost elsewhere, not twice."""
    router = new_router(2)
    router.policy = policy
    prompt = blocks(200)
    home = router.decide(request(prompt, "s"), 0.0)
    home.reservation.release(1.0)
    other = next(w for w in router.workers.values() if w is not home.worker)
    router.set_up(other, False)
    router.decide(request(blocks(230)), 100.0)
    router.set_up(other, True)
    return router.decide(request(prompt + blocks(3), "s"), 100.0)


def test_without_hold_a_session_leaves_a_home_that_is_busy_for_a_moment() -> None:
    assert with_a_busy_home(Warm()).reason == "home"
    assert with_a_busy_home(ablated("hold")).reason == "moved"


def test_without_repeated_a_shared_prefix_counts_in_full() -> None:
    """While nine sessions share a prompt, computing it on a second worker is an investment; without the term it is a loss."""

    def own_elsewhere(policy: Policy) -> float:
        router = new_router(2)
        router.policy = policy
        shared = blocks(100)
        for number in range(9):
            router.decide(request(shared + blocks(2), f"s{number}"), number * 10.0).reservation.release(number * 10.0 + 1.0)
        holders = [w for w in router.workers if router.memory.used_blocks(w)]
        decision = router.decide(request(shared + blocks(2), "new"), 100.0)
        return max(Terms(*entry).own for entry in decision.candidates) if len(holders) == 1 else 0.0

    full, without = own_elsewhere(Warm()), own_elsewhere(ablated("repeated"))
    assert without > 3.0 * full


def test_without_ties_a_millisecond_decides() -> None:
    """Not which worker carries fewer sessions. (Without `crowd` in both, which would price that difference.)"""

    def placed(policy: Policy) -> str:
        router = new_router(2)
        router.policy = policy
        router.decide(request(blocks(50), "s"), 0.0).reservation.release(1.0)
        router.workers["w1"].network_s = 0.001
        assert router.workers["w0"].live_sessions == 1
        return router.decide(request(blocks(50), "t"), 100.0).worker.id

    assert placed(Ablated("crowd")) == "w1"
    assert placed(Ablated("crowd", "ties")) == "w0"


def test_a_term_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match="no such term: speed; known: congestion, evict"):
        Ablated("evict", "speed")
    assert set(TERMS) == {"congestion", "evict", "crowd", "decode", "repeated", "hold", "ties"}
