from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client import Answer
from loadgen.metrics import Collector, Histogram, Samples


def test_percentiles_are_values_that_occurred() -> None:
    samples = Samples()
    for value in (5.0, 1.0, 3.0, 2.0, 4.0):
        samples.add(value)
    assert [samples.percentile(p) for p in (0, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert Samples().percentile(50) is None


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50), st.sampled_from([50.0, 90.0, 99.0]))
def test_the_histogram_is_within_a_percent(values: list[float], percent: float) -> None:
    samples, histogram = Samples(), Histogram()
    for value in values:
        samples.add(value)
        histogram.add(value, 1.0)
    assert histogram.percentile(percent) == pytest.approx(samples.percentile(percent), rel=0.011)


def test_itl_is_weighted_by_tokens() -> None:
    collector = Collector()
    # 1 + 3 events of 2 tokens: two gaps of 0.2 s (0.1 s a token, 4 tokens), then two events together after 0.2 s (0.05 s a token, 4).
    answer = Answer(sent_at=1.0, first_at=2.0, ended_at=3.0, status=200, content_events=5, output_tokens=10)
    answer.gaps = [(0.2, 1), (0.2, 1), (0.2, 2)]
    collector.answered(answer, 100)
    result = collector.result(1.0)
    assert result.itl_p50_s == pytest.approx(0.05, rel=0.011)
    assert result.itl_p90_s == pytest.approx(0.1, rel=0.011)
    assert (result.ttft_p50_s, result.e2e_p50_s) == (1.0, 2.0)


def test_an_engine_may_leave_out_a_zero() -> None:
    collector = Collector()
    for cached in (None, 60):
        collector.answered(Answer(status=200, prompt_tokens=100, cached_tokens=cached, output_tokens=1), 100)
    assert collector.hit_rate == 0.3


def test_a_late_client_is_flagged() -> None:
    for lag, degraded in ((0.001, False), (0.5, True)):
        collector = Collector()
        collector.issued(100, 0, lag)
        collector.answered(Answer(sent_at=0.5, first_at=1.5, ended_at=2.0, status=200, output_tokens=1), 100)
        assert collector.result(1.0).degraded is degraded
