"""A recommendation as files: the gateway's configuration, the fleet for simulations, launch profiles, and what to expect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import yaml
from pydantic import ValidationError

from loadgen.recommend.plan import Plan, Pool
from loadgen.recommend.recommend import Recommendation, pool_name
from loadgen.recommend.request import Request, TierName
from loadgen.recommend.search import fleet_of
from loadgen.recommend.table import expected_figures, load_words
from loadgen.recommend.verdict import spread_of
from loadgen.simulate.fleet import FleetSpec, PoolSpec
from workers.engines import engine_command
from workers.engines.command import UnsupportedError
from workers.launchprofile import LaunchProfile
from workers.profile import WorkerProfile

GATEWAY = "gateway.yaml"
FLEET = "fleet.yaml"
EXPECTED = "expected.json"
FIRST_WORKER_PORT = 9101
_QUANTIZED_WHILE_LOADING = ("fp8",)  # what vLLM makes of a bf16 checkpoint by itself


def write(made: Recommendation, directory: Path, port: int = 8000, first_worker_port: int = FIRST_WORKER_PORT) -> list[str]:
    """Write all files; returns notes for the user. Earlier files of these names are replaced. The recommendation must have a plan."""
    assert made.plan is not None and made.fleet is not None
    directory.mkdir(parents=True, exist_ok=True)
    (directory / GATEWAY).write_text(gateway_yaml(made, made.plan, port, first_worker_port), "utf-8")
    head = f"# {load_words(made.load, made.request)}; what was expected of it:\n# {simulate_command(made)}\n"
    (directory / FLEET).write_text(head + fleet_yaml(made.fleet), "utf-8")
    if len(made.plan.pools) > 1:  # a simulation of one tier's sessions finds workers in its pool alone
        for pool, spec in zip(made.plan.pools, made.fleet.pools, strict=True):
            alone = fleet_of(made.request, [spec.model_copy(update={"tiers": []})])
            (directory / f"fleet-{pool_name(pool)}.yaml").write_text(fleet_yaml(alone), "utf-8")
    (directory / EXPECTED).write_bytes(orjson.dumps(expected(made, made.plan), option=orjson.OPT_INDENT_2) + b"\n")
    return list(_write_engines(made.request, made.plan, directory / "engines"))


def simulate_command(made: Recommendation) -> str:
    """The command that simulates the fleet at the load it was sized for."""
    load = made.load
    pace = f"--sessions {load.live_sessions} --ramp {load.ramp_s:g} --advance {load.advance:g}" if load.mode == "closed" else ""
    options = [
        pace or f"--mode open --rate {load.rate:g}",
        f"--duration {load.duration_s:g}" if load.duration_s is not None else "",
        f"--requests {load.requests}" if load.requests is not None else "",
        f"--warmup-time {load.warmup_s:g}" if load.warmup_s else "",
        f"--warmup {load.warmup}" if load.warmup else "",
        f"--time-scale {load.time_scale:g}" if load.time_scale != 1.0 else "",
        "--shuffle" if load.shuffle else "",
    ]
    return " ".join(["loadgen simulate", str(made.request.traffic.trace), "--fleet", FLEET, *filter(None, options)])


def served_name(request: Request, plan: Plan, tier: TierName) -> str:
    """The model name that clients of a tier ask the gateway for."""
    return request.model if len(plan.pools) == 1 else f"{request.model}-{tier}"


def pool_model(request: Request, plan: Plan, pool: Pool) -> str:
    """The model name that a pool's workers serve."""
    return served_name(request, plan, pool.tiers[0])


# --- gateway.yaml ---


def gateway_yaml(made: Recommendation, plan: Plan, port: int, first_worker_port: int) -> str:
    """A configuration that `warmroute check-config` accepts. Workers are on this machine, for `warmroute worker sim --like`."""
    request = made.request
    lines = [
        f"# Recommended for {load_words(made.load, request)}. Try it without a GPU:",
        f"#   warmroute worker sim --like {GATEWAY}",
        f"#   warmroute serve --config {GATEWAY}",
        "# In production put your engines' addresses into the urls; engines/ has profiles to launch them with.",
    ]
    models: list[dict[str, Any]] = []
    if len(plan.pools) > 1:
        lines += [
            "# Pools are told apart by the model name: clients of a tier ask for its name (below), and the pool serves no other. The tier",
            "# that a request names besides (service_tier) only labels it: one pool does not help another out.",
        ]
        for pool in plan.pools:
            name, *aliases = [served_name(request, plan, tier) for tier in pool.tiers]
            models.append({"name": name, "aliases": aliases})
    data: dict[str, Any] = {"listen": {"host": "127.0.0.1", "port": port}}
    if models:
        data["models"] = models
    text = "\n".join(lines) + "\n" + _dump(data) + "workers:\n"
    number = first_worker_port
    for pool in plan.pools:
        trial = pool.trial
        text += f"  # {trial.count} x {trial.candidate.name} for {' and '.join(pool.tiers)}\n"
        fields = _served_fields(trial.candidate.profile, pool_model(request, plan, pool))
        for place in range(trial.count):
            worker = {"url": f"http://127.0.0.1:{number}", "name": f"{pool_name(pool)}-{place}", **fields}
            text += _dump([worker], indent=2)
            number += 1
    rest: dict[str, Any] = {"policy": request.policy}
    tiers = {tier: wish for tier in plan.tiers if (wish := _tier_objectives(request, tier))}
    if tiers:
        rest["tiers"] = tiers
    return text + _dump(rest)


