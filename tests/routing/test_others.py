"""Several gateways over one fleet: they count each other's work and sessions, do not herd, and place as well as one gateway would."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.chain import ChainState, token_seed
from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory
from routing.others import Others
from routing.responses import Responses
from routing.router import Decision, Router, RouteRequest
from routing.sessions import SessionRecord
from routing.trust import WINDOW
from tests.routing.virtual import SharedFleet, agents, blocks, busiest_over_mean, new_router, request, stayed
from workers.profile import WorkerProfile


def pair(workers: int = 2) -> tuple[Router, Others, Router, Others]:
    a, b = new_router(workers), new_router(workers)
    return a, Others(a, "a"), b, Others(b, "b")


def tell(speaker: Others, hearers: Iterable[Others], now: float, full: bool = False) -> None:
    message = speaker.message(now, full)
    if message is not None:
        for hearer in hearers:
            hearer.heard(json.loads(json.dumps(message)), now)


# --- load ---


def test_what_one_gateway_assigns_the_other_counts_until_it_is_released() -> None:
    a, says_a, b, says_b = pair(1)
    here, there = a.workers["w0"], b.workers["w0"]
    decision = a.decide(request(blocks(400), "s"), 0.0)
    tell(says_a, [says_b], 0.0)
    assert there.wait_s(0.0) == pytest.approx(here.wait_s(0.0), abs=1e-3) and there.others_prefilling == 1
    assert there.wait_s(1.0) == pytest.approx(here.wait_s(1.0), abs=1e-3)  # both follow what time has done of it
    assert there.wait_s(1000.0) == 0.0
    assert there.others_kv_tokens == here.kv_tokens == here.active_tokens > 0.0
    assert (there.others_live_sessions, there.others_working_set) == (1, pytest.approx(here.working_set, abs=1))
    assert there.joined_step_s(0.0) > new_router(1).workers["w0"].joined_step_s(0.0)
    assert b.load()["w0"]["others_in_flight"] == 1.0 and b.load()["w0"]["prefilling"] == 0.0
    decision.reservation.first_token(3.0)
    tell(says_a, [says_b], 3.0)
    assert (there.others_prefilling, there.others_decoding, there.wait_s(3.0)) == (0, 1, 0.0)
    decision.reservation.release(4.0)
    tell(says_a, [says_b], 4.0)
    assert there.others_in_flight == 0 and there.others_active_tokens == there.others_kv_tokens == 0.0
    assert says_a.message(4.1, False) is None  # nothing has changed


def test_queues_of_two_gateways_pass_one_second_per_second() -> None:
    a, says_a, b, says_b = pair(1)
    a.decide(request(blocks(800)), 0.0)
    tell(says_a, [says_b], 0.0)
    b.decide(request(blocks(800)), 0.0)
    tell(says_b, [says_a], 0.0)
    whole = a.workers["w0"].wait_s(0.0)
    for now in (0.5, 1.0, 1.5):
        tell(says_a, [says_b], now, full=True)
        tell(says_b, [says_a], now, full=True)
        assert b.workers["w0"].wait_s(now) == pytest.approx(whole - now, rel=0.01)


def test_a_home_that_is_busy_for_another_gateway_is_busy() -> None:
    a, says_a, b, says_b = pair(2)
    prompt = blocks(5)
    home = b.decide(request(prompt, "s"), 0.0)
    home.reservation.release(0.1)
    a.set_up(a.workers["w1" if home.worker.id == "w0" else "w0"], False)
    a.decide(request(blocks(3000)), 1.0)
    tell(says_a, [says_b], 1.0)
    assert b.decide(request(prompt, "s"), 1.0).reason == "moved"


def test_old_repeated_and_own_messages_change_nothing() -> None:
    a, says_a, b, says_b = pair(1)
    decision = a.decide(request(blocks(40)), 0.0)
    first = says_a.message(0.0, False)
    decision.reservation.release(1.0)
    second = says_a.message(1.0, False)
    says_b.heard(second, 1.0)
    says_b.heard(first, 1.0)
    says_b.heard(second, 1.0)
    says_a.heard(second, 1.0)
    assert b.workers["w0"].others_in_flight == 0 and len(says_a) == 0


def test_a_gateway_that_falls_silent_or_says_goodbye_takes_its_load_with_it() -> None:
    a, says_a, b, says_b = pair(2)
    decision = a.decide(request(blocks(400), "s"), 0.0)
    for ends in ("silent", "bye"):
        tell(says_a, [says_b], 0.0, full=True)
        there = b.workers[decision.worker.id]
        assert there.others_in_flight == 1 and b.congestion.arrivals_per_s > 0.0 and b.sessions.live == 1
        says_b.expire(2.9)
        assert there.others_in_flight == 1
        if ends == "silent":
            says_b.expire(3.1)
        else:
            says_b.heard(says_a.gone(), 0.1)
        assert (there.others_in_flight, there.others_pending_s, there.others_live_sessions) == (0, 0.0, 0)
        assert b.congestion.arrivals_per_s == pytest.approx(0.0) and b.sessions.live == 0


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=8))
)
@settings(max_examples=100, deadline=None)
def test_malformed_messages_are_ignored(junk: object) -> None:
    a, says_a, b, says_b = pair(1)
    a.decide(request(blocks(4), "s"), 0.0)
    good = says_a.message(0.0, True)
    assert good is not None
    says_b.heard(junk, 0.0)
    for name in good:
        says_b.heard({**good, name: junk}, 0.0)
        says_b.heard({other: value for other, value in good.items() if other != name}, 0.0)
    says_b.heard({**good, "workers": {"w0": junk}}, 0.0)
    says_b.heard({**good, "gateway": "c", "workers": {"w0": [float("nan")] * 8}}, 0.0)
    worker = b.workers["w0"]
    assert worker.wait_s(0.0) >= 0.0 and worker.others_live_sessions >= 0 and says_b.malformed > 0


@pytest.mark.parametrize("place", ["share", "count", "rates", "sessions", "turns"])
def test_numbers_that_would_overflow_are_malformed(place: str) -> None:
    a, says_a, b, says_b = pair(1)
    a.decide(request(blocks(4), "s"), 0.0)
    good = says_a.message(0.0, True)
    assert good is not None
    bad = {
        "share": {"workers": {"w0": [1.0, 0, 1, 1.7e308, 0, 0, 0, 0]}},
        "count": {"workers": {"w0": [1.0, 0, 10**10, 1.0, 0, 0, 0, 0]}},
        "rates": {"rates": [1.7e308, 1.7e308, 0.0, 0.0]},
        "sessions": {"sessions": 10**400},
        "turns": {"taken": [["00" * 16, 2**63]]},
    }[place]
    for name in ("x", "y"):
        says_b.heard({**good, "gateway": name, **bad}, 0.0)
    assert says_b.malformed == 2 and len(says_b) == 0
    b.decide(request(blocks(4), "t"), 0.0)
    says_b.heard({**good, "placed": [[2**40, "w0", 2**64 - 1, 10]]}, 0.0)  # tickets and block hashes may be as great
    assert says_b.malformed == 2


def test_malformed_messages_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _, _, _, says_b = pair(1)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            says_b.heard({"gateway": "a"}, 0.0)
    assert len(caplog.records) == 1 and says_b.malformed == 5


# --- sessions ---


def turn(router: Router, records: dict[bytes, bytes], prompt: list[int], name: str, now: float, write: bool = True) -> Decision:
    asked = request(prompt, name)
    session_id = router.session_id(asked)
    assert session_id is not None
    asked.shared = SessionRecord.decode(records.get(session_id, b""))
    decision = router.decide(asked, now)
    decision.reservation.release(now)
    record = decision.session_record()
    assert record is not None
    if write:
        records[session_id] = record.encode()
    return decision


def test_a_session_goes_on_at_home_through_another_gateway() -> None:
    a, says_a, b, says_b = pair(4)
    records: dict[bytes, bytes] = {}
    prompt = blocks(50)
    turn(a, {}, blocks(10), "other", 0.0)
    first = turn(a, records, prompt, "s", 0.0)
    tell(says_a, [says_b], 0.0)
    second = turn(b, records, prompt + blocks(2), "s", 5.0)
    assert (second.worker.id, second.session and second.session.turns) == (first.worker.id, 2)
    assert b.workers[first.worker.id].live_sessions == 1
    tell(says_b, [says_a], 5.0)
    assert (a.workers[first.worker.id].live_sessions, a.sessions.counted, a.sessions.live) == (0, 1, 2)
    b.set_up(b.workers[first.worker.id], False)
    moved = turn(b, records, prompt + blocks(3), "s", 6.0)
    back = turn(a, records, prompt + blocks(4), "s", 7.0)
    assert back.worker.id == moved.worker.id != first.worker.id and back.reason == "home"


def test_a_record_of_a_worker_that_is_down_or_unknown_gives_no_home() -> None:
    for worker in ("w0", "gone"):
        a, *_ = pair(2)
        a.set_up(a.workers["w0"], False)
        asked = request(blocks(5), "s")
        a.session_id(asked)
        asked.shared = SessionRecord(worker, "b", 7, 5000.0, 0.0)
        decision = a.decide(asked, 0.0)
        assert (decision.worker.id, decision.reason) == ("w1", "cold")


def test_a_session_that_comes_over_takes_no_more_of_its_home_than_before() -> None:
    a, says_a, b, says_b = pair(1)
    records: dict[bytes, bytes] = {}
    prefix = blocks(40)
    turn(a, records, prefix + blocks(4), "first", 0.0)
    prompt = prefix + blocks(4)
    turn(a, records, prompt, "second", 1.0)
    before = a.workers["w0"].working_set
    turn(b, records, prompt, "second", 2.0)
    b.workers["w0"].touched.add(b.workers["w0"])
    says_a.heard(json.loads(json.dumps(says_b.message(2.0, True))), 2.0)
    worker = a.workers["w0"]
    assert worker.working_set + worker.others_working_set == pytest.approx(before, abs=4)


def test_a_record_that_is_old_changes_nothing() -> None:
    a, _, _, _ = pair(2)
    records: dict[bytes, bytes] = {}
    prompt = blocks(10)
    home = turn(a, records, prompt, "s", 0.0).worker.id
    turn(a, records, prompt, "s", 1.0)
    asked = request(prompt, "s")
    a.session_id(asked)
    asked.shared = SessionRecord("w1" if home == "w0" else "w0", "b", 1, 5e5, 0.0)
    decision = a.decide(asked, 2.0)
    assert decision.worker.id == home and decision.session is not None and decision.session.context < 5e5


def test_sessions_without_a_key_and_prompts_of_nothing_have_no_id() -> None:
    router = new_router(1)
    assert router.session_id(request(blocks(3))) is None
    assert router.session_id(request([], "s")) is None
    prompt = blocks(3)
    ids = {router.session_id(request(prompt, "s")), router.session_id(request(prompt, "t")), router.session_id(request(blocks(3), "s"))}
    assert len(ids) == 3 and all(i is not None and len(i) == 16 for i in ids)


def test_after_a_switch_of_the_policy_what_was_told_of_a_session_is_not_found() -> None:
    a, _, b, _ = pair(2)
    records: dict[bytes, bytes] = {}
    prompt = blocks(10)
    turn(a, records, prompt, "s", 0.0)
    for router in (a, b):
        router.use_policy("session-affinity")
    after = turn(b, records, prompt, "s", 1.0)
    assert after.reason == "cold" and after.session is not None and after.session.turns == 1
    assert turn(a, records, prompt, "s", 2.0).session_record() == SessionRecord.decode(records[a.session_id(request(prompt, "s")) or b""])


@given(st.binary(max_size=60))
def test_junk_is_no_record(data: bytes) -> None:
    record = SessionRecord.decode(data)
    assert record is None or record.encode() == data


@given(st.text(max_size=60), st.text(max_size=60), st.integers(0, 2**31), st.integers(0, 2_000_000))
def test_a_record_survives_its_journey(worker: str, gateway: str, turns: int, context: int) -> None:
    record = SessionRecord(worker, gateway, turns, float(context), 0.5, context / 2)
    assert SessionRecord.decode(record.encode()) == record


turns = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans(), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4)),
    max_size=40,
)


@given(turns=turns)
@settings(max_examples=150, deadline=None)
def test_every_live_session_is_counted_by_one_gateway(turns: list[tuple[int, int, bool, list[tuple[int, int]]]]) -> None:
    """Turns through any gateway, records that may be lost, messages that are heard in any order between gateways."""
    names = ("b", "c", "a")
    routers = [new_router(3) for _ in names]
    others = [Others(router, name) for router, name in zip(routers, names, strict=True)]
    prompts = [blocks(4 + n) for n in range(5)]
    records: dict[bytes, bytes] = {}
    under_way: dict[tuple[int, int], list[object]] = {(i, j): [] for i in range(3) for j in range(3) if i != j}

    def speak(number: int, full: bool = False) -> None:
        message = others[number].message(0.0, full)
        if message is not None:
            for (sender, _), queue in under_way.items():
                if sender == number:
                    queue.append(message)

    def hear(sender: int, receiver: int) -> None:
        for message in under_way[sender, receiver]:
            others[receiver].heard(message, 0.0)
        under_way[sender, receiver].clear()

    for number in range(3):
        speak(number, full=True)
    used = set()
    for gateway, session, written, heard in turns:
        used.add(session)
        turn(routers[gateway], records, prompts[session], f"s{session}", 0.0, written)
        speak(gateway)
        for sender, receiver in heard:
            if sender != receiver:
                hear(sender, receiver)
    for _ in range(4):  # claims that are answered
        for way in under_way:
            hear(*way)
        for number in range(3):
            speak(number)
    for number in range(3):
        speak(number, full=True)
    for way in under_way:
        hear(*way)
    # a gateway that has heard of a session before it knew it may claim it too low; whoever counts it says so again
    for _ in range(2):
        for number in range(3):
            speak(number, full=True)
        for way in under_way:
            hear(*way)
    assert sum(worker.live_sessions for router in routers for worker in router.workers.values()) == len(used)
    for router in routers:
        assert router.sessions.live == len(used)
        assert sum(w.live_sessions + w.others_live_sessions for w in router.workers.values()) == len(used)
        router.sessions.clear()
        assert all(w.live_sessions == 0 and w.working_set == 0.0 for w in router.workers.values())


# --- the shared index ---


def test_what_another_gateway_has_placed_is_known_by_the_shared_index() -> None:
    router = new_router(3)
    prompt = blocks(500)
    decision = router.decide(request(prompt), 0.0, known={"w2": 400, "unknown": 500, "kv:unknown": 500})
    assert (decision.worker.id, decision.reason, decision.cached_tokens) == ("w2", "prefix", 400 * 128)


BLOCK = 32


class Followed:
    """A gateway whose workers' events another gateway follows."""

    def __init__(self) -> None:
        index = MemoryIndex()
        self.router = Router(index, RoutingMemory(index))
        for name in ("a", "b"):
            self.router.add_worker(name, ["m"], WorkerProfile(model="m", block_size=BLOCK, kv_capacity_tokens=100_000))

    def request(self, start: int, length: int = 3201) -> RouteRequest:
        tokens = b"".join(token.to_bytes(4, "little") for token in range(start, start + length))
        chain = ChainState.start(token_seed(), 4 * BLOCK).extend(tokens).chain()
        return RouteRequest("m", chain.hashes, chain.length, tokens=length, block_tokens=BLOCK)


