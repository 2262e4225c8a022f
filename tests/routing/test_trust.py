"""How far a worker's index is believed: it falls on persistent error, loss and age, climbs back, and says so once."""

from __future__ import annotations

import logging

import pytest

from routing.trust import LEAST, SILENT_S, WINDOW, Trust


def judge(trust: Trust, times: int, *, exact: float | None = 0.0, memory: float = 0.0) -> None:
    for _ in range(times):
        trust.observe(exact_error=exact, memory_error=memory, exact_tolerance=32.0, memory_tolerance=256.0)


def followed() -> Trust:
    trust = Trust("w")
    trust.events_attached()
    return trust


def test_without_events_the_routing_memory_is_believed() -> None:
    assert Trust("w").level == "memory"
    assert followed().level == "exact"


def test_persistent_error_lowers_the_level_step_by_step_and_it_climbs_back() -> None:
    trust = followed()
    judge(trust, WINDOW, exact=1000.0)
    assert trust.level == "memory"
    judge(trust, WINDOW, exact=1000.0, memory=1000.0)
    assert trust.level == "load"
    judge(trust, WINDOW, exact=1000.0)
    assert trust.level == "memory"
    judge(trust, WINDOW)
    assert trust.level == "exact"


def test_a_few_errors_are_no_reason_and_neither_are_few_observations() -> None:
    trust = followed()
    judge(trust, LEAST - 1, exact=1000.0, memory=1000.0)
    assert trust.level == "exact"
    trust = followed()
    for _ in range(10):
        judge(trust, 1, exact=1000.0)
        judge(trust, 3)
    assert trust.level == "exact"


def test_an_error_at_the_edge_does_not_make_the_level_flicker() -> None:
    trust = followed()
    for _ in range(100):
        judge(trust, 1, exact=1000.0)
        judge(trust, 1)
    assert trust.changes <= 2  # attached, and at most one fall


def test_lost_events_count_at_once_and_recovered_ones_too() -> None:
    trust = followed()
    trust.events_lost("a gap could not be replayed")
    assert trust.level == "memory"
    trust.events_recovered()
    assert trust.level == "exact"


def test_events_that_are_overdue_count_as_lost_until_one_comes() -> None:
    trust = followed()
    trust.check_age(1e9)  # idle for ever: nothing is due
    assert trust.level == "exact"
    trust.heard(100.0)
    trust.computed(since=90.0)  # that request's events have come
    trust.check_age(101.0)
    trust.check_age(1e9)
    assert trust.level == "exact"
    trust.computed(since=101.0)
    trust.check_age(102.0)
    trust.check_age(102.0 + SILENT_S)
    assert trust.level == "exact"
    trust.check_age(102.1 + SILENT_S)
    assert trust.level == "memory"
    trust.heard(200.0)
    assert trust.level == "exact"


def test_each_change_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "warmroute.trust"):
        trust = followed()
        trust.events_lost("the publisher is gone")
        trust.events_lost("the publisher is gone")
        judge(trust, 3 * WINDOW, exact=None, memory=1000.0)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert "the publisher is gone" in texts[1]
    assert "20" in texts[2] or "of its last" in texts[2]
