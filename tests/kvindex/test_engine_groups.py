from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.engine_groups import CacheGroup, Rule, rule_for

INDEX = 4  # tokens of an index block


@pytest.mark.parametrize(
    ("kind", "window", "rule"),
    [
        ("full_attention", None, "whole"), ("mla_attention", None, "whole"), ("sink_full_attention", None, "whole"),
        ("sliding_window", 128, "window"), ("sliding_window_mla", 128, "window"), ("sliding_window", None, "whole"),
        ("chunked_local_attention", None, "whole"), ("mamba", None, "checkpoint"),
        ("unknown", None, None), ("unknown", 128, None), ("cross_attention", None, None), ("encoder_only_attention", None, None),
    ],
)  # fmt: skip
def test_rules_of_kinds(kind: str, window: int | None, rule: Rule | None) -> None:
    assert rule_for(kind, window) == rule


@given(
    st.sampled_from(["whole", "window", "checkpoint"]), st.sampled_from([2, 4, 8, 12]), st.sampled_from([1, 2, 4, 5, 6, 8, 9, 13, 40]),
    st.sets(st.integers(1, 12)), st.integers(0, 12),
)  # fmt: skip
def test_the_longest_hit_is_the_longest_that_the_rule_allows(rule: Rule, size: int, window: int, held: set[int], depth: int) -> None:
    """The rules as vLLM states them, over all lengths; groups with blocks below the index's are looked at where index blocks end."""
    seen = max(size, INDEX)
    needed = -(-(window - 1) // seen)

    def allowed(end: int) -> bool:
        if rule == "checkpoint":
            return end == 0 or end in held
        if end * INDEX % seen:
            return False
        ends = list(range(seen // INDEX, end + 1, seen // INDEX))
        if rule == "window":
            ends = ends[-needed:] if needed else []
        return all(block in held for block in ends)

    group = CacheGroup(rule, size, INDEX, window, 1)
    assert group.longest(depth, held.__contains__) == max(end for end in range(depth + 1) if allowed(end))


def test_copies_and_tiers() -> None:
    group = CacheGroup("window", INDEX, INDEX, 8, 3)
    group.store(0, [1, 2])
    group.store(0, [2])
    group.store(1, [3])
    assert [[group.holds(block, tier) for tier in range(3)] for block in (1, 2, 3)] == [[True] * 3, [True] * 3, [False, True, True]]
    group.remove(0, [1, 2, 9])
    assert [group.holds(block, 0) for block in (1, 2)] == [False, True]
    group.remove(0, [2])
    assert not group.holds(2, 2)
    group.clear()
    assert not group.holds(3, 2)