def test_events_that_another_gateway_follows_count_as_exact() -> None:
    rig = Followed()
    first = rig.router.decide(rig.request(0), 0.0, known={"kv:b": 90, "a": 100})
    assert rig.router.workers["b"].trust.level == "exact" and rig.router.workers["a"].trust.level == "memory"
    assert first.worker.id == "a"
    second = rig.router.decide(rig.request(10_000), 0.0, known={"kv:b": 90, "b": 100})  # events win over routing memory
    assert (second.worker.id, second.cached_tokens, second.by_events) == ("b", 90 * BLOCK, 90 * BLOCK)
    sibling = rig.router.decide(rig.request(10_000), 0.001, known={"kv:b": 90})
    assert sibling.by_events == 100 * BLOCK  # what was just sent counts as held
    for second_ in range(1, 200):
        rig.router.expire(float(second_))
    assert rig.router.decide(rig.request(10_000), 200.0, known={"kv:b": 7}).by_events in (None, 7 * BLOCK)
    assert rig.router.workers["b"].trust.level == "exact"


def test_without_the_shared_index_routing_memory_takes_over_at_once() -> None:
    rig = Followed()
    rig.router.set_up(rig.router.workers["b"], False)
    first = rig.router.decide(rig.request(0), 0.0, known={"kv:a": 1})
    for now in range(1, 100):
        rig.router.expire(float(now))
    again = rig.router.decide(rig.request(0), 100.0, known=None)
    assert first.by_events == BLOCK and again.by_events is None and again.cached_tokens == 3200


