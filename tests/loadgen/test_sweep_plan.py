"""Which configurations a sweep runs: grids, samples, and the search for the front."""

from __future__ import annotations

import math
import random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.frontier.objectives import parse_objective
from loadgen.results import Figures, Run, Scalar
from loadgen.sweep.adaptive import AdaptiveSearch
from loadgen.sweep.estimate import DOUBT, NOISE, Estimate, Process, likeness
from loadgen.sweep.grid import Axis, Grid, Point
from loadgen.sweep.objective import Goal, Value, front, hypervolume

AXES = [
    Axis.of("tp", [8, 1, 2, 4]),
    Axis.of("max_num_seqs", [8, 32, 128]),
    Axis.of("live", [0.5, 1, 1.5, 2, 3, 4, 6, 8]),
    Axis.of("policy", ["warm", "round-robin"]),
    Axis.of("quantization", ["bf16", "fp8"]),
]


def jagged(arm: dict[str, Scalar], layout: int) -> Value | None:
    """A fleet whose hit rate falls off a cliff where the sessions no longer fit; `layout` makes some topologies better than others."""
    tp, slots, live = (float(str(arm[name])) for name in ("tp", "max_num_seqs", "live"))
    warm, bits = arm["policy"] == "warm", 16 if arm["quantization"] == "bf16" else 8
    luck = random.Random(f"{layout} {tp} {bits}").uniform(0.75, 1.25)
    room = (75 * tp - 4 * bits) / tp / 10  # sessions that fit per GPU
    if room <= 0:
        return None
    need = live * (1 if warm else 1.5)
    hit = (0.96 if need <= room else 0.96 * (room / need) ** 3) * (1 if warm else 0.85)
    speed = luck * tp**0.8 * (16 / bits) ** 0.6 / (1 + 0.06 * tp)
    cold = 1.2 * (1 - hit) / speed
    crowd = min(live * tp, slots)
    busy = min(0.97, cold * live * tp / 25)
    decode = 220 * (0.03 + 0.0006 * crowd) / speed / (1 - busy)
    turn = 6 + cold / (1 - busy) + decode * max(1.0, live * tp / slots)
    return Value(220 / decode, 220 * live / turn)


def search(grid: Grid, values: dict[Point, Value | None], budget: int, seed: int) -> list[Point]:
    adaptive = AdaptiveSearch(grid, budget, seed)
    chosen: list[Point] = []
    while points := adaptive.next():
        assert not set(points) & set(chosen), "a configuration is asked for once"
        chosen += points
        for point in points:
            adaptive.tell(point, values[point])
    return chosen


