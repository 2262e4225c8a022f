"""Tickets: a gateway takes it that sessions which drew theirs before, unheard of, go where it would send them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from routing.others import Others
from routing.router import Decision, Router
from routing.tickets import HEARD_WITHIN_S
from tests.routing.virtual import blocks, new_router, request


def place(
    router: Router, prompt: list[int], session: str | None, ticket: int, now: float = 0.0, *, pinned: str | None = None, **how: Any
) -> Decision:
    asked = request(prompt, session)
    asked.ticket, asked.pinned = ticket, pinned
    return router.decide(asked, now, **how)


def tell(speaker: Others, hearer: Others, now: float) -> None:
    hearer.heard(json.loads(json.dumps(speaker.message(now, False))), now)


def in_flight(router: Router) -> list[int]:
    return [worker.in_flight + worker.others_in_flight for worker in router.workers.values()]


def test_gateways_that_have_heard_nothing_place_in_turn() -> None:
    a, b = new_router(4), new_router(4)
    prefix = blocks(20)
    placed = [place(router, prefix + blocks(20), f"s{n}", n).worker.id for n, router in enumerate([a, b, b, a, b, a, a, b], 1)]
    assert placed == ["w0", "w1", "w2", "w3"] * 2


def test_what_was_assumed_gives_way_to_what_is_told() -> None:
    a, b = new_router(2), new_router(2)
    says_a, says_b = Others(a, "a"), Others(b, "b")
    a.set_up(a.workers["w0"], False)  # so that it does not do what the other assumes
    place(a, blocks(40), "s1", 1)
    second = place(b, blocks(40), "s2", 2)
    assert (second.worker.id, in_flight(b)) == ("w1", [1, 1])
    tell(says_a, says_b, 0.005)
    assert in_flight(b) == [0, 2]
    assert b.workers["w0"].others_pending_s == 0.0


def test_what_nobody_tells_of_is_forgotten() -> None:
    router = new_router(2)
    others = Others(router, "a")
    place(router, blocks(40), "s", 3)
    assert sum(in_flight(router)) == 3
    others.expire(HEARD_WITHIN_S + 0.001)
    assert sum(in_flight(router)) == 1


def test_an_own_ticket_that_is_used_late_counts_once() -> None:
    router = new_router(2)
    place(router, blocks(40), "s2", 2)
    place(router, blocks(40), "s1", 1)
    assert in_flight(router) == [1, 1]


def test_a_counter_that_begins_anew_or_leaps_does_no_harm() -> None:
    router = new_router(2)
    place(router, blocks(40), "s1", 1_000_000)
    Others(router, "a").expire(1.0)
    place(router, blocks(40), "s2", 1, 1.0)
    assert sum(in_flight(router)) == 2
    place(router, blocks(40), "s3", 3, 1.0)
    assert sum(in_flight(router)) == 4


def test_a_request_that_is_placed_again_uses_its_ticket_once() -> None:
    router = new_router(2)
    asked = request(blocks(40), "s")
    asked.ticket = 1
    first = router.decide(asked, 0.0)
    first.reservation.release(0.1)
    router.decide(asked, 0.1, exclude=[first.worker])
    assert [ticket for ticket, *_ in router.tickets.placed] == [1]


def test_a_shared_beginning_that_two_gateways_send_to_one_worker_is_counted_once() -> None:
    a, b = new_router(1), new_router(1)
    says_a, says_b = Others(a, "a"), Others(b, "b")
    alone = new_router(1)
    prefix = blocks(60)
    for number, router in enumerate([a, b, b, a], 1):
        prompt = prefix + blocks(4)
        place(router, prompt, f"s{number}", number)
        alone.decide(request(prompt, f"s{number}"), 0.0)
    tell(says_b, says_a, 0.0)
    tell(says_a, says_b, 0.0)
    expected = alone.workers["w0"].wait_s(0.0)
    assert a.workers["w0"].wait_s(0.0) == pytest.approx(expected, rel=0.01) == b.workers["w0"].wait_s(0.0)
    for worker in (a.workers["w0"], b.workers["w0"]):
        assert worker.working_set + worker.others_working_set == pytest.approx(alone.workers["w0"].working_set, abs=4)


def test_a_shared_beginning_that_nobody_else_computes_after_all_is_counted() -> None:
    """Thought to be behind another gateway's session, which then went elsewhere."""
    a, b = new_router(2), new_router(2)
    says_a, says_b = Others(a, "a"), Others(b, "b")
    a.set_up(a.workers["w0"], False)  # so that it does not do what the other assumes
    prefix = blocks(60)
    place(a, prefix + blocks(4), "s1", 1)
    place(b, prefix + blocks(4), "s2", 2)
    behind = place(b, prefix + blocks(4), "s3", 3)
    worker = b.workers["w0"]
    assert behind.worker is worker and behind.cached_tokens > 0.0
    tell(says_a, says_b, 0.005)
    assert behind.reservation.prefill_s == pytest.approx(worker.prefill_s(behind.prompt_tokens, behind.prompt_tokens))
    assert worker.wait_s(0.005) == pytest.approx(behind.reservation.prefill_s, rel=0.1)
    assert worker.working_set == pytest.approx(behind.prompt_tokens)


