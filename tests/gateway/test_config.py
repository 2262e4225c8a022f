"""Every fault in a configuration is told with its line and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main, stale_modules
from gateway.config import ConfigError, load

PROFILES = Path(__file__).parent.parent.parent / "deploy" / "profiles"

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
        (3, "workers:\n  - url: http://a:1\n    latency: warp\n", "known: auto, qwen3-32b-h100-tp2"),
        (3, "workers:\n  - url: http://a:1\n    latency: {prefill_tokens: 1}\n", "did you mean 'prefill_token'"),
        (3, "workers:\n  - url: http://a:1\n    kv_events: sometimes\n", "kv_events"),
        (3, "workers:\n  - url: http://a:1\n    kv_events: {endpoint: somewhere}\n", "tcp://host:port"),
        (3, "workers:\n  - url: http://a:1\n    kv_events: {endpoint: 'tcp://a:1', topics: kv}\n", "did you mean 'topic'"),
        (3, "models:\n  - name: m\n    tokenizer: /nowhere\n", "tokenizer.json"),
        (2, "workers:\n  - url: http://gpu1/v1#a\n", "name: is needed"),
        (3, "workers:\n  - url: http://a:1\n    name: my gpu\n", "whitespace"),
        (3, "workers:\n  - url: http://a:1\n    name: gpu@1\n", "'@'"),
        (3, "workers:\n  - url: http://a:1\n    name: gpu#1\n", "'#'"),
        (3, "workers:\n  - url: http://a:1\n    name: gpu|1\n", "'|'"),
        (3, "workers:\n  - url: http://a:1\n    name: kv:gpu\n", "'kv:'"),
        (3, "workers:\n  - url: http://a:1\n    name: ''\n", "empty"),
        (3, f"workers:\n  - url: http://a:1\n    name: {'é' * 101}\n", "200 bytes"),
        (3, "index:\n  redis:\n    url: http://cache:6379\n", "redis://host:port"),
        (3, "index:\n  redis:\n    url: redis://cache:many/0\n", "port from 0 to 65535"),
        (3, "index:\n  redis:\n    url: redis://cache:66379/0\n", "port from 0 to 65535"),
        (4, "index:\n  redis:\n    nodes:\n      - sentinel1\n", "must be host:port"),
        (3, "index:\n  redis:\n    sentinel_master: cache\n", "needs 'nodes'"),
        (3, "index:\n  redis:\n    sentinel_master: cache\n    nodes: []\n", "needs 'nodes'"),
        (5, "index:\n  redis:\n    nodes: ['s:1']\n    sentinel_master: cache\n    cluster: true\n", "no Sentinels"),
        (4, "index:\n  redis:\n    url: unix:///run/redis\n    cluster: true\n", "one server"),
        (5, "index:\n  redis:\n    url: unix:///run/redis\n    nodes: ['s:1']\n    sentinel_master: cache\n", "one server"),
        (3, "index:\n  redis:\n    ca_file: /nowhere/ca.pem\n", "must be a local file"),
        (3, "index:\n  redis:\n    cert_file: /nowhere/gateway.pem\n", "must be a local file"),
        (3, "index:\n  redis:\n    key_file: /nowhere/gateway.key\n", "must be a local file"),
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


@pytest.mark.parametrize(
    "text",
    [
        "index: {redis: {url: 'redis://u:hunter2@h:6379/0'}}",
        "index: {redis: {url: 'redis://:hunter2@h:6379/0'}}",
        "index: {redis: {url: 'redis://h:6379/0?password=hunter2'}}",
        "index: {redis: {url: 'redis://u@h:6379/0?db=1&pass%77ord=hunter2'}}",
        "index: {redis: {url: 'redis://u@h:hunter2/0'}}",
        "index: {redis: {url: 'redis:/u:hunter2@h:6379/0'}}",
        "index: {redis: {url: ['redis://u:hunter2@h']}}",
        "index: {redis: {nodes: ['u:hunter2@h:6379']}}",
        "index: {redis: {password: hunter2}}",
        "workers: [{url: 'http://me:hunter2@a:1'}]",
        "workers: [{url: 'me:hunter2@a:1'}]",
        "workers: [{url: 'http://a:1', name: 'me:hunter2@a:1'}]",
        "workers: [{url: 'http://a:1', kv_events: {endpoint: 'me:hunter2@a'}}]",
        "registry: {allow: ['http://me:hunter2@gpu1']}",
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    checked = CliRunner().invoke(main, ["check-config", str(write(tmp_path, text))])
    assert checked.exit_code == 1
    assert "hunter2" not in checked.output


def test_a_secret_in_the_environments_url_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_INDEX__REDIS__URL", "redis://u:hunter2@h:6379/0")
    for command in (["check-config", str(write(tmp_path, GOOD))], ["serve", "--workers", "http://a:1"]):
        started = CliRunner().invoke(main, command)
        assert started.exit_code == 1
        assert "password_env" in started.output and "hunter2" not in started.output + str(started.exception)


def test_credentials_in_a_workers_flag_are_refused_and_not_shown() -> None:
    started = CliRunner().invoke(main, ["serve", "--workers", "http://me:hunter2@a:1"])
    assert started.exit_code == 2
    assert "api_key_env" in started.output and "hunter2" not in started.output


def test_names_that_workers_have_by_default_or_may_have(tmp_path: Path) -> None:
    urls = ["http://gpu1:8000", "http://[::1]:8000", "https://gpu.internal/engine/v1", "http://10.0.0.1:1"]
    lines = [f"  - url: '{url}'\n" for url in urls] + [f"  - {{url: 'http://{'b' * 250}', name: '{'é' * 100}'}}\n"]
    config = load(write(tmp_path, "workers:\n" + "".join(lines)))
    assert [worker.id for worker in config.workers] == [url.split("://")[1] for url in urls] + ["é" * 100]


def test_certificates_that_are_there_are_accepted(tmp_path: Path) -> None:
    pem = tmp_path / "redis.pem"
    pem.touch()
    config = load(write(tmp_path, f"index: {{redis: {{url: 'rediss://u@h', ca_file: '{pem}', cert_file: '{pem}', key_file: '{pem}'}}}}"))
    assert config.index.redis.ca_file == pem


SHARED = """\
index: {backend: redis, redis: {password_env: CACHE_PASSWORD}}
registry: {enabled: true, allow: [10.0.0.0/8]}
"""
SECRETS = {"WARMROUTE_POOL_SECRET": "p" * 16, "WARMROUTE_REGISTRY_SECRET": "r" * 16, "CACHE_PASSWORD": "c"}


@pytest.mark.parametrize("value", [None, "", "short"])
@pytest.mark.parametrize("variable", SECRETS)
def test_a_secret_that_is_not_in_the_environment_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None
) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    path = str(write(tmp_path, SHARED))
    assert CliRunner().invoke(main, ["check-config", path]).stderr == ""
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    checked = CliRunner().invoke(main, ["check-config", path])
    assert checked.exit_code == 0 and "ok" in checked.stdout
    if variable == "CACHE_PASSWORD":  # somebody else's secret: it may be short
        assert (variable in checked.stderr) is not bool(value)
    else:
        [line] = checked.stderr.splitlines()
        assert variable in line and "openssl rand -hex 32" in line


def test_a_gateway_by_itself_needs_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    text = "index: {backend: memory, redis: {password_env: CACHE_PASSWORD}}\n"
    assert CliRunner().invoke(main, ["check-config", str(write(tmp_path, text))]).stderr == ""


@pytest.mark.parametrize("text", ["workers: ['http://gpu1:8000']", "models: [coder]", "index: redis"])
def test_a_word_where_settings_belong_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="must be a mapping of settings; known keys: "):
        load(write(tmp_path, text))


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


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_engines_profile_is_told_from_a_gateways_file(profile: Path) -> None:
    checked = CliRunner().invoke(main, ["check-config", str(profile)])
    assert checked.exit_code == 1 and f"warmroute worker launch {profile} --print" in checked.output


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    checked = CliRunner().invoke(main, ["check-config", str(tmp_path / "none.yaml")])
    assert checked.exit_code == 1 and "cannot be read" in checked.output


def test_serve_without_workers_says_how_to_name_some() -> None:
    started = CliRunner().invoke(main, ["serve"])
    assert started.exit_code == 2 and "--workers URL" in started.output


@pytest.mark.parametrize("command", [["serve"], ["doctor"], ["worker", "agent", "--worker", "http://127.0.0.1:1"]], ids=lambda c: c[-1][:6])
def test_a_fault_in_the_environment_is_one_line_without_the_secret_for_every_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_INDEX__REDIS__URL", "redis://u:hunter2@h:6379/0")
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "must not hold a password" in result.output and "hunter2" not in result.output


def test_sources_that_were_changed_after_they_were_compiled_are_told(tmp_path: Path) -> None:
    package = tmp_path / "routing" / "policies"
    package.mkdir(parents=True)
    for name in ("warm.py", "warm.cpython-311-x86_64-linux-gnu.so", "llmd.py"):
        (package / name).touch()
    os.utime(package / "warm.py", (2_000_000_000, 2_000_000_000))
    assert stale_modules(tmp_path) == []  # no checkout
    (tmp_path / "setup.py").touch()
    assert stale_modules(tmp_path) == ["routing/policies/warm.py"]
    os.utime(package / "warm.cpython-311-x86_64-linux-gnu.so", (2_000_000_001, 2_000_000_001))
    assert stale_modules(tmp_path) == []
