"""What people look at: every query of the Grafana dashboard and the rules against a real Prometheus, and the live page in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from loadgen.local import LocalFleet, Program
from tests.programs import program
from tests.redis_server import RedisServer

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "warmroute.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
TIERS = ("default", "priority", "flex")  # OpenAI's service tiers: standard, latency and throughput here

pytestmark = pytest.mark.e2e


class Traffic:
    """Chat sessions of several turns, in every tier, as long as the context lasts."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(len(TIERS))

    def __enter__(self) -> None:
        self._playing = [self._threads.submit(self._sessions, tier) for tier in TIERS]

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads.shutdown()
        self._client.close()
        for session in self._playing:
            session.result()  # a request that failed fails the tests

    def _sessions(self, tier: Any) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            messages: Any = [{"role": "system", "content": "rules " * 500}, {"role": "user", "content": f"{tier} task {number}"}]
            for _ in range(4):
                stream = self._client.chat.completions.create(
                    model="sim", messages=messages, max_tokens=16, stream=True, service_tier=tier
                )
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
                messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "go on " * 50}]


@pytest.fixture(scope="module")
def traffic(local_fleet: LocalFleet) -> Iterator[LocalFleet]:
    with Traffic(local_fleet.url):
        yield local_fleet


@pytest.fixture(scope="module")
def pool(traffic: LocalFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URLs of two gateways that share by Redis, before the same workers."""
    scratch = tmp_path_factory.mktemp("pool")
    with ExitStack() as stack:
        redis = RedisServer()
        stack.callback(redis.close)
        asyncio.run(redis.start())
        env = {
            "WARMROUTE_INDEX__BACKEND": "redis", "WARMROUTE_INDEX__REDIS__URL": redis.url, "WARMROUTE_POOL_SECRET": "0123456789abcdef-test",
        }  # fmt: skip
        urls = []
        for number in range(2):
            command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", "--workers", ",".join(traffic.worker_urls)]
            gateway = Program(f"gateway-{number}", command, scratch / f"{number}.log", env)
            stack.callback(gateway.stop)
            urls += gateway.wait_for(r"listening on (http://\S+)")
        for url in urls:
            stack.enter_context(Traffic(url))
        yield urls


@pytest.fixture(scope="module")
def prometheus(traffic: LocalFleet, pool: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus with the shipped rules that has scraped the gateways once a second for long enough to know rates."""
    binary = program("prometheus")
    scratch = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / "rules.yml")]
    targets = [url.removeprefix("http://") for url in (traffic.url, *pool)]
    config["scrape_configs"] = [{"job_name": "warmroute", "static_configs": [{"targets": targets}]}]
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        binary, f"--config.file={scratch}/prometheus.yml", f"--storage.tsdb.path={scratch}/data", "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    server = Program("prometheus", command, scratch / "prometheus.log")
    try:
        # its log names the port it got
        (address,) = server.wait_for(r"(?:Listening on|listening on).*?address=\"?((?:127\.0\.0\.1|\[::\]):[1-9]\d*)")
        with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=20) as client:
            wait_until(lambda: value(client, "min(count_over_time(warmroute_worker_up[1m])) >= 8") is not None, "eight scrapes")
            yield client
    finally:
        server.stop()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    for _ in range(300):
        if condition():
            return
        pause.wait(0.2)
    pytest.fail(f"{what}: not within a minute")


def value(client: httpx.Client, query: str) -> list[Any] | None:
    """The query's samples; None where it has none yet. An error of Prometheus fails the test."""
    try:
        answer = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return None  # still starting
    if answer.status_code == 503:
        return None
    assert answer.status_code == 200, f"{query}: {answer.text}"
    return answer.json()["data"]["result"] or None


def filled_in(query: str) -> str:
    """The query as Grafana would send it with every variable at All."""
    filled = re.sub(r"\$(?:model|tier|worker)\b", ".*", query).replace("$__rate_interval", "30s")
    assert "$" not in filled, f"unknown variable in {query}"
    return filled


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}-{number}" for number, (title, _) in enumerate(QUERIES)])
def test_every_query_of_the_dashboard_returns_numbers(prometheus: httpx.Client, title: str, query: str) -> None:
    samples = value(prometheus, filled_in(query))
    assert samples, f"{title}: no data for {query}"
    # a worker that nothing was sent to lately has no rate: Grafana leaves a gap
    assert any(sample["value"][1] != "NaN" for sample in samples), f"{title}: only NaN from {query}"


def test_latency_panels_show_every_tier(prometheus: httpx.Client) -> None:
    query = next(query for title, query in QUERIES if title == "Time to first token")
    tiers = {sample["metric"]["tier"] for sample in value(prometheus, filled_in(query)) or []}
    assert tiers == {"standard", "latency", "throughput"}


def test_rules_load_and_no_alert_fires(prometheus: httpx.Client) -> None:
    rules = [rule for group in prometheus.get("/api/v1/rules").json()["data"]["groups"] for rule in group["rules"]]
    assert len(rules) == 8
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_the_shipped_scrape_config_is_valid() -> None:
    promtool = program("promtool", "prometheus")
    check = subprocess.run([promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml"], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


class HeldPage(BaseHTTPRequestHandler):
    """Passes the gateway's page on, with an image that loads for some seconds: a headless browser waits for it, then looks."""

    gateway = ""
    hold = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/held":
            self.hold.wait(6)
            self.send_response(204)
            self.end_headers()
            return
        answer = httpx.get(self.gateway + self.path, trust_env=False)
        body = answer.content.replace(b"</main>", b'<img src="/held" alt=""></main>') if self.path == "/" else answer.content
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_the_live_page_shows_the_fleet(traffic: LocalFleet, tmp_path: Path) -> None:
    chromium = program("chromium")
    handler = type("Handler", (HeldPage,), {"gateway": traffic.url})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}", "--dump-dom",
            f"http://127.0.0.1:{server.server_address[1]}/",
        ]  # fmt: skip
        page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        server.shutdown()
    shown = dict(re.findall(r'id="(tile-[a-z0-9]+)">([^<]*)<', page))
    assert re.fullmatch(r"\d+\.\d %", shown["tile-hit"]) and float(shown["tile-hit"][:-2]) > 50
    assert shown["tile-workers"] == "2 / 2"
    assert re.fullmatch(r"[\d.]+ m?s", shown["tile-p50"])
    for url in traffic.worker_urls:
        assert f">{url.removeprefix('http://')}</td>" in page
    assert len(re.findall(r'<path d="M', page)) >= 3, "a chart has no line"
    assert re.search(r'id="problem" role="status"></span>', page), "the page reports a problem"
