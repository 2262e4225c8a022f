"""`warmroute doctor`: whether the gateway knows its workers' caches exactly, and where it does not, what to do.

The tokens that token mode makes of a request are compared with the engine's own, for requests of every dialect and shape, by
the engine's render routes or, without those, its /tokenize.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import httpx
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.config import Config, ModelConfig, WorkerConfig, load_or_exit, reason
from gateway.dialects import CHAT, COMPLETIONS, Dialect
from gateway.doctor_requests import battery, read_trace
from kvindex.tokenizer import NotEncodable, TokenizerError
from workers.kv_sources import from_sglang, from_vllm
from workers.monitor import kv_capacity

if TYPE_CHECKING:  # needs the extra `exact`
    from gateway.token_mode import TokenMode

TIMEOUT_S = 30.0
CONTEXT = 12  # tokens shown on either side of a difference

Verdict = Literal["ok", "warning", "failed", "differs", "skipped"]
_COLOURS: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "failed": "red", "differs": "red", "skipped": "dim"}

EPILOG = """
\b
Examples:
  warmroute doctor --config warmroute.yaml
      every worker and every model that has a tokenizer in the file
  warmroute doctor http://gpu1:8000 --tokenizer /models/qwen3
      one worker, before there is a file
  warmroute doctor --config warmroute.yaml --trace bodies.jsonl
      your own requests besides: one JSON body a line, or {"path": "/v1/messages", "body": {...}}
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    worker: str
    check: str
    verdict: Verdict
    detail: str = ""


# --- one worker ---

# What /tokenize knows of a chat request; others would be ignored there.
_TOKENIZE_FIELDS = {
    "model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens",
}  # fmt: skip


class Worker:
    """A worker to examine."""

    def __init__(self, config: WorkerConfig, client: httpx.Client):
        self.config = config
        self.client = client
        key = os.environ.get(config.api_key_env or "", "")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> httpx.Response | None:
        """The answer, None when there is none with status 200."""
        try:
            answer = self.client.get(self.config.url + path, headers=self.headers)
        except httpx.HTTPError:
            return None
        return answer if answer.status_code == 200 else None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """(status, JSON); status 0 when it cannot be reached."""
        try:
            answer = self.client.post(self.config.url + path, json=body, headers=self.headers)
            return answer.status_code, answer.json()
        except httpx.HTTPError as error:
            return 0, str(error)
        except ValueError:
            return answer.status_code, None

    def finding(self, check: str, verdict: Verdict, detail: str = "") -> Finding:
        return Finding(self.config.id, check, verdict, detail)

    def tokens(self, dialect: Dialect, body: dict[str, Any]) -> list[int] | str:
        """The engine's own token ids for a request, or why it does not tell."""
        status, answer = self.post(dialect.path + "/render", body)
        if status == 200:
            rendered = answer[0] if isinstance(answer, list) and answer else answer
            ids = rendered.get("token_ids") if isinstance(rendered, dict) else None
            return ids if isinstance(ids, list) else "the render route answers without token_ids"
        if status == 400:
            return "the engine refuses it"
        if dialect is CHAT and body.keys() <= _TOKENIZE_FIELDS:
            asked = body
        elif dialect is COMPLETIONS and isinstance(body.get("prompt"), str):
            asked = {name: body[name] for name in ("model", "prompt", "add_special_tokens") if name in body}
        else:
            return "needs the engine's render routes (vLLM: --enable-scale-out)"
        status, answer = self.post("/tokenize", asked)
        if status == 400:
            return "the engine refuses it"
        ids = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        return ids if isinstance(ids, list) else "the engine has neither render routes nor /tokenize"


def models_of(worker: Worker) -> list[str] | Finding:
    """Names of the models it serves, without LoRA adapters; or the finding that it cannot be reached."""
    answer = worker.get("/v1/models")
    if answer is None:
        hint = "is the engine up, are its URL and API key right?"
        return worker.finding("reachable", "failed", f"no models from {worker.config.url}/v1/models; {hint}")
    entries = answer.json().get("data") or []
    return [entry["id"] for entry in entries if isinstance(entry, dict) and "id" in entry and not entry.get("parent")]


def prerequisites(worker: Worker, models: list[str], block_tokens: int) -> Iterator[Finding]:
    """What exact knowledge needs besides the tokens."""
    url = worker.config.url
    yield worker.finding("reachable", "ok", f"serves {', '.join(models) or 'no model'}")
    told = worker.get("/kv_event_sources")
    sources = from_vllm(told.json(), url) if told else []
    if not sources and (told := worker.get("/server_info")):
        sources = from_sglang(told.json(), url)
    if isinstance(worker.config.kv_events, str) and not sources:
        flag = "--kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\"}'"
        hint = f"start it with {flag}, or name its endpoints in kv_events"
        yield worker.finding("KV events", "warning", f"not advertised: its cache is known by routing memory only; {hint}")
    else:
        where = ", ".join(source.endpoint for source in sources) or "named in the configuration"
        yield worker.finding("KV events", "ok", where)
    if models:
        status, answer = worker.post("/v1/completions", {"model": models[0], "prompt": "Hello", "max_tokens": 1})
        usage = answer.get("usage") if status == 200 and isinstance(answer, dict) else None
        if not isinstance(usage, dict):
            yield worker.finding("usage", "warning", f"a completion of one token was answered with status {status}")
        elif not isinstance(usage.get("prompt_tokens_details"), dict):
            hint = "start it with --enable-prompt-tokens-details (SGLang: --enable-cache-report)"
            yield worker.finding("usage", "warning", f"no cached tokens in usage: predictions cannot be checked; {hint}")
        else:
            yield worker.finding("usage", "ok", "reports cached tokens")
    metrics = worker.get("/metrics")
    block = kv_capacity(metrics.text)[1] if metrics else None
    if block is None:
        yield worker.finding("block size", "warning", "its /metrics tell none; give block_size in the worker's configuration")
    elif block_tokens and block_tokens % block:
        hint = f"does not divide the model's block_tokens of {block_tokens}; set a multiple of it"
        yield worker.finding("block size", "failed", f"its block of {block} tokens {hint}")
    else:
        yield worker.finding("block size", "ok", f"{block} tokens")


