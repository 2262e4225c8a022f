"""`warmroute worker sim` from the command line."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner

from workers.simcli import sim_command


def test_several_workers_serve_their_profile_and_stop_on_sigterm() -> None:
    command = [sys.executable, "-c", "from workers.simcli import sim_command; sim_command()", "--port", "0", "--count", "2"]
    command += ["--model", "tiny", "--kv-capacity", "3200", "--profile", "block_size=32", "--speed", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        urls = [process.stdout.readline().split()[-1] for _ in range(2)]
        assert len(set(urls)) == 2
        for url in urls:
            assert 'block_size="32",num_gpu_blocks="100"' in httpx.get(url + "/metrics").text
            body = {"model": "tiny", "prompt": "x" * 400, "max_tokens": 2}
            usages = [httpx.post(url + "/v1/completions", json=body).json()["usage"] for _ in range(2)]
            # Each worker has its own cache.
            assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 96]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "tp"], "'tp' is not KEY=VALUE"),
        (["--profile", "tensor=2"], "Known keys: engine, model"),
        (["--profile", "latency=unknown"], "known: auto, qwen3-32b-h100-tp2"),
        (["--kv-capacity", "8"], "holds no block"),
        (["--scheduling-policy", "random"], "'fcfs', 'priority'"),
        (["--profile", "long_prefill_token_threshold=-1"], "greater than or equal to 0"),
    ],
)
def test_a_wrong_profile_is_explained(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(sim_command, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_shows_examples() -> None:
    assert "warmroute worker sim --port 8001 --count 4" in CliRunner().invoke(sim_command, ["--help"]).output
