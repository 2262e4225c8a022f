"""The simulated engine under a driver: what it tells, how steps are taken together, and its order against a plain scheduler."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.test_simengine import LATENCY, drain, profile, request
from workers.profile import WorkerProfile
from workers.simengine import SimEngine, SimRequest

TICK = 0.00137913  # of arrivals; no multiple of a step's duration


@dataclass
class Times:
    """Of one request, in seconds."""

    admitted: float = -1.0
    first: float = -1.0
    finished: float = -1.0
    cached_tokens: int = -1
    tokens: int = 0


@dataclass
class Arrival:
    at: float
    request: SimRequest
    aborted_at: float = float("inf")


@dataclass
class Driver:
    """One engine in virtual time, as a fleet simulator drives it."""

    engine: SimEngine
    max_steps: int
    times: dict[str, Times] = field(default_factory=dict)
    now: float = 0.0
    started: float = 0.0
    ends: float = float("inf")

    def play(self, arrivals: list[Arrival]) -> dict[str, Times]:
        events: list[tuple[float, int, Arrival]] = []
        for number, arrival in enumerate(arrivals):
            heapq.heappush(events, (arrival.at, number, arrival))
            if arrival.aborted_at != float("inf"):
                heapq.heappush(events, (arrival.aborted_at, number + len(arrivals), arrival))
        while events or self.engine.stepping:
            if not events or self.ends < events[0][0]:
                self.end_step()
                continue
            self.now, _, arrival = heapq.heappop(events)
            if self.now == arrival.at:
                self.times[arrival.request.id] = Times()
                self.engine.add(arrival.request)
            else:
                self.engine.abort(arrival.request.id)
            if not self.engine.stepping:
                self.start_step()
            else:
                self.ends = self.started + self.engine.shorten_step(self.now - self.started)
        return self.times

    def start_step(self) -> None:
        duration = self.engine.start_step(self.max_steps)
        for id in self.engine.admitted:
            assert self.times[id].admitted < 0
            self.times[id].admitted = self.now
        self.started = self.now
        self.ends = float("inf") if duration is None else self.now + duration

    def end_step(self) -> None:
        self.now = self.ends
        for output in self.engine.finish_step().outputs:
            mine = self.times[output.request_id]
            mine.tokens += output.tokens
            mine.cached_tokens = output.cached_tokens
            if output.first:
                assert mine.first < 0
                mine.first = self.now
            if output.finished:
                mine.finished = self.now
        self.start_step()


@st.composite
def arrivals(draw: st.DrawFn, aborts: bool = True) -> list[Arrival]:
    drawn: list[Arrival] = []
    for number in range(draw(st.integers(1, 14))):
        prompt_tokens, max_tokens, stream = draw(st.tuples(st.integers(1, 300), st.integers(1, 60), st.integers(0, 2)))
        sent = request(str(number), prompt_tokens, max_tokens, stream, draw(st.integers(0, 1)), draw(st.booleans()))
        if draw(st.integers(0, 3)) == 0:
            sent = SimRequest(sent.id, sent.hashes, prompt_tokens, max_tokens, sent.priority, transferred=True)
        at = draw(st.integers(0, 400)) * TICK
        aborted_at = at + draw(st.integers(1, 300)) * TICK if aborts and draw(st.integers(0, 4)) == 0 else float("inf")
        drawn.append(Arrival(at, sent, aborted_at))
    return drawn


def scarce(**changes: object) -> WorkerProfile:
    """Blocks for a few requests only, so that there are preemptions and evictions."""
    return profile(**({"kv_capacity_tokens": 16 * 24, "max_num_seqs": 5, "max_num_batched_tokens": 128} | changes))


settings_of_engines = st.fixed_dictionaries(
    {
        "latency": st.sampled_from([1.0, 1.7, 2.6]).map(lambda rate: LATENCY.model_copy(update={"tokens_per_step": rate})),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 40]),
        "max_num_batched_tokens": st.integers(20, 512),
        "block_size": st.sampled_from([16, 32]),
        "kv_capacity_tokens": st.sampled_from([16 * 24, 16 * 60]),
    }
)


@given(arrivals(), settings_of_engines, st.sampled_from([1, 7, 1 << 30]))
@settings(max_examples=150, deadline=None)
def test_without_streaming_nothing_but_the_telling_differs(load: list[Arrival], changes: dict[str, object], max_steps: int) -> None:
    drivers = [Driver(SimEngine(scarce(**changes), stream=stream), max_steps) for stream in (True, False)]
    streamed, quiet = (driver.play(load) for driver in drivers)
    for arrival in load:
        one, other = streamed[arrival.request.id], quiet[arrival.request.id]
        assert (one.admitted, one.first, one.finished, one.cached_tokens) == (
            other.admitted, other.first, other.finished, other.cached_tokens,
        )  # fmt: skip
        if one.finished >= 0:
            assert one.tokens == other.tokens == arrival.request.max_tokens
    engine, quiet_engine = (driver.engine for driver in drivers)
    assert engine.counters == quiet_engine.counters
    assert engine.cache.evicted == quiet_engine.cache.evicted
    assert engine.cache.used == quiet_engine.cache.used == engine.running == engine.waiting == 0


@given(arrivals(aborts=False), settings_of_engines, st.booleans())
@settings(max_examples=150, deadline=None)
def test_steps_taken_together_change_no_time(load: list[Arrival], changes: dict[str, object], stream: bool) -> None:
    drivers = [Driver(SimEngine(scarce(**changes), stream=stream), max_steps) for max_steps in (1, 1 << 30)]
    single, together = (driver.play(load) for driver in drivers)
    for id, one in single.items():
        other = together[id]
        assert (other.admitted, other.first, other.finished) == pytest.approx((one.admitted, one.first, one.finished))
        assert other.cached_tokens == one.cached_tokens
    engine, quick_engine = (driver.engine for driver in drivers)
    assert engine.counters == quick_engine.counters
    assert engine.cache.evicted == quick_engine.cache.evicted


class PlainScheduler:
    """vLLM's order, request by request: one list of running requests in the order of admission, no distinction of phases."""

    def __init__(self, profile: WorkerProfile) -> None:
        self.profile = profile
        self.free = profile.kv_capacity_tokens // profile.block_size
        self.waiting: list[PlainRequest] = []
        self.running: list[PlainRequest] = []

    def key(self, one: PlainRequest) -> tuple[int, int]:
        return (one.priority if self.profile.scheduling_policy == "priority" else 0, one.number)

    def step(self) -> dict[str, int]:
        """The tokens that each request computes in the next step; those that are then complete gain an output token."""
        budget, threshold = self.profile.max_num_batched_tokens, self.profile.long_prefill_token_threshold
        if len(self.running) + len(self.waiting) == 1 or not threshold:
            threshold = budget
        scheduled: dict[str, int] = {}
        preempted, place = False, 0
        while place < len(self.running) and budget:
            one = self.running[place]
            tokens = min(one.total - one.computed, threshold, budget)
            while (needed := -(-(one.computed + tokens) // self.profile.block_size) - one.blocks) > self.free:
                victim = self.running.pop()
                self.free += victim.blocks
                victim.blocks = victim.computed = 0
                self.waiting.insert(0, victim)
                preempted = True
                if victim is one:
                    break
            else:
                self.schedule(one, needed, tokens, scheduled)
                budget -= tokens
                place += 1
        self.waiting.sort(key=self.key)
        while not preempted and budget and self.waiting and len(self.running) < self.profile.max_num_seqs:
            one = self.waiting[0]
            if -(-one.total // self.profile.block_size) > self.free:
                break
            self.running.append(self.waiting.pop(0))
            tokens = min(one.total, threshold, budget)
            self.schedule(one, -(-tokens // self.profile.block_size), tokens, scheduled)
            budget -= tokens
        for one in list(self.running):
            if one.id in scheduled and one.computed == one.total:
                one.total += 1
                if one.total - one.prompt_tokens == one.max_tokens:
                    self.running.remove(one)
                    self.free += one.blocks
        return scheduled

    def schedule(self, one: PlainRequest, blocks: int, tokens: int, scheduled: dict[str, int]) -> None:
        one.blocks += blocks
        self.free -= blocks
        one.computed += tokens
        scheduled[one.id] = tokens


@dataclass(eq=False)
class PlainRequest:
    id: str
    number: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    total: int
    computed: int = 0
    blocks: int = 0


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 300), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=14),
    st.sampled_from([0, 16, 40, 100]), st.integers(16, 300), st.sampled_from(["fcfs", "priority"]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_order_is_that_of_a_scheduler_which_goes_request_by_request(
    sent: list[tuple[int, int, int, int]], threshold: int, budget: int, policy: str
) -> None:
    """Prompts without a shared prefix. Blocks are scarce where requests are served by arrival."""
    capacity = 16 * (24 if policy == "fcfs" else 1000)
    set_up = scarce(
        kv_capacity_tokens=capacity, long_prefill_token_threshold=threshold, max_num_batched_tokens=budget, scheduling_policy=policy
    )
    engine, plain = SimEngine(set_up), PlainScheduler(set_up)
    due = sorted((step, number, *rest) for number, (step, *rest) in enumerate(sent))
    step = 0
    while due or plain.running or plain.waiting:
        while due and due[0][0] <= step:
            _, number, prompt_tokens, max_tokens, priority = due.pop(0)
            engine.add(SimRequest(str(number), (), prompt_tokens, max_tokens, priority))
            plain.waiting.append(PlainRequest(str(number), len(sent) - len(due), prompt_tokens, max_tokens, priority, prompt_tokens))
        step += 1
        before = {one.id: one.total for one in (*plain.running, *plain.waiting)}
        known = [*plain.running, *plain.waiting]
        plain.step()
        result = engine.step()
        gained = {one.id: one.total - before[one.id] for one in known if one.total > before[one.id]}
        assert {o.request_id: o.tokens for o in result.outputs} == gained if result is not None else not gained
        assert (engine.running, engine.waiting) == (len(plain.running), len(plain.waiting))


def test_a_transferred_prompt_takes_blocks_but_no_computation() -> None:
    engine = SimEngine(profile())
    sent = request("a", 1000, max_tokens=3)
    engine.add(SimRequest("a", sent.hashes, 1000, 3, transferred=True))
    assert engine.start_step() == pytest.approx(LATENCY.step_s(1, 1000))
    assert engine.admitted == ["a"]
    assert engine.cache.used == 63
    outputs = engine.finish_step().outputs + drain(engine)
    assert [(o.tokens, o.first, o.finished) for o in outputs] == [(1, True, False), (1, False, False), (1, False, True)]
    assert engine.cached_prefix(sent.hashes) == 992  # others find it


def test_a_transferred_prompt_waits_for_room_and_is_recomputed_once_it_lost_it() -> None:
    engine = SimEngine(profile(kv_capacity_tokens=16 * 10))
    engine.add(request("first", 64, max_tokens=60, stream=1))
    engine.step()
    engine.add(SimRequest("second", (), 112, 40, transferred=True))
    engine.step()
    assert (engine.running, engine.waiting, engine.admitted) == (1, 1, [])
    engine = SimEngine(profile(kv_capacity_tokens=16 * 10))
    engine.add(request("first", 64, max_tokens=60, stream=1))
    engine.step()
    engine.add(SimRequest("second", (), 64, 60, transferred=True))
    outputs = drain(engine)
    assert engine.counters.preemptions > 0
    assert sum(o.tokens for o in outputs if o.request_id == "second") == 60


def test_what_the_engine_holds() -> None:
    engine = SimEngine(profile(kv_capacity_tokens=16 * 10))
    first, second = request("a", 96, max_tokens=1, stream=1), request("b", 96, max_tokens=1, stream=2)
    engine.add(first)
    engine.start_step()
    assert engine.kv_use == pytest.approx(0.6)
    engine.finish_step()
    assert (engine.kv_use, engine.cached_prefix(first.hashes), engine.cache.evicted) == (0, 96, 0)
    engine.add(second)
    drain(engine)
    assert (engine.cached_prefix(first.hashes), engine.cached_prefix(second.hashes), engine.cache.evicted) == (64, 96, 2)


def test_admission_is_told_once_even_if_a_request_comes_back() -> None:
    engine = SimEngine(profile(kv_capacity_tokens=16 * 10))
    engine.add(request("first", 64, max_tokens=60, stream=1))
    engine.add(request("second", 64, max_tokens=60, stream=2))
    admitted: list[str] = []
    while engine.step() is not None:
        admitted += engine.admitted
    assert engine.counters.preemptions > 0
    assert admitted == ["first", "second"]
