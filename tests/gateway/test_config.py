"""Every fault in a configuration is told with its line and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.config import ConfigError, load

GOOD = """\
listen:
  port: 9000
models:
  - name: qwen
    aliases: [gpt-5, claude-sonnet]
workers:
  - url: http://gpu1:8000
    model: qwen
    tp: 2
    kv_capacity_tokens: 500000
    latency: gpt-oss-120b-h200
  - url: http://gpu2:8000/
    latency: {prefill_token: 0.0001}
tiers:
  latency: {ttft_s: 2}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "warmroute.yaml"
    path.write_text(text)
    return path


def test_a_good_file_is_read(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    assert config.listen.port == 9000
    assert [worker.id for worker in config.workers] == ["gpu1:8000", "gpu2:8000"]
    assert config.workers[0].profile().latency_model().prefill_token == 2.485e-5
    assert config.tiers["latency"].ttft_s == 2


@pytest.mark.parametrize(
    ("line", "text", "says"),
    [
        (2, "listen:\n  prot: 9000\n", "did you mean 'port'"),
        (2, "listen:\n  port: many\n", "valid integer"),
        (3, "workers:\n  - url: http://a:1\n    tpp: 2\n", "did you mean 'tp'"),
        (2, "workers:\n  - model: m\n", "url: is required"),
        (2, "workers:\n  - url: gpu1:8000\n", "http://host:port"),
        (2, "workers:\n  - url: http://me:secret@a:1\n", "api_key_env"),
        (3, "workers:\n  - url: http://a:1\n    latency: warp\n", "known: qwen3-32b-h100-tp2"),
        (3, "workers:\n  - url: http://a:1\n    latency: {prefill_tokens: 1}\n", "did you mean 'prefill_token'"),
        (3, "workers:\n  - url: http://a:1\n    kv_events: sometimes\n", "kv_events"),
        (3, "workers:\n  - url: http://a:1\n    kv_events: {endpoint: somewhere}\n", "tcp://host:port"),
        (3, "workers:\n  - url: http://a:1\n    kv_events: {endpoint: 'tcp://a:1', topics: kv}\n", "did you mean 'topic'"),
        (3, "models:\n  - name: m\n    tokenizer: /nowhere\n", "tokenizer.json"),
        (1, "policy: warmest\n", "'warm'"),
        (3, "tiers:\n  standard: {}\n  golden: {}\n", "tiers"),
        (2, "listen: {\n  port: [\n", "not valid YAML"),
        (1, "- a list\n", "mapping of settings"),
        (1, "workers:\n  - url: http://a:1\n  - url: http://a:1\n", "two workers are called"),
        (1, "models:\n  - name: m\n  - name: n\n    aliases: [m]\n", "given twice"),
    ],
)
def test_a_fault_is_told_with_its_line(tmp_path: Path, line: int, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    fault = caught.value.faults[0]
    assert says in fault
    if "YAML" not in says:  # the parser's own mark may stand behind the fault
        assert fault.startswith(f"{path}:{line}:")
    checked = CliRunner().invoke(main, ["check-config", str(path)])
    assert checked.exit_code == 1
    assert says in checked.output


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "listen:\n  prot: 1\nindex:\n  ttl: 1\n"))
    assert len(caught.value.faults) == 2


def test_the_environment_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_LISTEN__PORT", "9100")
    monkeypatch.setenv("WARMROUTE_POLICY", "random")
    config = load(write(tmp_path, GOOD))
    assert (config.listen.port, config.policy) == (9100, "random")
    assert config.workers, "what the environment does not name stays"


def test_a_fault_in_the_environment_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_LISTEN__PORT", "many")
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, GOOD))
    assert caught.value.faults[0].startswith("environment WARMROUTE_LISTEN__PORT")


def test_check_config_says_what_it_found(tmp_path: Path) -> None:
    checked = CliRunner().invoke(main, ["check-config", str(write(tmp_path, GOOD))])
    assert checked.exit_code == 0
    assert "2 workers" in checked.output and "qwen" in checked.output


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    checked = CliRunner().invoke(main, ["check-config", str(tmp_path / "none.yaml")])
    assert checked.exit_code == 1 and "cannot be read" in checked.output


def test_serve_without_workers_says_how_to_name_some() -> None:
    started = CliRunner().invoke(main, ["serve"])
    assert started.exit_code == 2 and "--workers URL" in started.output