def compare(worker: Worker, model: str, mode: TokenMode, name: str, dialect: Dialect, fields: dict[str, Any]) -> Finding:
    """Our tokens for one request against the engine's."""
    from gateway.rendering import NotReproducible

    body = {**fields, "model": model}
    theirs = worker.tokens(dialect, body)
    try:
        rendered = mode.renderer.render(dialect, body)
        prompt = rendered.prompt
        ours = list(array("I", mode.tokenizer.encode(prompt, rendered.add_special_tokens))) if isinstance(prompt, str) else prompt
    except (NotReproducible, NotEncodable) as error:
        reason = error.reason if isinstance(error, NotReproducible) else str(error)
        return worker.finding(name, "skipped", f"placed by its text: {reason}")
    if isinstance(theirs, str):
        return worker.finding(name, "skipped", theirs)
    if ours == theirs:
        return worker.finding(name, "ok", f"{len(ours)} tokens")
    return worker.finding(name, "differs", difference(mode, ours, theirs))


def difference(mode: TokenMode, ours: list[int], theirs: list[int]) -> str:
    """Where two token sequences part, with what stands around it."""
    at = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), min(len(ours), len(theirs)))

    def told(ids: list[int]) -> str:
        here = f"{ids[at]} {mode.tokenizer.decode([ids[at]])!r}" if at < len(ids) else "nothing"
        return f"{here}, in {mode.tokenizer.decode(ids[max(0, at - CONTEXT) : at + CONTEXT])!r}"

    return f"at token {at} of {len(ours)} (engine: {len(theirs)}):\nours   {told(ours)}\nengine {told(theirs)}"


# --- the command ---


def examine(config: Config, tokenizer: Path | None, requests: list[tuple[str, Dialect, dict[str, Any]]]) -> Iterator[Finding]:
    """All findings for the workers of a configuration. `tokenizer` stands for every model that has none in it."""
    modes: dict[str, TokenMode | str] = {}  # one for all models that are rendered and tokenised alike
    given = {model.name: model for model in config.models}
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        for worker_config in config.workers:
            worker = Worker(worker_config, client)
            models = models_of(worker)
            if isinstance(models, Finding):
                yield models
                continue
            blocks = [given[model].block_tokens or 0 for model in models if model in given]
            yield from prerequisites(worker, models, max(blocks, default=0))
            for model in models:
                entry = given.get(model) or ModelConfig(name=model)
                entry = entry if entry.tokenizer else entry.model_copy(update={"tokenizer": tokenizer})
                if entry.tokenizer is None:
                    hint = f"give the directory of its tokenizer: models: [{{name: {model}, tokenizer: DIR}}], or --tokenizer DIR"
                    yield worker.finding(f"{model}: tokens", "skipped", f"text mode; {hint}")
                    continue
                kind = entry.model_dump_json(exclude={"name", "aliases"})
                if kind not in modes:
                    try:
                        from gateway.token_mode import token_mode

                        modes[kind] = token_mode(entry)
                    except TokenizerError as error:
                        modes[kind] = str(error)
                mode = modes[kind]
                if isinstance(mode, str):
                    yield worker.finding(f"{model}: tokens", "failed", mode)
                    continue
                for name, dialect, fields in requests:
                    yield compare(worker, model, mode, name, dialect, fields)


@click.command("doctor", epilog=EPILOG)
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option("--config", "config_path", type=click.Path(dir_okay=False, path_type=Path), help="YAML file with workers and models.")
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Model directory for models without one.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Request bodies to compare; JSON lines.")
def doctor_command(urls: tuple[str, ...], config_path: Path | None, tokenizer: Path | None, trace: Path | None) -> None:
    """Compare the gateway's tokens with the engines' own, and check what exact routing needs.

    Exits 1 when something is wrong.
    """
    config = load_or_exit(config_path)
    try:
        known = {worker.url for worker in config.workers}
        added = [WorkerConfig(url=url) for url in urls if url.rstrip("/") not in known]
    except ValidationError as error:
        raise click.UsageError(f"a worker's URL {reason(error)}") from None
    config = config.model_copy(update={"workers": config.workers + added})
    if not config.workers:
        raise click.UsageError("no workers: give their URLs, or a --config file with a 'workers' list")
    requests = [*battery(), *(read_trace(trace) if trace is not None else ())]
    findings = list(examine(config, tokenizer, requests))
    report(findings)
    sys.exit(any(finding.verdict in ("failed", "differs") for finding in findings))


def report(findings: list[Finding]) -> None:
    """Print a table, and what follows from differences."""
    table = Table(title="warmroute doctor", show_lines=False)
    for title in ("worker", "check", "result", "detail"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        verdict = "OK" if finding.verdict == "ok" else finding.verdict
        table.add_row(finding.worker, escape(finding.check), f"[{colour}]{verdict}[/]", escape(finding.detail))
    console = Console()
    console.print(table)
    if differing := sum(finding.verdict == "differs" for finding in findings):
        console.print(
            f"{differing} prompts differ from the engine's own. Routing goes on: such a prompt matches less of a cache than is there, and "
            "a worker whose predictions stay wrong is trusted less by itself. Point 'tokenizer' to the directory that the engine "
            "loads, with its chat template (or that of --chat-template), or leave it out for text mode."
        )
