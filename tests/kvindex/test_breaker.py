"""The circuit breaker: when it opens, and that one probe decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvindex.breaker import Breaker


def test_it_opens_at_the_third_failure_within_a_second() -> None:
    breaker = Breaker(failures=3, within_s=1.0)
    for now in (10.0, 10.5, 11.1):
        breaker.failed(now)
    assert breaker.state == "closed" and breaker.allows(11.1)  # only two of them within a second
    breaker.failed(11.2)
    assert breaker.state == "open" and not breaker.allows(11.2)


def test_successes_between_failures_do_not_hide_them() -> None:
    breaker = Breaker(failures=3, within_s=1.0)
    for now in (0.0, 0.1, 0.2):
        breaker.succeeded(now)
        breaker.failed(now)
    assert breaker.state == "open"


def opened(probe_s: float = 0.5) -> Breaker:
    breaker = Breaker(failures=1, probe_s=probe_s)
    breaker.failed(0.0)
    return breaker


def test_one_probe_at_a_time() -> None:
    breaker = opened()
    assert [breaker.allows(now) for now in (0.4, 0.5, 0.5, 9.0)] == [False, True, False, False]


def test_a_probe_that_fails_is_followed_by_another_only_after_the_pause() -> None:
    breaker = opened()
    assert breaker.allows(0.6)
    breaker.failed(0.7)
    assert breaker.wait_s(0.7) == 0.5
    assert not breaker.allows(1.1)
    assert breaker.allows(1.2)


def test_a_probe_that_succeeds_closes_it_with_a_clean_slate() -> None:
    breaker = Breaker(failures=2, within_s=10.0)
    breaker.failed(0.0)
    breaker.failed(0.1)
    assert breaker.allows(0.7)
    breaker.succeeded(0.8)
    breaker.failed(0.9)
    assert breaker.state == "closed" and breaker.wait_s(0.9) == 0.0


def test_what_was_sent_before_the_opening_neither_closes_nor_prolongs_it() -> None:
    breaker = opened()
    breaker.succeeded(0.1)
    assert breaker.state == "open"
    breaker.failed(0.4)
    assert breaker.allows(0.5)


@given(st.lists(st.tuples(st.floats(0, 0.4), st.sampled_from(["ask", "succeeded", "failed"])), max_size=60))
def test_probes_never_overlap_and_never_come_early(steps: list[tuple[float, str]]) -> None:
    breaker = Breaker()
    now, opened_at, probing = 0.0, 0.0, False
    for pause, step in steps:
        now += pause
        was = breaker.state
        if step == "ask":
            if breaker.allows(now) and was != "closed":
                assert not probing and now >= opened_at + 0.5
                probing = True
        elif step == "succeeded":
            breaker.succeeded(now)
        else:
            breaker.failed(now)
        if breaker.state == "open" and was != "open":
            opened_at = now
        if breaker.state != "half-open":
            probing = False
