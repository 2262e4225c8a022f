"""The simulated engine's core: scheduling, the prefix cache, preemption and time."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.latency import LatencyModel
from workers.profile import WorkerProfile
from workers.simengine import Output, SimEngine, SimRequest

LATENCY = LatencyModel(
    prefill_base=0.01, prefill_token=1e-5, prefill_attention=1e-9, decode_base=0.02, decode_seq=1e-3, decode_kv=1e-7
)  # fmt: skip


def profile(**changes: object) -> WorkerProfile:
    settings: dict[str, object] = {
        "latency": LATENCY, "block_size": 16, "kv_capacity_tokens": 16 * 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512,
    }  # fmt: skip
    return WorkerProfile.model_validate(settings | changes)


def request(id: str, prompt_tokens: int, max_tokens: int = 4, stream: int = 0, priority: int = 0, output_known: bool = False) -> SimRequest:
    """A request whose prompt is the first tokens of an endless `stream`, so that prompts of one stream share prefixes."""
    tokens = prompt_tokens + (max_tokens if output_known else 0)
    return SimRequest(id, [(stream << 32) + i for i in range(tokens // 16)], prompt_tokens, max_tokens, priority)


def drain(engine: SimEngine, max_steps: int = 1) -> list[Output]:
    outputs: list[Output] = []
    while (result := engine.step(max_steps)) is not None:
        outputs += result.outputs
    return outputs


def cached(engine: SimEngine, sent: SimRequest) -> int:
    engine.add(sent)
    return drain(engine, 1000)[-1].cached_tokens


def test_request_alone_takes_the_time_of_the_latency_model() -> None:
    engine = SimEngine(profile())
    engine.add(request("a", 1200, 3))
    results = []
    while (result := engine.step()) is not None:
        results.append(result)
    chunks = [512, 512, 176]
    # each token attends to all before it, the chunk's own ones included
    prefill = [0.01 + c * (1e-5 + 1e-9 * (before + c / 2)) for c, before in zip(chunks, [0, 512, 1024], strict=True)]
    decode = [LATENCY.step_s(1, 1201), LATENCY.step_s(1, 1202)]
    assert [r.duration_s for r in results] == pytest.approx(prefill + decode)
    assert [sum(o.tokens for o in r.outputs) for r in results] == [0, 0, 1, 1, 1]
    assert [o.first for r in results for o in r.outputs] == [True, False, False]


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(16, 2000))
@settings(max_examples=60, deadline=None)
def test_a_prompt_in_chunks_costs_what_it_costs_whole_but_for_the_steps(prompt_tokens: int, cached_tokens: int, budget: int) -> None:
    """Cold or behind a cached prefix, the chunks add up to the latency model's prefill; each further step adds its fixed cost."""
    engine = SimEngine(profile(max_num_batched_tokens=budget))
    cached(engine, request("before", min(cached_tokens, prompt_tokens), max_tokens=1))
    engine.add(request("a", prompt_tokens, max_tokens=1))
    results = []
    while (result := engine.step()) is not None:
        results.append(result)
    uncached = prompt_tokens - results[-1].outputs[0].cached_tokens
    expected = LATENCY.prefill_s(uncached, prompt_tokens) + (len(results) - 1) * LATENCY.prefill_base
    assert sum(r.duration_s for r in results) == pytest.approx(expected)


def test_speed_divides_time() -> None:
    slow, fast = SimEngine(profile()), SimEngine(profile(), speed=4)
    for engine in (slow, fast):
        engine.add(request("a", 100))
    assert slow.start_step() == pytest.approx(4 * (fast.start_step() or 0))


def test_repeated_prompt_hits_all_but_the_last_block() -> None:
    engine = SimEngine(profile())
    assert cached(engine, request("a", 160)) == 0
    assert cached(engine, request("b", 160)) == 144
    assert cached(engine, request("c", 165)) == 160
    assert engine.counters.prefix_queries == 485
    assert engine.counters.prefix_hits == 304


def test_next_turn_hits_the_answer() -> None:
    engine = SimEngine(profile())
    cached(engine, request("a", 100, max_tokens=60, output_known=True))
    assert cached(engine, request("b", 200)) == 144  # 159 tokens have KV: the last token's is never computed


def test_prefix_is_shared_while_it_is_still_being_prefilled() -> None:
    engine = SimEngine(profile())
    engine.add(request("a", 1280))
    engine.step()
    engine.step()
    engine.add(request("b", 1280))
    outputs = drain(engine)
    assert {o.request_id: o.cached_tokens for o in outputs} == {"a": 0, "b": 1024}