@pytest.mark.parametrize("known", [None, {}])
def test_whether_an_engine_is_silent_only_the_gateway_that_follows_it_can_tell(known: dict[str, int] | None) -> None:
    """A request whose home is known is not looked up, and a cold prompt matches nothing: both compute blocks, and no event is seen."""
    rig = Followed()
    worker = rig.router.workers["a"]
    rig.router.set_up(rig.router.workers["b"], False)
    rig.router.decide(rig.request(0), 0.0, known={"kv:a": 100}).reservation.release(0.0)
    for number in range(1, 60):
        decision = rig.router.decide(rig.request(number * 10_000), float(number), known=known)
        decision.reservation.release(float(number))
        rig.router.learn(decision, prompt_tokens=3201, cached_tokens=0, ttft_s=None)
        rig.router.expire(number + 0.5)
    assert worker.trust.level == "exact"


def test_another_gateways_events_that_keep_being_wrong_are_not_believed() -> None:
    rig = Followed()
    rig.router.set_up(rig.router.workers["b"], False)
    for number in range(WINDOW):
        decision = rig.router.decide(rig.request(number * 10_000), 10.0 * number, known={"kv:a": 100, "a": 50})
        decision.reservation.release(10.0 * number)
        rig.router.learn(decision, prompt_tokens=3201, cached_tokens=1600, ttft_s=None)
    assert rig.router.workers["a"].trust.level == "memory"