def test_adaptive_finds_the_front_with_a_third_of_the_grids_runs() -> None:
    grid = Grid(AXES)
    recalls, areas, at_random = [], [], []
    for layout in range(4):
        values = {point: jagged(grid.arm(point), layout) for point in grid.points()}
        good = {point: value for point, value in values.items() if value is not None}
        on_front = front(good)
        assert len(on_front) >= 6
        chosen = search(grid, values, grid.size // 3, seed=layout)
        assert len(chosen) <= grid.size // 3
        recalls.append(mean(point in chosen for point in on_front))
        areas.append(hypervolume(good[point] for point in chosen if point in good) / hypervolume(good.values()))
        at_random.append(mean(point in grid.random_sample(grid.size // 3, layout) for point in on_front))
    assert mean(recalls) > 0.98 and min(recalls) > 0.9 and min(areas) > 0.99
    assert mean(at_random) < 0.5, "the test is no test if chance finds it"


def test_adaptive_goes_for_the_last_value_before_a_cliff() -> None:
    """Throughput grows along one axis until it falls to a tenth; the last good value is between two measured ones."""
    grid = Grid([Axis.of("live", list(range(1, 102))), Axis.of("policy", ["a", "b"])])
    for edge in (17, 44, 83):
        values: dict[Point, Value | None] = {
            point: Value(100 - point[0] / 2 if point[0] <= edge else 5, (point[0] + 1) if point[0] <= edge else (point[0] + 1) / 20)
            for point in grid.points()
        }
        best = max(values, key=lambda point: values[point].y)  # type: ignore[union-attr]
        assert best in search(grid, values, 60, seed=0)


def test_adaptive_finds_an_isolated_point_of_the_front() -> None:
    """Topology c is far behind but with all of the slots and all of the load, where it has the most throughput of all."""
    grid = Grid(
        [
            Axis.of("topology", ["a", "b", "c"]),
            Axis.of("slots", [16, 48, 128]),
            Axis.of("live", [1, 2, 3, 4, 6, 8, 12, 16]),
            Axis.of("policy", ["warm", "round-robin"]),
        ]
    )
    values: dict[Point, Value | None] = {}
    for point in grid.points():
        topology, slots, live, policy = point
        ahead = (1.0, 0.7, 0.6 + 0.5 * (slots / 2) * (live / 7) ** 2)[topology] * (1.0, 0.9)[policy]
        values[point] = Value(ahead * 150 / (1 + live), ahead * 15 * (1 + live) * (0.7 + 0.1 * slots))
    on_front = front({point: value for point, value in values.items() if value is not None})
    assert [point for point in on_front if point[0] == 2] == [(2, 2, 7, 0)]
    assert all((2, 2, 7, 0) in search(grid, values, grid.size // 3, seed) for seed in range(5))


@pytest.mark.slow
def test_adaptive_searches_a_grid_too_large_to_estimate_every_point() -> None:
    grid = Grid([Axis.of(f"a{number}", list(range(10))) for number in range(4)])
    values: dict[Point, Value | None] = {
        point: Value(1 + point[0], 12 - point[0] - 0.1 * sum((at - 4) ** 2 for at in point[1:]) / 3) if point[1] + point[2] < 12 else None
        for point in grid.points()
    }
    good = {point: value for point, value in values.items() if value is not None}
    found = [good[point] for point in search(grid, values, 70, seed=0) if point in good]
    assert hypervolume(found) > 0.95 * hypervolume(good.values())


def test_the_estimate_is_that_of_a_gaussian_process() -> None:
    """Against the formula written out with matrices: likeness K of the measured points, k of a point to them."""
    import numpy

    grid = Grid(AXES)
    points = grid.random_sample(30, 1)
    known, asked = points[:20], points[20:]
    process = Process([likeness(axis) for axis in grid.axes], points, NOISE)
    for point in known:
        process.measured(point)
    figures = numpy.array([math.sin(sum(point)) for point in known])
    expected = process.expected(list(figures))
    assert list(expected) == asked

    tables = [likeness(axis) for axis in grid.axes]

    def alike(some: list[Point], others: list[Point]) -> Any:
        return numpy.array([[math.prod(table[i][j] for table, i, j in zip(tables, a, b, strict=True)) for b in others] for a in some])

    inverse = numpy.linalg.inv(alike(known, known) + NOISE * numpy.eye(len(known)))
    middle = (inverse @ figures).sum() / inverse.sum()
    variance = (figures - middle) @ inverse @ (figures - middle) / len(known)
    for point in asked:
        k = alike([point], known)[0]
        assert expected[point].mean == pytest.approx(middle + k @ inverse @ (figures - middle))
        assert expected[point].deviation == pytest.approx(DOUBT * math.sqrt(variance * (1 - k @ inverse @ k)))


def test_chances_are_of_the_points_not_told_and_fall_with_what_is_below_them() -> None:
    grid = Grid([Axis.of("live", [1, 2, 4, 8, 16]), Axis.of("policy", ["a", "b", "c"])])
    estimate = Estimate(grid, grid.points())
    told = {(0, 0): Value(100, 10), (4, 0): Value(20, 160), (0, 1): Value(50, 5), (4, 1): Value(10, 80), (2, 2): None}
    for point, value in told.items():
        estimate.tell(point, value)
    chances = estimate.chances()
    assert set(chances) == set(grid.points()) - set(told)
    assert all(0 <= chance <= 1 for chance in chances.values())
    assert chances[2, 0] > 1.2 * chances[2, 1], "policy b was half as good"
    assert chances[2, 0] > chances[1, 2], "beside what cannot run"


def test_adaptive_ends_when_nothing_can_run() -> None:
    grid = Grid(AXES)
    assert len(search(grid, dict.fromkeys(grid.points()), 40, seed=0)) == 40


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 5))
def test_adaptive_keeps_its_budget_and_the_grid(sizes: list[int], budget: int, seed: int) -> None:
    grid = Grid([Axis.of(f"a{number}", list(range(size))) for number, size in enumerate(sizes)])
    rng = random.Random(seed)
    values: dict[Point, Value | None] = {
        point: Value(rng.uniform(1, 2), rng.uniform(1, 2)) if rng.random() < 0.8 else None for point in grid.points()
    }
    chosen = search(grid, values, budget, seed)
    assert len(chosen) <= budget and set(chosen) <= set(values)


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), min_size=1, max_size=20))
def test_the_area_grows_only_with_the_front(pairs: list[tuple[float, float]]) -> None:
    values = [Value(x, y) for x, y in pairs]
    keys = front(dict(enumerate(values)))
    assert hypervolume(values[key] for key in keys) == pytest.approx(hypervolume(values))
    assert hypervolume(values) >= max(value.x * value.y for value in values) * (1 - 1e-9)


def test_a_grid_orders_numbers_and_leaves_out_what_is_excluded() -> None:
    grid = Grid(AXES, [{"tp": 1, "quantization": "bf16"}, {"policy": "round-robin", "live": 8}])
    points = list(grid.points())
    arms = [grid.arm(point) for point in points]
    assert grid.axes[0].values == (1, 2, 4, 8)
    assert len(points) == 384 - 48 - 24 + 3
    assert not any(arm["tp"] == 1 and arm["quantization"] == "bf16" for arm in arms)
    assert set(grid.neighbours((0, 0, 0, 0, 1))) == {(1, 0, 0, 0, 1), (0, 1, 0, 0, 1), (0, 0, 1, 0, 1), (0, 0, 0, 1, 1)}


def test_samples_are_different_points_and_spread_ones_reach_the_ends() -> None:
    grid = Grid(AXES)
    for sample in (grid.random_sample(50, 3), grid.spread_sample(50, 3)):
        assert len(set(sample)) == 50
    spread = grid.spread_sample(30)
    for number, axis in enumerate(grid.axes):
        assert {0, len(axis.values) - 1} <= {point[number] for point in spread}
    huge = Grid([Axis.of(f"a{number}", list(range(50))) for number in range(8)])
    assert len(set(huge.random_sample(200))) == 200 and len(set(huge.spread_sample(20))) == 20


def run(live: float, speed: float | None, output: int, ttft: float, error: str | None = None) -> Run:
    figures = Figures(duration_s=10, requests=1, output_tokens=output, ttft_p90_s=ttft, user_tokens_per_s=speed)
    return Run({"live": live}, 0, figures, error=error)


def test_a_goal_takes_medians_turns_times_around_and_keeps_objectives() -> None:
    runs = [run(1, speed, 100, ttft) for speed, ttft in ((10, 1), (30, 2), (20, 9))]
    assert Goal().value(runs) == Value(20, 10)
    assert Goal(x="ttft_p90_s").value(runs) == Value(1 / 2, 10)
    assert Goal(slo=(parse_objective("ttft_p90_s<=2"),)).value(runs) == Value(20, 10)
    assert Goal(slo=(parse_objective("ttft_p90_s<=1.9"),)).value(runs) is None
    assert Goal().value([run(1, None, 100, 1)]) is None
    assert Goal().value([run(1, 10, 100, 1, error="does not fit")]) is None
    assert not math.isnan(Goal().value(runs[:1]).x)  # type: ignore[union-attr]
