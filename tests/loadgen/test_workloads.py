from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.bound import InfiniteCache
from loadgen.chains import SessionChains
from loadgen.trace import Session, block_count, block_ids, common_blocks
from loadgen.workloads import BLOCK_TOKENS, b2b_saas, bounded, code_gen, poisson_times, uniform


def hit_rate_without_eviction(sessions: list[Session]) -> float:
    cache = InfiniteCache()
    hit = total = 0
    for session in sessions:
        chains = SessionChains(session, session.id, "", 0)
        for index, request in enumerate(session.requests):
            hashes = chains.of(index)
            hit += cache.add(hashes, len(hashes), BLOCK_TOKENS, request.input_tokens)
            total += request.input_tokens
    return hit / total


@pytest.mark.parametrize("make", [lambda seed: b2b_saas([(5, 60)], seed), lambda seed: code_gen(20, seed), lambda seed: uniform(50, seed)])
def test_a_workload_follows_from_its_seed(make) -> None:  # type: ignore[no-untyped-def]
    assert make(1) == make(1)
    assert make(1) != make(2)


def test_b2b_prompts_of_a_group_share_its_system_prompt_and_nothing_else() -> None:
    sessions = b2b_saas([(20, 100)], groups=10, prompts_per_group=3)
    prompts = {session.requests[0].blocks for session in sessions}
    assert len(prompts) == 30
    shared = [common_blocks(a, b) for a in prompts for b in prompts if a != b]
    system_blocks = 6_000 // BLOCK_TOKENS
    assert set(shared) == {0, system_blocks}
    assert shared.count(system_blocks) == 30 * 2  # two others of its group for each
    assert not any(session.named for session in sessions)


def test_b2b_sends_every_prompt_before_it_repeats_one() -> None:
    prompts = [session.requests[0].blocks for session in b2b_saas([(50, 100)], seed=3)]
    assert len(set(prompts[:750])) == 750
    assert prompts[750:1500] == prompts[:750]


def test_b2b_working_set_is_what_the_study_says() -> None:
    prompts = {session.requests[0].blocks for session in b2b_saas([(50, 100)])}
    blocks = {block for runs in prompts for block in block_ids(runs)}
    # 73 % of 8 pods of 307,328 tokens
    assert len(blocks) * BLOCK_TOKENS / (8 * 307_328) == pytest.approx(0.73, abs=0.02)


def test_arrivals_keep_each_stage_s_rate() -> None:
    times = list(poisson_times([(20, 200), (0, 50), (5, 400)], random.Random(1)))
    assert times == sorted(times)
    assert sum(t < 200 for t in times) == pytest.approx(4_000, rel=0.1)
    assert not [t for t in times if 200 <= t < 250]
    assert sum(t >= 250 for t in times) == pytest.approx(2_000, rel=0.1)
    assert times[-1] < 650


def test_code_gen_has_the_study_s_means_and_bounds() -> None:
    sessions = code_gen(1_500, seed=1)
    systems = [session.system_tokens for session in sessions]
    turns = [len(session.requests) for session in sessions]
    outputs = [request.output_tokens for session in sessions for request in session.requests]
    new = [
        after.input_tokens - before.input_tokens - before.output_tokens
        for session in sessions for before, after in zip(session.requests, session.requests[1:], strict=False)
    ]  # fmt: skip
    for values, low, high, mean in (
        (systems, 3_000, 100_000, 55_000), (turns, 2, 20, 6), (outputs, 50, 4_000, 800), (new, 100, 10_000, 1_500),
    ):  # fmt: skip
        assert low <= min(values) and max(values) <= high
        assert statistics.fmean(values) == pytest.approx(mean, rel=0.05)


def test_code_gen_turns_continue_what_was_said_and_conversations_share_nothing() -> None:
    first, second = code_gen(2, seed=4)
    for before, after in zip(first.requests, first.requests[1:], strict=False):
        assert common_blocks(before.blocks, after.blocks) == block_count(before.blocks)
    assert common_blocks(first.requests[0].blocks, second.requests[0].blocks) == 0
    assert first.named and not code_gen(1, named=False)[0].named


def test_uniform_requests_share_nothing() -> None:
    sessions = uniform(200, seed=1, rate=10)
    assert hit_rate_without_eviction(sessions) == 0
    assert sessions[-1].start_s == pytest.approx(20, rel=0.3)
    assert not any(session.named for session in sessions)


@settings(max_examples=30, deadline=None)
@given(low=st.floats(0, 1e4), width=st.floats(1, 1e5), place=st.floats(0.05, 0.95), seed=st.integers(0, 1_000))
def test_bounded_draws_keep_bounds_and_mean(low: float, width: float, place: float, seed: int) -> None:
    rng, mean = random.Random(seed), low + place * width
    draws = [bounded(rng, low, low + width, mean) for _ in range(1_500)]
    assert low <= min(draws) and max(draws) <= low + width * (1 + 1e-9)
    assert statistics.fmean(draws) == pytest.approx(mean, abs=0.05 * width)


def test_a_mean_outside_the_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="between 2 and 20"):
        bounded(random.Random(1), 2, 20, 20)
