"""Fleets from YAML: what they may say, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.simulate import FleetError, load_fleet
from tests.loadgen.simulate.virtual_fleet import fleet, growing, play, pool, session, turn

GOOD = """
policy: llm-d
knowledge: exact
pools:
- name: fast
  count: 2
  profile: {tp: 8, kv_capacity_tokens: 2000000, price_per_hour: 16}
- name: slow
  speed: 0.5
  profile: {tp: 2, kv_capacity_tokens: 300000, price_per_hour: 4}
"""


def test_fleet_is_the_sum_of_its_pools(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(GOOD)
    spec = load_fleet(file)
    assert (spec.policy, spec.gpus, spec.price_per_hour, spec.kv_capacity_tokens) == ("llm-d", 18, 36.0, 4_300_000)
    assert set(play([growing("a", 1)], spec).workers) == {"fast0", "fast1", "slow0"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: [", "not YAML"),
        ("- a\n- b", "expected fields such as 'pools:'"),
        ("pools: []", "pools: "),
        ("pools: [{count: 0}]", "pools.0.count: "),
        ("pools: [{profile: {tp: 0}}]", "pools.0.profile.tp: "),
        ("pools: [{profle: {}}]", "pools.0.profle: "),
        ("pools: [{speed: .inf}]", "pools.0.speed: "),
        ("pools: [{tiers: [gold]}]", "unknown tier 'gold'; known: latency, "),
        ("policy: fastest", "unknown policy 'fastest'; known: warm, "),
        ("pools: [{profile: {role: prefill}}]", "prefill workers need decode workers"),
    ],
)
def test_message_names_the_file_and_the_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(FleetError) as error:
        load_fleet(file)
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"none\.yaml: cannot be read"):
        load_fleet(tmp_path / "none.yaml")


def test_traces_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(FleetError, match="no sessions"):
        play([])
    with pytest.raises(FleetError, match="blocks of 10, 64 tokens"):
        play([growing("a", 1), growing("b", 2, block_size=64)])
    with pytest.raises(FleetError, match="holds no block"):
        play([growing("a", 1)], fleet(pool(kv_capacity_tokens=9)))
    with pytest.raises(FleetError, match=r"pools\.0: unknown latency model 'h1000'"):
        play([growing("a", 1)], fleet(pool(latency="h1000")))
    with pytest.raises(FleetError, match="none serves the tier 'standard'"):
        play([growing("a", 1)], fleet(pool(tiers=["latency"])))
    with pytest.raises(FleetError, match="two workers are called 'w0'"):
        play([session("a", [turn(1, 1)])], fleet(pool(name="w"), pool(name="w")))
