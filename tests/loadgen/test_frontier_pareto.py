"""The front: exact, whatever the order of the points; objectives; and what makes a point."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.frontier.analysis import analyse, charted, coordinates
from loadgen.frontier.metrics import METRICS, FrontierError
from loadgen.frontier.objectives import broken, parse_objective
from loadgen.frontier.pareto import dominates, front, step_shape
from loadgen.frontier.points import gather
from tests.loadgen.frontier_runs import agentic_sweep, run

NUMBERS = st.one_of(st.integers(0, 6).map(float), st.floats(0, 1e6, allow_nan=False))  # small integers make ties
PLANE = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=40)
WAYS = st.tuples(st.booleans(), st.booleans())


@given(PLANE, WAYS)
def test_a_front_is_what_no_point_dominates_and_covers_all_others(values: list[tuple[float, float]], ways: tuple[bool, bool]) -> None:
    found = set(front(values, *ways))
    for index, value in enumerate(values):
        beaten = any(dominates(other, value, *ways) for other in values)
        assert (index in found) == (not beaten)
        assert index in found or any(dominates(values[member], value, *ways) for member in found)


@given(PLANE, WAYS, st.randoms(use_true_random=False))
def test_the_order_of_the_points_does_not_matter(values: list[tuple[float, float]], ways: tuple[bool, bool], random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert [shuffled[index] for index in front(shuffled, *ways)] == [values[index] for index in front(values, *ways)]


@given(PLANE, WAYS)
def test_a_front_runs_from_left_to_right(values: list[tuple[float, float]], ways: tuple[bool, bool]) -> None:
    at = [values[index][0] for index in front(values, *ways)]
    assert at == sorted(at)


def test_points_without_a_figure_are_in_no_front() -> None:
    assert front([None, (1.0, 1.0), None], True, True) == [1]
    assert front([], True, True) == []


def test_a_step_never_claims_what_no_configuration_reached() -> None:
    # of (10 tok/s, 5) and (20 tok/s, 3), a user who wants 15 tok/s gets 3: down at 10, then across
    assert step_shape(x_higher=True) == "vh"
    # of (1 s, 3) and (2 s, 5), a user who allows 1.5 s gets 3: across, then up at 2
    assert step_shape(x_higher=False) == "hv"


def test_runs_of_several_seeds_are_one_point_with_a_spread() -> None:
    points = gather([run({"tp": 2}, 50, seed=0), run({"tp": 2}, 70, seed=1), run({"tp": 2}, 52, seed=2), run({"tp": 4}, 80)])
    assert len(points.points) == 2 and points.seeds == (1, 3)
    assert points.points[0].spread("user_tokens_per_s") == (52, 50, 70)
    assert points.points[0].spread("itl_p99_s") is None


def test_a_run_that_is_read_twice_counts_once() -> None:
    assert gather([run({"tp": 2}, 50), run({"tp": 2}, 50)]).seeds == (1, 1)


def test_live_and_simulated_runs_of_an_arm_are_two_points() -> None:
    points = gather([run({"tp": 2}, 50), run({"tp": 2}, 48, source="live")])
    assert points.axes == ["source"] and points.values("source") == ["live", "simulated"]


def test_traces_are_not_mixed() -> None:
    runs = [run({"tp": 2}, 50, trace="a"), run({"tp": 2}, 60, trace="b")]
    with pytest.raises(FrontierError, match="choose one of a, b with --trace"):
        gather(runs)
    assert gather(runs, "b").points[0].value("user_tokens_per_s") == 60
    with pytest.raises(FrontierError, match="there are runs of a, b"):
        gather(runs, "c")


def test_runs_without_figures_are_kept_apart_with_their_reason() -> None:
    points = gather([run({"tp": 1}, error="does not fit"), run({"tp": 2}, 50), run({"tp": 4}, requests=0)])
    assert [(failed.arm["tp"], failed.error) for failed in points.failed] == [(1, "does not fit"), (4, "no request ended in the window")]
    assert len(points.points) == 1


def test_axes_go_by_their_last_name_where_that_is_clear() -> None:
    points = gather([run({"a.tp": 1, "b.tp": 1, "load.rate": 1}, 5), run({"a.tp": 2, "b.tp": 2, "load.rate": 1}, 5)])
    assert points.axis("rate") == "load.rate" and points.axis("a.tp") == "a.tp"
    with pytest.raises(FrontierError, match=r"could be a\.tp or b\.tp"):
        points.axis("tp")
    with pytest.raises(FrontierError, match="no axis is named 'pp'; the results have"):
        points.axis("pp")


@pytest.mark.parametrize("text", ["ttft_p90_s<5", "ttft_p90_s", "ttft_p90_s<=fast", "<=5", ""])
def test_what_is_no_objective_is_explained(text: str) -> None:
    with pytest.raises(FrontierError, match=r"write e\.g\. ttft_p90_s<=5"):
        parse_objective(text)


def test_a_misspelt_figure_is_named() -> None:
    with pytest.raises(FrontierError, match="did you mean ttft_p50_s or ttft_p90_s"):
        parse_objective("ttft_p<=5")
    with pytest.raises(FrontierError, match="no figure is named 'speed'; there are: user_tokens_per_s"):
        parse_objective("speed>=5")


def test_an_objective_bounds_the_median_and_needs_a_measurement() -> None:
    (point,) = gather([run({}, 50, ttft_p90_s=value, seed=seed) for seed, value in enumerate((4, 5, 60))]).points
    assert not broken(point, [parse_objective("ttft_p90_s<=5"), parse_objective(" user_tokens_per_s >= 50 ")])
    assert [str(objective) for objective in broken(point, [parse_objective("ttft_p90_s<=4.9"), parse_objective("itl_p99_s<=1")])] == [
        "ttft_p90_s<=4.9",
        "itl_p99_s<=1",
    ]


def test_the_front_within_objectives_is_that_of_the_points_that_keep_them() -> None:
    runs = [run({"n": 1}, 90, 100, ttft_p90_s=1), run({"n": 2}, 80, 200, ttft_p90_s=9), run({"n": 3}, 70, 150, ttft_p90_s=2)]
    found = analyse(gather(runs), METRICS["user_tokens_per_s"], METRICS["output_per_gpu"], [parse_objective("ttft_p90_s<=5")])
    assert [point.arm["n"] for point in found.front()] == [2, 1]
    assert [point.arm["n"] for point in found.front_within()] == [3, 1]


def test_kinds_of_tokens_are_kept_apart() -> None:
    (point,) = gather([run({}, 50, 10, gpus=4, prompt_tokens=4_000_000, hit_rate=0.9, sessions=8, price_per_hour=36)]).points
    assert point.value("output_per_gpu") == 10
    assert point.value("uncached_per_gpu") == pytest.approx(1000)
    assert point.value("total_per_gpu") == pytest.approx(10_010)
    assert point.value("jobs_per_gpu_hour") == pytest.approx(72)
    assert point.value("price_per_million_output") == pytest.approx(250)  # 1 an hour's hundredth for 4,000 tokens


def test_series_and_lines_are_chosen_from_the_axes() -> None:
    points = gather(agentic_sweep(1))
    found = analyse(points, METRICS["user_tokens_per_s"], METRICS["output_per_gpu"])
    assert (found.series, found.along) == ("profile.accelerator", "load.live_sessions")
    assert sum(map(len, found.by_series().values())) == len(points.points)
    assert {len(line) for line in found.lines()} == {8}
    for metric in charted(points):
        assert coordinates(points.points[0], metric, metric) is not None


def test_runs_of_one_arm_under_two_loads_are_not_taken_for_one() -> None:
    one, other = run({"policy": "warm"}, 50, 10), run({"policy": "warm"}, 60, 12)
    one.setup, other.setup = "a", "b"
    with pytest.raises(FrontierError, match="policy=warm, seed 0, but differ"):
        gather([one, other])