def _served_fields(profile: WorkerProfile, served: str) -> dict[str, Any]:
    """A worker's fields under the name it serves; latency auto follows from that name, or the coefficients are written out."""
    fields = profile_fields(profile) | {"model": served}
    try:
        same = WorkerProfile.model_validate(fields).latency_model() == profile.latency_model()
    except KeyError:
        same = False
    return fields if same else fields | {"latency": profile.latency_model().model_dump(mode="json")}


def _tier_objectives(request: Request, tier: TierName) -> dict[str, float]:
    slo = request.tiers[tier].slo
    ttft = [slo[key] for key in ("ttft_p90_s", "ttft_p99_s", "ttft_p50_s") if key in slo]
    found = {"ttft_s": ttft[0]} if ttft else {}
    return found | ({"tokens_per_s": slo["user_tokens_per_s"]} if "user_tokens_per_s" in slo else {})


def profile_fields(profile: WorkerProfile) -> dict[str, Any]:
    """What a profile says beyond the defaults, as YAML has it."""
    fields: dict[str, Any] = profile.model_dump(mode="json", exclude_defaults=True)
    if isinstance(fields.get("latency"), dict):
        fields["latency"] = profile.latency_model().model_dump(mode="json")
    return {key: value for key, value in fields.items() if value is not None}


# --- fleet.yaml ---


def fleet_yaml(fleet: FleetSpec) -> str:
    """As `loadgen simulate --fleet` reads it."""
    pools = [_pool_fields(pool) for pool in fleet.pools]
    top = fleet.model_dump(mode="json", exclude_defaults=True, exclude={"pools"})
    return _dump({"policy": fleet.policy, **top, "pools": pools})


def _pool_fields(pool: PoolSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": pool.name, "count": pool.count}
    if pool.tiers:
        fields["tiers"] = pool.tiers
    return fields | {"profile": profile_fields(pool.profile)}


# --- engines/ ---


def _write_engines(request: Request, plan: Plan, directory: Path) -> Iterator[str]:
    directory.mkdir(exist_ok=True)
    for pool in plan.pools:
        file = directory / f"{pool_name(pool)}.yaml"
        fields = launch_fields(pool.trial.candidate.profile, request.model, pool_model(request, plan, pool))
        try:
            engine_command(LaunchProfile.model_validate(fields))
        except (ValidationError, UnsupportedError) as error:
            file.unlink(missing_ok=True)
            why = "; ".join(fault["msg"] for fault in error.errors()) if isinstance(error, ValidationError) else "; ".join(error.problems)
            yield f"no launch profile for pool {pool_name(pool)}: {why.removeprefix('Value error, ')}"
            continue
        head = [
            f"# One worker of pool {pool_name(pool)}; {pool.trial.count} of them are wanted. Name the checkpoint to load in `model`.",
            f"#   warmroute worker launch {directory.name}/{file.name} --print",
        ]
        file.write_text("\n".join(head) + "\n" + _dump(fields), "utf-8")


def launch_fields(profile: WorkerProfile, model: str, served: str) -> dict[str, Any]:
    """A launch profile's fields. The engine measures its KV cache itself; its batch limits are per data-parallel rank."""
    fields = profile_fields(profile)
    for name in ("kv_capacity_tokens", "latency", "gpus", "restore_host_s", "restore_disk_s", "kernel_factor"):
        fields.pop(name, None)
    ranks = profile.attention_dp
    fields |= {
        "engine": "vllm", "model": model, "served_model_name": served, "host": "0.0.0.0", "prefix_caching": True,
        "max_num_seqs": max(1, profile.max_num_seqs // ranks),
        "max_num_batched_tokens": max(profile.max_num_seqs // ranks, profile.max_num_batched_tokens // ranks),
        "kv_events": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"},
    }  # fmt: skip
    if not fields.get("long_prefill_token_threshold"):
        fields.pop("long_prefill_token_threshold", None)
    if profile.quantization in _QUANTIZED_WHILE_LOADING:
        fields["quantization_source"] = "load"
    return fields


# --- expected.json ---


def expected(made: Recommendation, plan: Plan) -> dict[str, Any]:
    """The whole recommendation as plain data. Figures are [median, lowest, highest] over the seeds."""
    request = made.request
    per_million = spread_of(made.runs, "price_per_million_output")
    return {
        "load": asdict(made.load),
        "policy": request.policy,
        "price_per_hour": plan.cost,
        "gpus": plan.gpus,
        "value_per_hour": made.value,
        "seeds": len(made.runs),
        "pools": [
            {
                "tiers": list(pool.tiers), "model": pool_model(request, plan, pool), "workers": pool.trial.count, "gpus": pool.trial.gpus,
                "configuration": pool.trial.candidate.name, "limits": pool.trial.candidate.limits, "price_per_hour": pool.trial.cost,
            }
            for pool in plan.pools
        ],
        "figures": expected_figures(made.runs),
        "price_per_million_output": list(per_million) if per_million is not None else None,
        "tiers": {tier: expected_figures(made.runs, tier) for tier in plan.tiers},
        "objectives": [_plain(asdict(verdict)) | {"kept": verdict.kept} for verdict in made.verdicts],
        "neighbours": [
            {"pool": n.pool, "change": n.change, "price_per_hour": n.cost, "objectives": [_plain(asdict(v)) for v in n.verdicts]}
            for n in made.neighbours
        ],
    }  # fmt: skip


def _plain(verdict: dict[str, Any]) -> dict[str, Any]:
    return verdict | {"ratio": None if verdict["ratio"] == float("inf") else verdict["ratio"]}


def _dump(data: Any, indent: int = 0) -> str:
    text = yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)
    return "".join(" " * indent + line for line in text.splitlines(keepends=True))
