"""`warmroute worker sim --like`: simulated workers as a gateway's configuration describes its workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from workers.simcli import sim_command
from workers.simlike import LikeError, described_workers


def test_every_worker_with_its_port_model_and_profile(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "listen: {port: 8000}\n"
        "workers:\n"
        "- {url: 'http://127.0.0.1:9101', name: a, model: m, kv_capacity_tokens: 5000, latency: {prefill_token: 1.0e-3}}\n"
        "- {url: 'http://localhost:9102', accelerator: h100, model: qwen3-32b, tp: 2, latency: auto}\n"
    )
    first, second = described_workers(file)
    assert (first.port, first.model, first.profile.kv_capacity_tokens) == (9101, "m", 5000)
    assert first.profile.latency_model().prefill_token == 1e-3
    assert (second.port, second.profile.tp, second.profile.engine) == (9102, 2, "sim")
    assert second.profile.latency_model().prefill_token > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen: {}", "has no 'workers'"),
        ("workers: [{url: 'http://gpu1:8000'}]", "workers.0.url: http://gpu1:8000 is not served from here"),
        ("workers: [{url: 'http://127.0.0.1'}]", "needs http://127.0.0.1:PORT"),
        ("workers: [{url: 'http://127.0.0.1:1', tp: 0}]", "workers.0: tp"),
        ("workers: [{url: 'http://127.0.0.1:1', latency: none-such}]", "workers.0.latency: unknown latency model"),
    ],
)
def test_faults_name_their_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(LikeError) as error:
        described_workers(file)
    assert message in str(error.value)


def test_what_the_file_says_is_not_said_twice(tmp_path: Path) -> None:
    result = CliRunner().invoke(sim_command, ["--like", str(tmp_path / "gateway.yaml"), "--kv-capacity", "100"])
    assert result.exit_code == 2
    assert "--kv-capacity is said by the file of --like" in result.output