@pytest.mark.parametrize("known", [0, 60])
@pytest.mark.parametrize("seed", range(10))
def test_gateways_that_have_heard_of_other_things_agree_in_how_long_each_worker_is_busy(seed: int, known: int) -> None:
    """Whichever of them was the first to send such a session to a worker, and whatever it thought of the others."""
    rng = random.Random(seed)
    alone, routers = new_router(4), [new_router(4) for _ in range(3)]
    gateways = [Others(router, f"g{n}") for n, router in enumerate(routers)]
    prefix = blocks(60)
    held = {f"w{n}": known for n in range(4)} if known else None
    for number in range(1, 25):
        who = rng.randrange(3)
        asked = request(prefix + blocks(4), f"s{number}")
        alone.decide(request(asked.hashes, f"s{number}"), 0.0, known=held)
        asked.ticket = number
        routers[who].decide(asked, 0.0, known=held)
        if rng.random() < 0.3:
            message = json.loads(json.dumps(gateways[who].message(0.0, False)))
            for other in gateways:
                if rng.random() < 0.5:
                    other.heard(message, 0.0)
    last = request(prefix + blocks(4), "last")
    last.ticket = 25
    waits = {entry[4].id: entry[5] for entry in routers[0].decide(last, 0.0, known=held).candidates}
    assert waits == {name: pytest.approx(worker.wait_s(0.0), rel=0.2) for name, worker in alone.workers.items()}


def test_what_is_known_of_sessions_alike_ends_with_them() -> None:
    router = new_router(2)
    others = Others(router, "a")
    for number in range(1, 50):
        place(router, blocks(4), f"s{number}", 2 * number, 0.05 * number)
        others.expire(0.05 * number)
    others.expire(100.0)
    tickets = router.tickets
    assert not (tickets._recent or tickets._roots or tickets._alike or tickets._unsettled)


def test_sessions_that_are_assumed_take_no_more_of_a_cache_than_they_will() -> None:
    alone, late = new_router(1), new_router(1)
    prefix = blocks(60)
    for number in range(1, 9):
        alone.decide(request(prefix + blocks(4), f"s{number}"), 0.0)
    asked = request(prefix + blocks(4), "s8")
    asked.ticket = 8
    late.decide(asked, 0.0, known={"w0": 60})
    whole = 64 * late.block_units / late.tokens.of(asked.model)
    working_set = late.workers["w0"].working_set + late.workers["w0"].others_working_set
    assert working_set + 60 / 64 * whole == pytest.approx(alone.workers["w0"].working_set, abs=4)


def test_a_session_without_a_key_goes_where_all_of_it_is_though_its_like_were_just_sent_elsewhere() -> None:
    a, b = new_router(3), new_router(3)
    says_a, says_b = Others(a, "a"), Others(b, "b")
    prefix, own = blocks(20), blocks(8)
    homes = [place(a, prefix + end, f"s{n}", n) for n, end in enumerate((own, blocks(8), blocks(8)), 1)]
    for decision in homes:
        decision.reservation.release(0.001)
    tell(says_a, says_b, 0.001)
    asked = request(prefix + own + blocks(1))
    asked.ticket = 4
    depths = {decision.worker.id: 28 if decision is homes[0] else 20 for decision in homes}
    again = b.decide(asked, 0.002, known=depths)
    assert {entry[4].id: entry[11] for entry in again.candidates} == {name: depth * 128 for name, depth in depths.items()}


def test_what_a_worker_shows_one_gateway_of_its_speed_the_others_learn() -> None:
    a, b = new_router(2), new_router(2)
    says_a, says_b = Others(a, "a"), Others(b, "b")
    for number in range(8):
        decision = a.decide(request(blocks(40), f"s{number}"), 10.0 * number)
        a.learn(decision, prompt_tokens=None, cached_tokens=0, ttft_s=3.0 * decision.prefill_s)
        decision.worker.observe_decode(0.1, decision.worker.step_s())
        decision.reservation.release(10.0 * number)
        tell(says_a, says_b, 10.0 * number)
    for name in a.workers:
        assert a.workers[name].prefill_scale > 1.5
        assert b.workers[name].prefill_scale == pytest.approx(a.workers[name].prefill_scale, rel=0.02)
        assert b.workers[name].decode_scale == pytest.approx(a.workers[name].decode_scale, rel=0.02)