# --- as good as one gateway ---


def burst(gateways: int, seed: int, gap_s: float, own: int) -> float:
    """64 cold requests over 4 equal workers, each of 64 blocks, of which `own` are not shared by all: busiest over mean."""
    fleet = SharedFleet(gateways, 4, seed=seed)
    for number, client in enumerate(agents(64, 1, seed, shared=blocks(64 - own), own=own, named=own > 4)):
        fleet.start(client, 1.0 + gap_s * number)
    fleet.run()
    return busiest_over_mean(fleet.requests, 4)


@pytest.mark.parametrize("gap_s", [0.0, 0.0002, 0.001, 0.005, 0.02])
@pytest.mark.parametrize("own", [32, 4])
def test_a_burst_over_three_gateways_does_not_herd(gap_s: float, own: int) -> None:
    seeds = range(5)
    alone = [burst(1, seed, gap_s, own) for seed in seeds]
    three = [burst(3, seed, gap_s, own) for seed in seeds]
    # one request more or less is 0.06
    assert statistics.mean(three) <= statistics.mean(alone) + 0.04 and max(three) <= max(alone) + 0.07, three


def loop(gateways: int, seed: int, *, shares: bool = True, sticky: bool = False, capacity: int = 1_000_000) -> SharedFleet:
    fleet = SharedFleet(gateways, [WorkerProfile(kv_capacity_tokens=capacity)] * 4, seed=seed, shares=shares, sticky=sticky)
    clients = agents(48, 10, seed, shared=blocks(100), own=120)
    for number, client in enumerate(clients):
        fleet.start(client, 1.0 + 0.3 * number)
    fleet.run()
    fleet.stayed = stayed(clients)
    return fleet


