"""Expansion: factors multiply to the total, from measured runs only."""

from __future__ import annotations

from itertools import product
from math import isclose, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.frontier.factors import Expansion, expansion
from loadgen.frontier.metrics import METRICS, FrontierError
from loadgen.frontier.objectives import parse_objective
from loadgen.frontier.points import gather
from loadgen.frontier.table import order_note
from loadgen.results import Run
from tests.loadgen.frontier_runs import agentic_sweep, run

OUT = METRICS["output_per_gpu"]
GROUPS = {"hardware": ["gpu"], "quantization": ["weights"], "routing": ["policy"]}
BASE = {"gpu": 0, "weights": 0, "policy": 0}


def grid(values: dict[tuple[int, ...], float]) -> list[Run]:
    """Runs of three two-valued axes (0: baseline, 1: improved) with these tokens/s/GPU."""
    return [run(dict(zip(BASE, key, strict=True)), 50, value) for key, value in values.items()]


def split(runs: list[Run], groups: dict[str, list[str]] = GROUPS) -> Expansion:
    return expansion(gather(runs), OUT, {axis: 0 for axis in BASE if axis in runs[0].arm}, groups)


def test_two_times_two_is_four() -> None:
    found = split(grid({(0, 0, 0): 100, (1, 0, 0): 200, (0, 1, 0): 200, (1, 1, 0): 400}))
    assert [(factor.name, factor.value) for factor in found.factors] == [("hardware", 2.0), ("quantization", 2.0)]
    assert found.total == 4.0 and found.missing == [] and found.orders == 2


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(1, 1e4), min_size=8, max_size=8), st.sets(st.integers(1, 6)))
def test_factors_multiply_to_the_total_whatever_was_measured(outputs: list[float], absent: set[int]) -> None:
    keys = list(product((0, 1), repeat=3))
    outputs[7] = max(outputs) + 1  # the best has everything
    runs = grid({key: value for number, (key, value) in enumerate(zip(keys, outputs, strict=True)) if number not in absent})
    found = split(runs)
    assert isclose(prod(factor.value for factor in found.factors), found.total, rel_tol=1e-9)
    first, best = OUT.of(runs[0]), OUT.of(runs[-1])  # not quite `outputs`: tokens are whole
    assert first and best and isclose(found.total, best / first, rel_tol=1e-9)
    assert sorted(name for factor in found.factors for name in factor.name.split(" + ")) == sorted(GROUPS)
    assert len(found.missing) == len(absent)
    for factor in found.factors:
        assert factor.low <= factor.value * (1 + 1e-9) and factor.value <= factor.high * (1 + 1e-9)


def test_what_two_changes_do_together_is_shared_between_them() -> None:
    found = split(grid({(0, 0, 0): 100, (1, 0, 0): 100, (0, 1, 0): 100, (1, 1, 0): 400}))
    assert [(factor.value, factor.low, factor.high) for factor in found.factors] == [pytest.approx((2, 1, 4))] * 2


def test_a_single_measured_order_is_used_and_the_missing_run_is_named() -> None:
    found = split(grid({(0, 0, 0): 100, (1, 0, 0): 300, (1, 1, 0): 600}))
    assert [(factor.name, round(factor.value, 9)) for factor in found.factors] == [("hardware", 3.0), ("quantization", 2.0)]
    assert (found.orders, found.possible_orders) == (1, 2)
    assert found.missing == ["gpu=0, weights=1"]
    assert "gpu=0, weights=1" in order_note(found)


def test_what_no_run_tells_apart_is_one_factor() -> None:
    found = split(grid({(0, 0, 0): 100, (1, 1, 0): 600, (1, 1, 1): 900}))
    assert [(factor.name, round(factor.value, 9)) for factor in found.factors] == [("hardware + quantization", 6.0), ("routing", 1.5)]
    assert "gpu=1, weights=0, policy=0" in found.missing
    assert order_note(found).startswith("joined factors cannot be told apart")


def test_axes_in_no_group_are_free_to_be_the_best() -> None:
    runs = [run({"gpu": gpu, "n": n}, 50, out) for gpu, n, out in ((0, 1, 10), (0, 2, 40), (1, 1, 90), (1, 2, 80))]
    found = split(runs, {"hardware": ["gpu"]})
    assert [factor.value for factor in found.factors] == [pytest.approx(90 / 40)]
    assert (found.baseline.arm["n"], found.best.arm["n"]) == (2, 1)


def test_an_axis_of_the_baseline_in_no_group_is_a_group_of_its_own() -> None:
    found = split(grid({(0, 0, 0): 100, (0, 0, 1): 150}), {"hardware": ["gpu"]})
    assert [(factor.name, factor.value) for factor in found.factors] == [("policy", pytest.approx(1.5))]


def test_groups_that_do_not_differ_are_no_factor_and_stay_as_they_are() -> None:
    # the best keeps gpu=0; a gpu=1 run of the intermediate must not stand in for it
    found = split(grid({(0, 0, 0): 100, (0, 1, 0): 200, (0, 0, 1): 100, (0, 1, 1): 300, (1, 0, 1): 290}))
    assert {factor.name: round(factor.value, 6) for factor in found.factors} == {
        "quantization": round((2 * 3) ** 0.5, 6), "routing": round((1 * 1.5) ** 0.5, 6),
    }  # fmt: skip


def test_both_ends_keep_the_objectives_and_the_users_speed() -> None:
    runs = [
        run({"gpu": 0, "n": 1}, 60, 10, ttft_p90_s=1), run({"gpu": 0, "n": 2}, 20, 99, ttft_p90_s=1),
        run({"gpu": 1, "n": 1}, 70, 30, ttft_p90_s=1), run({"gpu": 1, "n": 2}, 70, 90, ttft_p90_s=9),
    ]  # fmt: skip
    points, speed = gather(runs), METRICS["user_tokens_per_s"]
    found = expansion(points, OUT, {"gpu": 0}, {}, [parse_objective("ttft_p90_s<=5")], (speed, 50))
    assert found.total == pytest.approx(3)
    with pytest.raises(FrontierError, match="no configuration with gpu=0 keeps the objectives"):
        expansion(points, OUT, {"gpu": 0}, {}, [], (speed, 65))


def test_a_price_that_falls_is_a_gain() -> None:
    runs = [run({"gpu": 0}, 50, 100, price_per_hour=4), run({"gpu": 1}, 50, 100, price_per_hour=1)]
    assert expansion(gather(runs), METRICS["price_per_million_output"], {"gpu": 0}, {}).total == pytest.approx(4)


def test_the_baseline_may_be_the_best() -> None:
    found = split(grid({(0, 0, 0): 100, (1, 0, 0): 50}))
    assert found.factors == [] and found.total == 1


def test_a_whole_sweep_is_split() -> None:
    points = gather(agentic_sweep(1))
    groups = {"hardware": ["profile.accelerator", "profile.tp"], "quantization": ["profile.quantization"], "routing": ["policy"]}
    baseline = {"profile.accelerator": "H100", "profile.quantization": "bf16", "policy": "round-robin"}
    found = expansion(points, OUT, baseline, groups, [parse_objective("ttft_p90_s<=5")], (METRICS["user_tokens_per_s"], 50))
    assert [factor.name for factor in found.factors] == list(groups)
    assert found.orders == found.possible_orders == 6
    assert prod(factor.value for factor in found.factors) == pytest.approx(found.total, rel=1e-12)
    assert all(factor.value > 1 for factor in found.factors)
