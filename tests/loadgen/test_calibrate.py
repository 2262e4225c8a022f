"""Coefficients are recovered from points and from a live engine; the command writes what a profile takes."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from loadgen.calibrate import CalibrationError, DecodePoint, PrefillPoint, ProbeOptions, fit, measure
from loadgen.calibrate.oracle import fit_oracle
from loadgen.calibrate.squares import fit_ratios
from loadgen.calibratecli import calibrate_command
from loadgen.client import StreamClient
from workers.latency import LatencyModel
from workers.profile import WorkerProfile
from workers.simserver import SimServer

LENGTHS = (200, 400, 800, 1600, 3200, 6400, 12_800)
WARM = [(new, prefix + new) for prefix in (2000, 6000, 12_000) for new in (64, 256, 1024)]
seconds = st.floats(1e-3, 0.1)


@given(
    base=seconds,
    token=st.floats(1e-6, 1e-4),
    attention=st.floats(1e-10, 1e-8),
    step=seconds,
    seq=st.floats(1e-5, 1e-2),
    kv=st.floats(1e-9, 1e-7),
)
def test_exact_points_give_back_the_coefficients(base: float, token: float, attention: float, step: float, seq: float, kv: float) -> None:
    model = LatencyModel(
        prefill_base=min(base, step), prefill_token=token, prefill_attention=attention, decode_base=step, decode_seq=seq, decode_kv=kv
    )
    overhead = 0.004
    chunk = 2048
    prefills = [
        PrefillPoint(u, n, overhead + model.prefill_s(u, n) + (max(1, -(-u // chunk)) - 1) * model.prefill_base)
        for u, n in [(n, n) for n in LENGTHS if n <= chunk or base >= step] + WARM
    ]
    decodes = [DecodePoint(b, k, model.step_s(b, k)) for b in (1, 2, 4, 8) for k in (b * 500, b * 8000)]
    found = fit(prefills, decodes, chunk=chunk)
    assert found.latency.decode_base == pytest.approx(step, rel=1e-4)
    assert found.latency.decode_seq == pytest.approx(seq, rel=1e-3, abs=1e-7)
    assert found.latency.decode_kv == pytest.approx(kv, rel=1e-3, abs=1e-12)
    for point in prefills:
        assert found.ttft_s(point.uncached, point.total, chunk) == pytest.approx(point.seconds, rel=1e-3)
    assert found.prefill_error.p90 is not None and found.prefill_error.p90 < 1e-3


@given(st.lists(st.tuples(st.just(1.0), st.floats(0, 10), st.floats(0, 10), st.floats(0.1, 10)), min_size=3, max_size=12))
def test_no_coefficient_is_negative_and_none_helps_by_moving(points: list[tuple[float, float, float, float]]) -> None:
    rows, values = [point[:3] for point in points], [point[3] for point in points]

    def loss(coefficients: list[float]) -> float:
        return sum(
            math.log(sum(c * x for c, x in zip(coefficients, row, strict=True)) / value) ** 2
            for row, value in zip(rows, values, strict=True)
        )

    found = fit_ratios(rows, values)
    assert min(found) >= 0.0
    for column in range(3):
        for move in (-0.01, 0.01):
            moved = [max(0.0, c + move * (i == column)) for i, c in enumerate(found)]
            assert sum(moved) == 0 or loss(found) <= loss(moved) + 1e-6


def test_noise_makes_a_fit_neither_faster_nor_slower() -> None:
    """Half and double are equally likely here; by relative errors the fit would be a third too fast."""
    random_ = random.Random(4)
    model = LatencyModel()
    noisy = [PrefillPoint(u, n, model.prefill_s(u, n) * random_.lognormvariate(0, 0.5)) for u, n in WARM * 60]
    batches = [(b, b * context) for b in (1, 2, 4, 8) for context in (500, 8000)] * 60
    steps = [DecodePoint(b, k, model.step_s(b, k) * random_.lognormvariate(0, 0.5)) for b, k in batches]
    found = fit(noisy, steps, chunk=1 << 20)
    for uncached, total in WARM:
        assert found.ttft_s(uncached, total, 1 << 20) == pytest.approx(model.prefill_s(uncached, total), rel=0.1)
    assert found.latency.step_s(4, 16_000) == pytest.approx(model.step_s(4, 16_000), rel=0.1)


def test_the_error_is_that_of_points_the_fit_has_not_seen() -> None:
    random_ = random.Random(1)
    model = LatencyModel()
    prefills = [PrefillPoint(u, n, model.prefill_s(u, n) * random_.uniform(0.9, 1.1)) for u, n in [(n, n) for n in LENGTHS] + WARM]
    decodes = [DecodePoint(b, k, model.step_s(b, k)) for b in (1, 2, 4, 8) for k in (b * 500, b * 8000)]
    found = fit(prefills, decodes, chunk=1 << 20)
    assert found.prefill_error.median is not None and 0.01 < found.prefill_error.median < 0.15
    assert found.decode_error.p90 is not None and found.decode_error.p90 < 1e-6


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        fit([PrefillPoint(1, 1, 0.1)], [DecodePoint(1, 1, 0.1)] * 3, chunk=100)


PROFILE = WorkerProfile(
    engine="sim", max_num_batched_tokens=1024,
    latency=LatencyModel(
        prefill_base=0.02, prefill_token=1e-4, prefill_attention=2e-8, decode_base=0.02, decode_seq=2e-3, decode_kv=2e-7, tokens_per_step=1
    ),
)  # fmt: skip
SMALL = ProbeOptions(max_context=2048, max_batch=4, output_tokens=8, repeat=1, pause_s=0)


async def test_a_live_engine_is_asked_for_cold_and_warm_prompts_and_batches() -> None:
    """Ten times faster than real, so only the shape is looked at here: see the slow test for the coefficients."""
    told: list[tuple[int, int, str]] = []
    async with SimServer(PROFILE, speed=20) as server:
        client = StreamClient(server.url)
        measured = await measure(client, "sim", SMALL, lambda done, total, what: told.append((done, total, what)))
        client.close()
    cold = [point for point in measured.prefills if point.uncached == point.total]
    warm = [point for point in measured.prefills if point.uncached < point.total]
    assert len(cold) >= 4 and max(point.total for point in cold) == pytest.approx(2048, rel=0.1)
    assert len(warm) >= 4 and all(point.uncached < 0.6 * point.total for point in warm)
    assert {point.batch for point in measured.decodes} == {1, 2, 4}
    assert told[-1][0] == told[-1][1]
    assert not measured.notes


@pytest.mark.slow
async def test_the_coefficients_of_a_simulated_engine_come_back() -> None:
    async with SimServer(PROFILE, speed=2) as server:
        client = StreamClient(server.url)
        measured = await measure(client, "sim", ProbeOptions(max_context=4096, max_batch=8, pause_s=0))
        client.close()
    found = fit(measured.prefills, measured.decodes, chunk=1024)
    model = PROFILE.latency_model().scaled(0.5)
    for uncached, total in ((500, 500), (4000, 4000), (200, 4000)):
        chunks = -(-uncached // 1024) - 1
        assert found.ttft_s(uncached, total, 1024) == pytest.approx(model.prefill_s(uncached, total) + chunks * model.prefill_base, rel=0.1)
    assert found.latency.decode_base == pytest.approx(model.decode_base, rel=0.1)
    assert found.latency.decode_seq == pytest.approx(model.decode_seq, rel=0.1)
    assert found.latency.decode_kv == pytest.approx(model.decode_kv, rel=0.2)


def test_the_command_says_what_is_missing() -> None:
    runner = CliRunner()
    assert "give the URL" in runner.invoke(calibrate_command, []).output
    result = runner.invoke(calibrate_command, ["http://127.0.0.1:1"])
    assert result.exit_code == 1 and "nothing answers at http://127.0.0.1:1" in result.output
    result = runner.invoke(calibrate_command, ["http://127.0.0.1:1", "--api-key", "NOT_SET_HERE"])
    assert result.exit_code == 2 and "NOT_SET_HERE is not set" in result.output


async def test_the_command_writes_what_a_profile_takes(tmp_path: Path) -> None:
    import asyncio

    yaml_file, json_file = tmp_path / "latency.yaml", tmp_path / "points.json"
    async with SimServer(PROFILE, speed=50) as server:
        options = [
            "--max-context",
            "1024",
            "--max-batch",
            "2",
            "--chunk",
            "1024",
            "--repeat",
            "1",
            "--pause",
            "0",
            "-o",
            str(yaml_file),
            "--json",
            str(json_file),
        ]
        result = await asyncio.to_thread(CliRunner().invoke, calibrate_command, [server.url, server.url + "/v1", *options])
    assert result.exit_code == 0, result.output
    profile = WorkerProfile.model_validate(yaml.safe_load(yaml_file.read_text()))
    assert profile.latency_model().source == "loadgen calibrate, sim"
    data: dict[str, Any] = orjson.loads(json_file.read_bytes())
    assert len(data["measured"]) == 2 and data["prefills"] == sum(len(each["prefills"]) for each in data["measured"])


def test_the_oracle_is_fitted_or_asked_for() -> None:
    """Skipped where aiconfigurator-core is not installed; then its absence is an error that says how to get it."""
    try:
        import aiconfigurator_core  # noqa: F401
    except ImportError:
        with pytest.raises(CalibrationError, match="pip install --no-deps aiconfigurator-core"):
            fit_oracle("Qwen/Qwen3-32B-FP8", "h200_sxm", "vllm", tp=2)
        return
    found = fit_oracle("Qwen/Qwen3-32B-FP8", "h200_sxm", "vllm", tp=2)
    assert found.latency.prefill_s(100_000, 100_000) == pytest.approx(12.1, rel=0.1)
    assert found.latency.prefill_s(2000, 102_000) == pytest.approx(0.437, rel=0.1)
    assert found.prefill_error.median is not None and found.prefill_error.median < 0.1
