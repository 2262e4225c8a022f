"""A recommendation, started as it was written, does what was predicted."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from loadgen.recommend import parse_request, recommend
from loadgen.recommend.output import write
from loadgen.recommend.rehearsal import rehearse

TRACE = Path(__file__).parents[2] / "traces" / "agentic.jsonl"
WITHIN = 0.2
REQUESTS = 160
# Real but few tokens per second, so that what the programs and the client need of this machine is little.
LATENCY = {
    "prefill_base": 0.02,
    "prefill_token": 1e-4,
    "prefill_attention": 2e-9,
    "decode_base": 0.008,
    "decode_seq": 4e-4,
    "decode_kv": 5e-9,
}
LOAD = {"time_scale": 0.02, "ramp_s": 8.0, "duration_s": 120.0, "warmup_s": 20.0}


def request_for(tiers: dict[str, Any], sessions: int) -> Any:
    return parse_request(
        {
            "traffic": {"trace": str(TRACE), "sessions": sessions, "load": LOAD},
            "model": "small",
            "workers": {"small": {"max_num_seqs": 32, "kv_capacity_tokens": 300_000, "price_per_hour": 1.0, "latency": LATENCY}},
            "tiers": tiers,
            "search": {"max_workers": 8, "max_num_seqs": [32], "disaggregated": []},
            "seeds": 3,
        },
        "test",
    )


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now."""
    for first in range(20_000, 32_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    pytest.fail("no free ports")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiers", "sessions"),
    [
        ({"standard": {"slo": {"ttft_p90_s": 1.5, "user_tokens_per_s": 50}}}, 16),
        ({"latency": {"share": 0.5, "slo": {"user_tokens_per_s": 80}}, "throughput": {"share": 0.5, "slo": {"user_tokens_per_s": 25}}}, 16),
    ],
    ids=["one-tier", "two-tiers"],
)
def test_a_replay_meets_the_prediction(tiers: dict[str, Any], sessions: int, tmp_path: Path) -> None:
    made = recommend(request_for(tiers, sessions))
    assert made.plan is not None
    first = free_ports(20)
    write(made, tmp_path, port=first, first_worker_port=first + 1)
    for pool in rehearse(made, tmp_path, made.request.read_sessions(), REQUESTS):
        assert pool.measured.errors == 0
        for key in ("ttft_p50_s", "ttft_p90_s", "user_tokens_per_s"):
            predicted, measured = pool.figures(key)
            assert measured == pytest.approx(predicted, rel=WITHIN), f"{key} of pool {pool.pool}"
        predicted, measured = pool.figures("hit_rate")
        assert measured == pytest.approx(predicted, abs=0.02)
