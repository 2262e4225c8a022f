from __future__ import annotations

import json
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gateway import doctor
from gateway.config import Config, ModelConfig, WorkerConfig
from gateway.dialects import CHAT, DIALECTS, RESPONSES
from gateway.doctor import Worker, doctor_command, examine, prerequisites
from gateway.doctor_requests import battery, read_trace
from gateway.token_mode import TokenMode
from tests.tiny_tokenizer import model

WORKER = WorkerConfig(url="http://gpu1:8000")


@cache
def token_mode(directory: Path, block_tokens: int = 0) -> TokenMode:
    return TokenMode(directory, block_tokens)


class FakeEngine:
    """An engine with a tokenizer of its own, and flags for what it lacks."""

    def __init__(self, template: str = "qwen", *, render: bool = True, tokenize: bool = True, details: bool = True, events: bool = True):
        self.mode = token_mode(model(template))
        self.render, self.tokenize, self.details, self.events = render, tokenize, details, events
        self.up = True

    def tokens(self, path: str, body: dict[str, Any]) -> list[int]:
        rendered = self.mode.renderer.render(DIALECTS[path], body)
        if not isinstance(rendered.prompt, str):
            return rendered.prompt
        return list(array("I", self.mode.tokenizer.encode(rendered.prompt, rendered.add_special_tokens)))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.up:
            raise httpx.ConnectError("refused")
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}, {"id": "adapter", "parent": "tiny"}]})
        if path == "/kv_event_sources" and self.events:
            source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
            return httpx.Response(200, json={"0": source})
        if path == "/metrics":
            return httpx.Response(200, text='vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n')
        if path == "/v1/completions":
            return httpx.Response(200, json={"usage": {"prompt_tokens": 1, "prompt_tokens_details": {} if self.details else None}})
        if path.endswith("/render") and self.render:
            made = {"token_ids": self.tokens(path.removesuffix("/render"), body)}
            return httpx.Response(200, json=[made] if "completions/render" in path and "chat" not in path else made)
        if path == "/tokenize" and self.tokenize:
            kind = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            return httpx.Response(200, json={"tokens": self.tokens(kind, body)})
        return httpx.Response(404, json={"detail": "Not Found"})


@pytest.fixture
def with_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every worker this engine."""

    def use(engine: FakeEngine) -> FakeEngine:
        client = httpx.Client
        monkeypatch.setattr("gateway.token_mode.TokenMode", lambda directory, block, options: token_mode(directory, block))  # loaded once
        monkeypatch.setattr(doctor.httpx, "Client", lambda **kwargs: client(transport=httpx.MockTransport(engine)))
        return engine

    return use


def config(**settings: Any) -> Config:
    return Config(workers=[WORKER], models=[ModelConfig(name="tiny", tokenizer=model("qwen"), **settings)])


def test_an_engine_with_the_same_tokenizer_has_the_same_tokens(with_engine: Any) -> None:
    with_engine(FakeEngine())
    findings = list(examine(config(), None, list(battery())))
    assert {finding.verdict for finding in findings} == {"ok"}
    assert len(findings) > 25


def test_a_difference_names_the_first_token_and_its_surroundings(with_engine: Any) -> None:
    with_engine(FakeEngine("chatml"))
    result = CliRunner().invoke(doctor_command, ["http://gpu1:8000", "--tokenizer", str(model("qwen"))], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "differs" in result.output and "prompts differ from the engine's own" in result.output
    findings = list(examine(config(), None, [("digits", CHAT, {"messages": [{"role": "user", "content": "n 12345"}]})]))
    detail = findings[-1].detail
    assert detail.startswith("at token 5 of ")
    ours, engine = detail.splitlines()[1:]
    assert ours.startswith("ours ") and "' ', in '<|im_start|>user\\nn 12345" in ours, "digits stand alone"
    assert engine.startswith("engine ") and "' 1', in '<|im_start|>user\\nn 12345" in engine


def test_without_render_routes_what_tokenize_knows_is_compared(with_engine: Any) -> None:
    with_engine(FakeEngine(render=False))
    verdicts = {finding.check: finding.verdict for finding in examine(config(), None, list(battery()))}
    assert verdicts["prompt: code"] == verdicts["chat: tools"] == "ok"
    assert verdicts["responses: text"] == verdicts["messages: text"] == "skipped"
    unknown_there = ("effort", CHAT, {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high"})
    assert list(examine(config(), None, [unknown_there]))[-1].verdict == "skipped", "/tokenize would ignore the effort"
    with_engine(FakeEngine(render=False, tokenize=False))
    skipped = [finding.detail for finding in examine(config(), None, list(battery())) if finding.verdict == "skipped"]
    assert skipped
    assert all("neither render routes nor /tokenize" in detail or "--enable-scale-out" in detail for detail in skipped)


def test_prerequisites_that_are_missing_say_what_to_do() -> None:
    engine = FakeEngine(details=False, events=False)
    worker = Worker(WORKER, httpx.Client(transport=httpx.MockTransport(engine)))
    found = {finding.check: finding for finding in prerequisites(worker, ["tiny"], 48)}
    assert found["KV events"].verdict == "warning" and "--kv-events-config" in found["KV events"].detail
    assert found["usage"].verdict == "warning" and "--enable-prompt-tokens-details" in found["usage"].detail
    assert found["block size"].verdict == "failed" and "32" in found["block size"].detail
    found = {finding.check: finding for finding in prerequisites(worker, ["tiny"], 64)}
    assert found["block size"].verdict == "ok"


def test_an_engine_that_is_down_or_unknown_is_said(with_engine: Any, tmp_path: Path) -> None:
    with_engine(FakeEngine()).up = False
    result = CliRunner().invoke(doctor_command, ["http://gpu1:8000"], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "no models from http://gpu1:8000/v1/models" in result.output
    assert CliRunner().invoke(doctor_command, []).exit_code == 2
    assert CliRunner().invoke(doctor_command, ["gpu1"]).exit_code == 2


def test_a_model_without_a_tokenizer_is_in_text_mode(with_engine: Any) -> None:
    with_engine(FakeEngine())
    result = CliRunner().invoke(doctor_command, ["http://gpu1:8000"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "text mode" in result.output and "--tokenizer DIR" in result.output


def test_own_requests_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    path.write_text('{"messages": []}\n\n{"path": "/v1/responses", "body": {"input": "x"}}\n{"input": "y"}\n')
    assert [(name, dialect) for name, dialect, _ in read_trace(path)] == [
        ("bodies.jsonl:1", CHAT), ("bodies.jsonl:3", RESPONSES), ("bodies.jsonl:4", RESPONSES),
    ]  # fmt: skip
    path.write_text('{"messages": []}\n{')
    with pytest.raises(Exception, match=r"bodies.jsonl:2: not valid JSON"):
        list(read_trace(path))