def test_a_prompt_shorter_than_what_longer_ones_begin_with_takes_no_less_than_nothing() -> None:
    a, b = new_router(1), new_router(1)
    says_a, hears_b = Others(a, "a"), Others(b, "b")
    root = blocks(1)
    for number in (1, 2):
        place(a, root + blocks(3), f"s{number}", number)
    place(a, root + blocks(63), "long", 3, known={"w0": 60})
    worker = a.workers["w0"]
    assert worker.pending_s >= 0.0 and worker.pending_tokens >= 0.0 and worker.working_set >= 0.0
    tell(says_a, hears_b, 0.0)
    assert hears_b.malformed == 0 and b.workers["w0"].others_prefilling == 3


def test_a_longer_prompt_that_is_held_makes_no_worker_look_busy() -> None:
    a, b = new_router(2), new_router(2)
    says_a, says_b = Others(a, "a"), Others(b, "b")
    root = blocks(1)
    place(a, root + blocks(400), "long", 1, known={"w0": 400, "w1": 400})
    tell(says_a, says_b, 0.0)
    placed = [place(b, root + blocks(3), f"s{n}", n, 0.001).worker.id for n in range(2, 8)]
    assert placed.count("w0") == placed.count("w1")


def test_other_prompts_that_this_gateway_has_sent_meanwhile_are_waited_for() -> None:
    router = new_router(2)
    prefix = blocks(4)
    place(router, prefix + blocks(4), "first", 1)
    big = place(router, blocks(2_000), "big", 2, 0.01)
    assert all(place(router, prefix + blocks(4), f"s{n}", n, 0.02).worker is not big.worker for n in range(3, 9))


def test_a_worker_that_has_lost_a_beginning_long_ago_counts_as_cold_though_such_keep_coming() -> None:
    router = new_router(2)
    prefix, lost = blocks(60), router.workers["w0"]
    for number in range(1, 200):
        now = 0.05 * number
        decision = place(router, prefix + blocks(4), f"s{number}", number, now, exclude=[lost] if number >= 100 else [])
        decision.reservation.release(now + 0.02)
        if number == 150:
            router.memory.forget("w0")
    assert place(router, prefix + blocks(4), "last", 200, 10.0, pinned="w0").cached_tokens == 0.0


def test_a_crowd_of_this_gateways_own_goes_where_the_wait_is_least() -> None:
    router = new_router(4)
    prefix = blocks(1)
    for _ in range(3):
        place(router, blocks(200), None, 0, pinned="w0")
    placed = [place(router, prefix + blocks(199), f"s{n}", n, 0.001 * n) for n in range(1, 7)]
    assert "w0" not in {decision.worker.id for decision in placed}


def test_what_a_worker_holds_that_was_no_candidate_of_the_first_counts() -> None:
    router = new_router(4)
    prefix = blocks(60)
    held = {f"w{n}": 60 for n in range(4)}
    place(router, prefix + blocks(4), "pinned", 1, known=held, pinned="w0")
    later = [place(router, prefix + blocks(4), f"s{n}", n, known=held) for n in range(2, 8)]
    assert all(decision.reservation.prefill_s == pytest.approx(decision.prefill_s) for decision in later)


def test_a_worker_that_was_replaced_counts_as_cold() -> None:
    router = new_router(2)
    prefix = blocks(60)
    place(router, prefix + blocks(4), "s1", 1, known={"w0": 60, "w1": 60})
    router.remove_worker("w1")
    router.add_worker("w1", ["m"])
    cold = place(router, prefix + blocks(4), "s2", 2, 0.01, known={"w0": 60}, pinned="w1")
    place(router, prefix + blocks(4), "s3", 3, 0.02, known={"w0": 60})
    assert cold.reservation.prefill_s == pytest.approx(cold.prefill_s)


def test_tickets_of_one_session_used_in_another_order_leave_nothing() -> None:
    router = new_router(2)
    prompt = blocks(40)
    for ticket in (2, 1):
        place(router, prompt, "s", ticket).reservation.release(1.0)
    Others(router, "a").expire(100.0)
    assert all(not worker.others for worker in router.workers.values()) and not router.tickets._roots and not router.tickets._alike
