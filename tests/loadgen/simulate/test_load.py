"""Who sends what when: the simulator's loops, warm-up and window."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from loadgen.simulate import FleetError, Load
from loadgen.simulate.measure import TurnRecord
from tests.loadgen.simulate.virtual_fleet import fleet, growing, play, pool, session, turn


def most_at_once(turns: list[TurnRecord]) -> int:
    moments = sorted([(t.asked_at, 1) for t in turns] + [(t.ended_at or 0.0, -1) for t in turns])
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return most


def test_closed_loop_keeps_as_many_sessions_alive_as_asked_for() -> None:
    result = play([growing(str(n), n) for n in range(9)], live_sessions=3)
    assert (len(result.turns), most_at_once(result.turns)) == (27, 3)
    assert result.figures.sessions == 9


def test_gaps_are_cut_then_scaled_and_start_with_the_answer() -> None:
    result = play([growing("a", 1, 3, gap_s=40.0)], max_gap_s=10.0, time_scale=0.5)
    for before, after in pairwise(result.turns):
        assert before.ended_at is not None
        assert after.asked_at - before.ended_at == pytest.approx(5.0)


def test_lanes_start_over_the_ramp() -> None:
    result = play([growing(str(n), n, 2, gap_s=200.0) for n in range(4)], live_sessions=4, ramp_s=100.0)
    assert [t.asked_at for t in result.turns[:4]] == [0.0, 25.0, 50.0, 75.0]


def test_open_loop_sends_at_the_traces_times_whatever_the_answers_take() -> None:
    sessions = [session(str(n), [turn(n, 100)], start_s=100.0 + n) for n in range(5)]
    result = play(sessions, mode="open", speedup=10.0)
    assert [t.asked_at for t in result.turns] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert most_at_once(result.turns) == 5


def test_open_loop_at_a_rate_is_poisson() -> None:
    result = play([session("a", [turn(1, 1, output=1)])], fleet(pool(4)), mode="open", rate=2.0, requests=2000)
    gaps = [after.asked_at - before.asked_at for before, after in pairwise(result.turns)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.5, rel=0.1)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.15)


def test_request_count_is_exact_and_warm_up_is_not_measured() -> None:
    sessions = [growing("a", 1, 3), growing("b", 2, 3)]
    result = play(sessions, live_sessions=2, requests=7, warmup=4)
    assert len(result.turns) == 7
    assert min(t.asked_at for t in result.turns) > 0.0
    # the measured ones end under the same load: requests sent meanwhile are in the throughput's window, not in the latencies
    assert result.figures.requests >= 7
    assert result.figures.duration_s < result.virtual_s


def test_sessions_that_start_over_share_nothing_behind_the_system_prompt() -> None:
    again = session("a", [turn(1, 20)], system_tokens=50)
    result = play([again], requests=3)
    assert [t.cached_tokens for t in result.turns] == [0, 50, 50]


def test_duration_is_the_window_after_the_warm_up() -> None:
    result = play([session("a", [turn(1, 10)])], warmup_s=30.0, duration_s=60.0, live_sessions=1)
    asked = [t.asked_at for t in result.turns]
    assert 30.0 <= min(asked) < 32.0
    assert max(asked) < min(asked) + 60.0
    assert result.figures.duration_s == pytest.approx(60.0)
    assert result.figures.requests == pytest.approx(len(result.turns), abs=1)
    assert result.virtual_s < 95.0


def test_lanes_may_begin_within_their_sessions() -> None:
    long = growing("a", 1, 30)
    starts = {play([long], seed=seed, advance=1.0).turns[0].prompt_tokens for seed in range(8)}
    assert len(starts) > 3
    assert play([long]).turns[0].prompt_tokens == 105


def test_order_of_sessions_follows_the_seed_when_shuffled() -> None:
    sessions = [session(str(n), [turn(n, n + 1)]) for n in range(10)]
    in_order = [t.prompt_tokens for t in play(sessions, seed=1).turns]
    shuffled = [[t.prompt_tokens for t in play(sessions, seed=seed, shuffle=True).turns] for seed in (1, 2)]
    assert in_order == sorted(in_order)
    assert shuffled[0] != in_order and shuffled[0] != shuffled[1]
    assert sorted(shuffled[0]) == in_order


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_s", math.nan), ("warmup_s", math.inf), ("ramp_s", -1.0), ("live_sessions", 0), ("rate", 0.0), ("speedup", 0.0),
        ("advance", 1.5), ("tiers", {}), ("tiers", {"gold": 1.0}), ("tiers", {"standard": 0.0}), ("tiers", {"standard": math.nan}),
    ],
)  # fmt: skip
def test_load_that_no_clock_can_play_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Load(**{field: value})


def test_loads_that_would_never_end_or_measure_nothing_are_refused() -> None:
    short, long = session("a", [turn(1, 10)]), session("a", [turn(1, 5000)])
    with pytest.raises(FleetError, match="all start at once"):
        play([short, short], mode="open", duration_s=10.0)
    with pytest.raises(FleetError, match="no request of the trace fits"):
        play([long], fleet(pool(kv_capacity_tokens=1000)), duration_s=10.0)
    with pytest.raises(FleetError, match=r"nothing was measured: .* 1 requests"):
        play([short], warmup=5)


def test_hundreds_of_refusals_in_a_row_are_errors() -> None:
    sessions = [session(str(n), [turn(n, 200)]) for n in range(400)]
    assert play(sessions, fleet(pool(kv_capacity_tokens=1000)), live_sessions=1).figures.errors == 400
