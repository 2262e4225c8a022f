"""Real engines are calibrated, and a simulation with what came out says what their users see."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reality import KV_TOKENS, compare
from tests.engine.conftest import running_engines
from tests.engine.engines import Engine

pytestmark = pytest.mark.engine


async def test_the_simulation_of_calibrated_engines_is_near_what_they_do(vllm_python: Path, tiny_model: Path) -> None:
    """Two engines, the gateway and the client share a few cores with whatever else runs, hence the room in the bounds."""
    engines = [Engine(vllm_python, tiny_model, core=number, kv_tokens=KV_TOKENS) for number in range(2)]
    async with running_engines(*engines):
        found = await compare(
            [engine.url for engine in engines], rounds=4, sessions=24, live_sessions=3, max_context=4096, requests=40, warmup=8, seed=3
        )
    calibration = found.rounds[0].calibration
    assert calibration.prefill_error.median is not None and calibration.prefill_error.median < 0.35
    assert calibration.decode_error.median is not None and calibration.decode_error.median < 0.35
    latency = calibration.latency
    # a warm turn is several times cheaper than a cold one, as real engines have it
    assert calibration.ttft_s(8000, 8000, 2048) > 5 * calibration.ttft_s(300, 8000, 2048)
    assert latency.decode_base > 0 and latency.prefill_token + latency.prefill_attention > 0
    assert abs(found.error("ttft_p50_s")) < 0.3
    assert abs(found.error("e2e_p50_s")) < 0.3
    assert abs(found.hit_points) < 3
