"""The whole gateway as one ASGI application: inference routes raw, everything that people configure and read on FastAPI."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import orjson
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as RequestError

from gateway.config import POLICY_NAMES, Config
from gateway.dialects import CHAT, DIALECTS, MESSAGES
from gateway.fleet import Fleet
from gateway.inference import Inference
from gateway.metrics import Gauge, Metrics, exposition, merge_by_worker, merge_gauges, merge_load
from gateway.siblings import Question, Siblings
from routing.trust import LEVELS


def _exposition(reports: list[dict[str, Any]], silent: int) -> bytes:
    total = Metrics()
    for report in reports:
        total.add(report["counts"])
    answered = [report["gauges"] for report in reports if "gauges" in report]
    processes: list[Gauge] = [
        ("processes", "Gateway processes behind this port whose numbers these are", {"": float(len(answered))}),
        ("processes_silent", "Those that did not answer; their counters are as of their last answer", {"": float(silent)}),
    ]
    return exposition(total, [*processes, *merge_gauges(answered)])


def _error(request: Request, status: int, message: str, *, code: str | None = None, param: str | None = None) -> Response:
    """An error in the dialect of whoever asks."""
    anthropic = request.url.path.startswith(MESSAGES.path) or "anthropic-version" in request.headers
    return Response((MESSAGES if anthropic else CHAT).error(status, message, code=code, param=param), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    path, status, message, headers = request.url.path, error.status_code, error.detail, dict(error.headers or {})
    if path in DIALECTS:  # those are served past FastAPI
        status, headers = 405, {"Allow": "POST"}
    if status == 405:
        message = f"{path} takes {headers.get('Allow', 'other methods')}, not {request.method}"
    elif status == 404 and message == "Not Found":
        message = f"{path} is no route of this gateway; it serves {', '.join(DIALECTS)} (POST), /v1/models and what /docs lists"
    response = _error(request, status, message)
    response.headers.update(headers)
    return response


async def _not_valid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    said = [": ".join((".".join(map(str, one["loc"][1:])) or "the body", one["msg"])) for one in error.errors()]
    return _error(request, 422, "; ".join(said))


class PolicyBody(BaseModel):
    policy: POLICY_NAMES


class Gateway:
    """ASGI entry. Requests to inference routes never touch FastAPI.

    With `siblings` it is one of several processes behind one port: metrics and admin routes, which reach any of them, speak for all.
    """

    def __init__(self, config: Config, siblings: Siblings | None = None):
        self.config = config
        self.siblings = siblings
        self.fleet = Fleet(config)
        self.metrics = Metrics()
        self.inference = Inference(config, self.fleet, self.metrics)
        self.api = self._build_api()

    def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> Coroutine[Any, Any, None]:
        if scope["type"] == "http" and scope["path"] in DIALECTS and scope["method"] == "POST":
            return self.inference(scope, receive, send)
        return self.api(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        if self.siblings is not None:
            await self._join(self.siblings)
        await self.fleet.start()
        self.inference.start()
        try:
            yield
        finally:
            if self.siblings is not None:
                await self.siblings.stop()
            await self.inference.stop()
            await self.fleet.stop()

    def _build_api(self) -> FastAPI:
        api = FastAPI(title="warmroute", description="Routes LLM requests to the worker whose KV cache is warm.", lifespan=self._lifespan)
        api.add_exception_handler(RequestError, _refused)
        api.add_exception_handler(RequestValidationError, _not_valid)
        fleet = self.fleet

        @api.get("/v1/models", summary="Models that can be used now")
        def models(request: Request) -> dict[str, Any]:
            entries = []
            for name in fleet.model_names():
                entry: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "warmroute"}
                if length := fleet.max_model_len(fleet.resolve(name)):
                    entry["max_model_len"] = length
                if "anthropic-version" in request.headers:
                    entry |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
                entries.append(entry)
            page = {"has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if entries else {"has_more": False}
            return {"object": "list", "data": entries, **page}

        @api.get("/v1/models/{model:path}", summary="One model")
        def model(model: str, request: Request) -> Response:
            if model not in fleet.model_names():
                return _error(request, 404, f"the model {model!r} does not exist", code="model_not_found", param="model")
            return JSONResponse({"id": model, "object": "model", "created": 0, "owned_by": "warmroute"})

        @api.get("/health", summary="The gateway process runs")
        def health() -> dict[str, str]:
            return {"status": "ok"}

        @api.get("/ready", summary="At least one worker takes requests (as the process that answers sees it)")
        def ready() -> Response:
            up = {worker_id: worker.up for worker_id, worker in fleet.router.workers.items()}
            return JSONResponse({"ready": fleet.ready, "workers": up}, 200 if fleet.ready else 503)

        @api.get("/metrics", summary="Prometheus metrics")
        async def prometheus() -> Response:
            # the report is a copy, so that a thread can make text of it while requests go on
            text = await run_in_threadpool(_exposition, *await self._reports())
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

        @api.get("/", response_class=HTMLResponse, include_in_schema=False)
        def dashboard() -> str:
            return files("gateway").joinpath("static/dashboard.html").read_text("utf-8")

        admin = [Depends(self._require_admin)]

        @api.get("/admin/workers", dependencies=admin, summary="Every worker's state as the router sees it")
        async def workers() -> dict[str, Any]:
            reports, _ = await self._reports()
            load = merge_load([report["load"] for report in reports if "load" in report])
            trust = merge_by_worker("worker_trust", [report["trust"] for report in reports if "trust" in report])
            return {
                worker_id: {
                    "url": endpoint.url, "models": endpoint.models, "cache_known_by": LEVELS[int(trust[worker_id])], **load[worker_id],
                }
                for worker_id, endpoint in fleet.endpoints.items()
            }  # fmt: skip

        @api.get("/admin/state", dependencies=admin, summary="What the gateway holds open: for tests and for people who look for leaks")
        async def state() -> dict[str, Any]:
            reports, silent = await self._reports()
            held = [report["held"] for report in reports if "held" in report]
            return {
                "policy": fleet.router.policy.name,
                **{name: sum(each[name] for each in held) for name in held[0]},
                "processes": len(held),
                "processes_silent": silent,
            }

        @api.get("/admin/policy", dependencies=admin, summary="The routing policy in use")
        def policy() -> dict[str, str]:
            return {"policy": fleet.router.policy.name}

        @api.put("/admin/policy", dependencies=admin, summary="Switch the routing policy; what was learned of caches and sessions is reset")
        async def use_policy(body: PolicyBody) -> dict[str, str]:
            fleet.router.use_policy(body.policy)
            if fleet.sharing is not None:
                fleet.sharing.share_policy(body.policy)
            if self.siblings is not None:  # asked directly, too: they take it now, and while Redis is away
                self.siblings.keep("policy", body.policy.encode())  # first: one that starts now reads it there
                answers = await self.siblings.ask({"policy": body.policy})
                if deaf := sum(answer is None for answer in answers.values()):
                    raise HTTPException(503, f"{deaf} of {self.siblings.count} processes did not answer and may keep theirs; try again")
            return {"policy": fleet.router.policy.name}

        return api

    # --- one of several processes ---

    async def _join(self, siblings: Siblings) -> None:
        """Take over what the process before this one counted, and the policy that was set since the start (Redis may know a later one)."""
        await siblings.start(self._answer)
        if kept := siblings.recall(f"counts.{siblings.number}"):
            self.metrics.add(orjson.loads(kept))
        if policy := siblings.recall("policy"):
            self.fleet.router.use_policy(policy.decode())

    def _answer(self, question: Question) -> dict[str, Any]:
        if policy := question.get("policy"):
            if self.fleet.sharing is not None:
                self.fleet.sharing.use_policy(policy)
            else:
                self.fleet.router.use_policy(policy)
            return {"policy": policy}
        return self._report()

    def _report(self) -> dict[str, Any]:
        """What this process counted and holds. The counts are also kept, so that no sum of them falls when it dies."""
        fleet = self.fleet
        counts = self.metrics.report()
        if self.siblings is not None:
            self.siblings.keep(f"counts.{self.siblings.number}", orjson.dumps(counts))
        pools = set(fleet.pools.values())  # the ranks behind one URL share theirs
        return {
            "counts": counts,
            "gauges": list(fleet.gauges()),
            "load": fleet.router.load(),
            "trust": {worker_id: LEVELS.index(worker.trust.level) for worker_id, worker in fleet.router.workers.items()},
            "held": {
                "sessions": len(fleet.router.sessions),
                "index_blocks": len(fleet.router.index),
                "reservations": sum(worker.in_flight for worker in fleet.router.workers.values()),
                "upstream_active": sum(pool.active_connections for pool in pools),
                "upstream_open": sum(pool.open_connections for pool in pools),
                "known_prefix_bytes": self.inference.reader.kept_bytes,
            },
        }

    async def _reports(self) -> tuple[list[dict[str, Any]], int]:
        """This process's report and the others', and how many did not answer: of those there are only the counts they last gave."""
        reports = [self._report()]
        silent = 0
        siblings = self.siblings
        if siblings is not None:
            answers = await siblings.ask({})
            for number in range(siblings.count):
                if number == siblings.number:
                    continue
                if report := answers.get(number):
                    reports.append(report)
                else:
                    silent += 1
                    if kept := siblings.recall(f"counts.{number}"):
                        reports.append({"counts": orjson.loads(kept)})
        return reports, silent

    def _require_admin(self, request: Request) -> None:
        """The admin token where one is configured; without one, clients on this machine only."""
        variable = self.config.admin.token_env
        if variable:
            expected = os.environ.get(variable, "")
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not expected or not hmac.compare_digest(given.encode(), expected.encode()):
                raise HTTPException(401, "the admin token is missing or wrong")
        elif request.client is None or not ipaddress.ip_address(request.client.host).is_loopback:
            raise HTTPException(403, "admin routes need admin.token_env, or a client on this machine")