def test_decodes_go_before_chunks_of_a_long_prompt() -> None:
    engine = SimEngine(profile())
    engine.add(request("short", 16, max_tokens=50, stream=1))
    engine.step()
    engine.add(request("long", 2000, stream=2))
    result = engine.step()
    assert result is not None
    assert [o.request_id for o in result.outputs] == ["short"]
    # one pass for both: its fixed cost, here the larger one of decoding, is paid once
    assert result.duration_s == pytest.approx(LATENCY.step_s(1, 17) + 511 * (1e-5 + 1e-9 * 511 / 2))


def test_batch_slots_bound_the_batch() -> None:
    engine = SimEngine(profile(max_num_seqs=2))
    for i in range(5):
        engine.add(request(str(i), 32, stream=i))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 3)


@pytest.mark.parametrize(("policy", "order"), [("priority", ["running", "soon", "late"]), ("fcfs", ["running", "late", "soon"])])
def test_lower_priority_goes_first_where_the_engine_schedules_by_it(policy: str, order: list[str]) -> None:
    engine = SimEngine(profile(max_num_seqs=1, scheduling_policy=policy))
    for id, priority in (("running", 0), ("late", 5), ("soon", -5)):
        engine.add(request(id, 32, priority=priority))
        if id == "running":
            engine.step()
    finished = [o.request_id for o in drain(engine) if o.finished]
    assert finished == order


@pytest.mark.parametrize(("policy", "preempted"), [("priority", "batch"), ("fcfs", "urgent")])
def test_out_of_blocks_preempts_the_last_in_order(policy: str, preempted: str) -> None:
    engine = SimEngine(profile(kv_capacity_tokens=16 * 10, scheduling_policy=policy))
    engine.add(request("batch", 64, max_tokens=60, stream=1, priority=5))
    engine.step()
    engine.add(request("urgent", 64, max_tokens=60, stream=2, priority=-5))
    finished = [o.request_id for o in drain(engine) if o.finished]
    assert engine.counters.preemptions > 0
    assert finished[-1] == preempted


def first_tokens(engine: SimEngine) -> dict[str, int]:
    """The step, counted from 1, that gave each request its first token."""
    steps: dict[str, int] = {}
    number = 0
    while (result := engine.step()) is not None:
        number += 1
        steps |= {o.request_id: number for o in result.outputs if o.first}
    return steps


def test_a_long_prompt_leaves_budget_for_others_up_to_the_threshold() -> None:
    for threshold, step_of_short in ((0, 5), (256, 1)):
        engine = SimEngine(profile(long_prefill_token_threshold=threshold))
        engine.add(request("long", 2000, stream=1))
        engine.add(request("short", 200, stream=2))
        assert first_tokens(engine)["short"] == step_of_short


def test_a_long_prompt_that_is_alone_has_the_whole_budget() -> None:
    engine = SimEngine(profile(long_prefill_token_threshold=64))
    engine.add(request("long", 1024))
    assert first_tokens(engine) == {"long": 2}


def test_out_of_blocks_preempts_the_latest_and_recomputes_it() -> None:
    engine = SimEngine(profile(kv_capacity_tokens=16 * 10))
    engine.add(request("first", 64, max_tokens=60, stream=1))
    engine.add(request("second", 64, max_tokens=60, stream=2))
    outputs = drain(engine)
    assert engine.counters.preemptions > 0
    assert [o.request_id for o in outputs if o.finished] == ["first", "second"]
    assert sum(o.tokens for o in outputs if o.request_id == "second") == 60


def test_speculation_gives_several_tokens_a_step() -> None:
    engine = SimEngine(profile(latency=LATENCY.model_copy(update={"tokens_per_step": 2.5})))
    engine.add(request("a", 16, max_tokens=12))
    tokens = [o.tokens for o in drain(engine)]
    assert tokens == [1, 2, 3, 2, 3, 1]


def test_steps_taken_together_equal_single_steps() -> None:
    def run(max_steps: int) -> tuple[float, dict[str, int]]:
        engine = SimEngine(profile())
        engine.add(request("a", 600, max_tokens=70, stream=1))
        engine.add(request("b", 40, max_tokens=200, stream=2))
        total, tokens = 0.0, {"a": 0, "b": 0}
        while (result := engine.step(max_steps)) is not None:
            total += result.duration_s
            for output in result.outputs:
                tokens[output.request_id] += output.tokens
        return total, tokens

    one, many = run(1), run(1000)
    assert many[0] == pytest.approx(one[0])
    assert many[1] == one[1] == {"a": 70, "b": 200}