def ttft(fleets: list[SharedFleet]) -> float:
    return statistics.mean(statistics.mean(fleet.ttfts) for fleet in fleets)


def hits(fleets: list[SharedFleet]) -> float:
    return statistics.mean(fleet.hit_tokens / fleet.prompt_tokens for fleet in fleets)


def test_turns_spread_over_three_gateways_go_as_through_one() -> None:
    seeds = range(3)
    one, three = [loop(1, seed) for seed in seeds], [loop(3, seed) for seed in seeds]
    apart = [loop(3, seed, shares=False) for seed in seeds]
    assert hits(three) >= hits(one) - 0.01 and ttft(three) <= 1.1 * ttft(one)
    assert all(fleet.stayed >= 0.98 for fleet in three)
    assert hits(apart) < hits(one) - 0.03 and ttft(apart) > 2.0 * ttft(one)  # what telling nothing costs
    for fleet in three:
        assert sum(router.sessions.counted for router in fleet.routers) == 48
        assert all(worker.others_in_flight == 0 for router in fleet.routers for worker in router.workers.values())


def test_each_gateway_makes_room_for_what_the_others_compute() -> None:
    """Near the caches' capacity, sessions that stay with their gateway: each sees a third of what pushes blocks out."""
    fleets = [loop(3, seed, sticky=True, capacity=260_000) for seed in range(2)]
    wrong = statistics.mean(statistics.mean(error > 0.1 for error in fleet.errors) for fleet in fleets)
    for fleet in fleets:
        for router in fleet.routers:
            memory = router.memory
            for name in router.workers:
                assert memory.used_blocks(name) <= memory.capacity_blocks(name)
    assert wrong < 0.2, wrong


# --- pinned requests ---


def test_a_pinned_request_goes_to_its_worker_while_that_is_up() -> None:
    router = new_router(3)
    asked = request(blocks(4), "s")
    asked.pinned = "w2"
    decision = router.decide(asked, 0.0)
    assert (decision.worker.id, decision.reason) == ("w2", "pinned")
    router.set_up(decision.worker, False)
    assert router.decide(asked, 1.0).reason != "pinned"


def test_responses_are_remembered_for_a_while_and_not_without_bound() -> None:
    responses = Responses(ttl_s=10.0, most=3)
    for number in range(5):
        responses.placed(f"r{number}", f"w{number}", float(number))
    assert [responses.worker_of(f"r{n}", 5.0) for n in range(5)] == [None, None, "w2", "w3", "w4"]
    assert responses.worker_of("r2", 12.0) is None
    responses.placed("r9", "w9", 100.0)
    assert len(responses) == 1
