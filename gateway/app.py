"""The whole gateway as one ASGI application: inference routes raw, everything that people configure and read on FastAPI."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel

from gateway.config import POLICY_NAMES, Config
from gateway.dialects import DIALECTS
from gateway.fleet import Fleet
from gateway.inference import Inference
from gateway.metrics import Metrics


class PolicyBody(BaseModel):
    policy: POLICY_NAMES


class Gateway:
    """ASGI entry. Requests to inference routes never touch FastAPI."""

    def __init__(self, config: Config):
        self.config = config
        self.fleet = Fleet(config)
        self.metrics = Metrics()
        self.metrics.gauges = self.fleet.gauges
        self.inference = Inference(config, self.fleet, self.metrics)
        self.api = self._build_api()

    def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> Coroutine[Any, Any, None]:
        if scope["type"] == "http" and scope["path"] in DIALECTS and scope["method"] == "POST":
            return self.inference(scope, receive, send)
        return self.api(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        await self.fleet.start()
        self.inference.start()
        try:
            yield
        finally:
            await self.inference.stop()
            await self.fleet.stop()

    def _build_api(self) -> FastAPI:
        api = FastAPI(title="warmroute", description="Routes LLM requests to the worker whose KV cache is warm.", lifespan=self._lifespan)
        fleet, metrics = self.fleet, self.metrics

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
        def model(model: str) -> Response:
            if model not in fleet.model_names():
                error = {"message": f"the model {model!r} does not exist", "type": "invalid_request_error", "param": "model"}
                return JSONResponse({"error": {**error, "code": "model_not_found"}}, 404)
            return JSONResponse({"id": model, "object": "model", "created": 0, "owned_by": "warmroute"})

        @api.get("/health", summary="The gateway process runs")
        def health() -> dict[str, str]:
            return {"status": "ok"}

        @api.get("/ready", summary="At least one worker takes requests")
        def ready() -> Response:
            up = {worker_id: worker.up for worker_id, worker in fleet.router.workers.items()}
            return JSONResponse({"ready": fleet.ready, "workers": up}, 200 if fleet.ready else 503)

        @api.get("/metrics", summary="Prometheus metrics")
        def prometheus() -> Response:
            return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

        @api.get("/", response_class=HTMLResponse, include_in_schema=False)
        def dashboard() -> str:
            return files("gateway").joinpath("static/dashboard.html").read_text("utf-8")

        admin = [Depends(self._require_admin)]

        @api.get("/admin/workers", dependencies=admin, summary="Every worker's state as the router sees it")
        def workers() -> dict[str, Any]:
            load = fleet.router.load()
            return {
                worker_id: {
                    "url": endpoint.url, "models": endpoint.models, "cache_known_by": fleet.router.workers[worker_id].trust.level,
                    **load[worker_id],
                }
                for worker_id, endpoint in fleet.endpoints.items()
            }

        @api.get("/admin/state", dependencies=admin, summary="What the gateway holds open: for tests and for people who look for leaks")
        def state() -> dict[str, Any]:
            pools = set(fleet.pools.values())  # the ranks behind one URL share theirs
            return {
                "policy": fleet.router.policy.name,
                "sessions": len(fleet.router.sessions),
                "index_blocks": len(fleet.router.index),
                "reservations": sum(worker.in_flight for worker in fleet.router.workers.values()),
                "upstream_active": sum(pool.active_connections for pool in pools),
                "upstream_open": sum(pool.open_connections for pool in pools),
                "known_prefix_bytes": self.inference.reader.kept_bytes,
            }

        @api.get("/admin/policy", dependencies=admin, summary="The routing policy in use")
        def policy() -> dict[str, str]:
            return {"policy": fleet.router.policy.name}

        @api.put("/admin/policy", dependencies=admin, summary="Switch the routing policy; what was learned of caches and sessions is reset")
        def use_policy(body: PolicyBody) -> dict[str, str]:
            fleet.router.use_policy(body.policy)
            return {"policy": fleet.router.policy.name}

        return api

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