def test_an_arrival_cuts_steps_taken_together() -> None:
    engine = SimEngine(profile())
    engine.add(request("a", 16, max_tokens=100))
    engine.step()
    whole = engine.start_step(1000)
    engine.add(request("b", 16, stream=1))
    cut = engine.shorten_step(0.05)
    assert whole is not None and cut < whole
    assert 0.05 <= cut < 0.05 + LATENCY.step_s(1, 100)
    assert engine.finish_step().steps == 3
    assert engine.start_step() is not None and engine.running == 2


def test_request_larger_than_the_cache_is_refused() -> None:
    engine = SimEngine(profile(kv_capacity_tokens=160))
    with pytest.raises(ValueError, match="needs 11 KV blocks, the engine has 10"):
        engine.add(request("a", 170, max_tokens=1))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_eviction_order_is_that_of_a_queue_of_blocks(prompts: list[tuple[int, int]]) -> None:
    """One request after the other against a plain model: idle blocks in a queue, a finished request's appended tail first."""
    capacity = 48
    engine = SimEngine(profile(kv_capacity_tokens=16 * capacity))
    queue: OrderedDict[int, None] = OrderedDict()
    for number, (stream, blocks) in enumerate(prompts):
        sent = request(str(number), blocks * 16, max_tokens=1, stream=stream)
        hit = 0
        while hit < blocks - 1 and sent.hashes[hit] in queue:
            hit += 1
        assert cached(engine, sent) == hit * 16
        for block in sent.hashes[:hit]:
            del queue[block]
        # The last block of a repeated prompt is computed anew, though a copy of it is still there.
        while len(queue) + blocks > capacity:
            queue.popitem(last=False)
        for block in reversed(sent.hashes):
            queue.pop(block, None)
            queue[block] = None


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[str, SimRequest]]:
    """Arrivals, aborts and steps in any order."""
    actions: list[tuple[str, SimRequest]] = []
    for number in range(draw(st.integers(1, 14))):
        prompt_tokens, max_tokens, stream = draw(st.tuples(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2)))
        sent = request(str(number), prompt_tokens, max_tokens, stream, draw(st.integers(0, 1)), draw(st.booleans()))
        actions.append(("add", sent))
        actions += [("step", sent)] * draw(st.integers(0, 4))
        if draw(st.integers(0, 4)) == 0:
            actions.append(("abort", sent))
    return actions


@given(loads(), st.integers(1, 50), st.sampled_from([1.0, 2.6]), st.integers(16, 512))
@settings(max_examples=150, deadline=None)
def test_every_request_ends_once_with_all_its_tokens(
    actions: list[tuple[str, SimRequest]], max_steps: int, rate: float, budget: int
) -> None:
    engine = SimEngine(
        profile(
            kv_capacity_tokens=16 * 24, max_num_seqs=4, max_num_batched_tokens=budget,
            latency=LATENCY.model_copy(update={"tokens_per_step": rate}),
        )
    )  # fmt: skip
    outputs: list[Output] = []
    sent: dict[str, SimRequest] = {}
    aborted: set[str] = set()

    def check() -> None:
        cache = engine.cache
        assert cache.private >= 0 and 0 <= cache.held <= cache.cached
        assert cache.private + cache.cached <= cache.capacity
        assert engine.running <= 4

    def finish() -> None:
        if engine.stepping:
            outputs.extend(engine.finish_step().outputs)

    for action, subject in actions:
        if action == "add":
            sent[subject.id] = subject
            engine.add(subject)
        elif action == "abort":
            # A step is under way here, so that aborts hit requests in every state.
            if engine.abort(subject.id):
                aborted.add(subject.id)
        else:
            finish()
            engine.start_step(max_steps)
        check()
    finish()
    while (result := engine.step(max_steps)) is not None:
        outputs += result.outputs
        check()

    for id, subject in sent.items():
        mine = [o for o in outputs if o.request_id == id]
        assert all(0 <= o.cached_tokens < subject.prompt_tokens and o.cached_tokens % 16 == 0 for o in mine)
        if id not in aborted:
            assert sum(o.tokens for o in mine) == subject.max_tokens
            assert [o.finished for o in mine] == [False] * (len(mine) - 1) + [True]
            assert [o.first for o in mine] == [True] + [False] * (len(mine) - 1)
    assert engine.running == engine.waiting == engine.cache.used == 0
