"""What a recommendation is asked for: the traffic, the model, what may be rented, and what each tier wants and pays."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from loadgen.frontier.metrics import METRICS
from loadgen.frontier.objectives import Objective
from loadgen.readers import Gaps, TraceFormat, read_trace
from loadgen.simulate.load import Load
from loadgen.trace import Session, limit_context
from loadgen.yamlfile import read_fields
from routing.policies import POLICIES
from workers.hardware.accelerators import accelerator_named
from workers.hardware.models import model_named
from workers.profile import SpeculationOrMethod, WorkerProfile

TierName = Literal["latency", "standard", "throughput"]  # the gateway's

# A window that is steady and cheap: sessions start mid-way, so that a short warm-up suffices.
LOAD_DEFAULTS: dict[str, Any] = {"duration_s": 300.0, "warmup_s": 120.0, "ramp_s": 60.0, "advance": 1.0, "shuffle": True}
_SET_ELSEWHERE = {"mode": "sessions or rate", "live_sessions": "sessions", "rate": "rate", "tiers": "tiers"}
_LOAD = TypeAdapter(Load)
_LOAD_FIELDS = {field.name for field in dataclasses.fields(Load)} - _SET_ELSEWHERE.keys()


class RequestError(ValueError):
    """A request cannot be used; the message names the file, the field and what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Traffic(_Part):
    """What is asked of the fleet."""

    trace: Path = Field(description="trace to play; relative to the request's file")
    trace_format: TraceFormat = Field("auto", description="format of the trace")
    gaps: Gaps = Field("quantiles", description="gaps of a trace that has none it can be trusted with")
    max_context: int | None = Field(None, ge=1, description="sessions are cut before a step whose prompt and answer exceed this")
    sessions: int | None = Field(None, ge=1, description="sessions that are alive at a time: a closed loop")
    rate: float | None = Field(None, gt=0, description="sessions that start per second: an open loop")
    growth: float = Field(0.0, ge=0, description="share of more traffic that the fleet must bear (0.2: a fifth more)")
    load: dict[str, Any] = Field(default_factory=dict, description="how the trace is played, as of sweeps: duration_s, time_scale ...")

    @field_validator("load")
    @classmethod
    def _known_load(cls, load: dict[str, Any]) -> dict[str, Any]:
        for name in load:
            if name in _SET_ELSEWHERE:
                raise ValueError(f"{name} follows from '{_SET_ELSEWHERE[name]}'; leave it out")
            if name not in _LOAD_FIELDS:
                near = difflib.get_close_matches(name, _LOAD_FIELDS, n=1)
                raise ValueError(f"{name} is unknown" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(_LOAD_FIELDS)}"))
        _LOAD.validate_python(load)
        return load

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        if (self.sessions is None) == (self.rate is None):
            raise ValueError("needs either 'sessions' (alive at a time) or 'rate' (sessions that start per second)")
        return self


class Rentable(_Part):
    """An accelerator that may be used."""

    name: str = Field(description="h100, h200, b200 ...")
    price_per_hour: float | None = Field(None, gt=0, description="per GPU; the built-in price when absent")
    gpus: int | None = Field(None, ge=1, description="that can be had; no limit when absent")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return accelerator_named(name).name

    @property
    def price(self) -> float:
        return self.price_per_hour or accelerator_named(self.name).price_per_hour


class TierWish(_Part):
    """What the sessions of one tier want, and what they pay."""

    share: float = Field(1.0, gt=0, description="weight of this tier's sessions among all")
    slo: dict[str, float] = Field(default_factory=dict, description="objectives by figure: at most for latencies, at least for speeds")
    pays_per_million_output: float | None = Field(
        None, ge=0, description="worth of a million output tokens; the tier is then served only where it is worth its cost"
    )

    @field_validator("slo")
    @classmethod
    def _known_figures(cls, slo: dict[str, float]) -> dict[str, float]:
        for name, bound in slo.items():
            if name not in METRICS:
                near = difflib.get_close_matches(name, METRICS, n=1)
                raise ValueError(
                    f"{name} is no figure; " + (f"did you mean {near[0]!r}?" if near else "e.g. ttft_p90_s, user_tokens_per_s")
                )
            if bound <= 0:
                raise ValueError(f"{name} must be above 0")
        return slo

    @property
    def objectives(self) -> list[Objective]:
        return [Objective(name, ">=" if METRICS[name].higher else "<=", bound) for name, bound in self.slo.items()]


class Budget(_Part):
    """Limits of the whole fleet."""

    price_per_hour: float | None = Field(None, gt=0)
    gpus: int | None = Field(None, ge=1)


def _no_speculation() -> list[SpeculationOrMethod | None]:
    return [None]


class Search(_Part):
    """What is tried. Of the batch limits the first value is tried with every hardware, the others with the best."""

    tp: list[int] = Field(default_factory=lambda: [1, 2, 4, 8], min_length=1)
    attention_dp: list[int] | None = Field(None, min_length=1, description="absent: 1, and also 8 for models of latent attention (MLA)")
    quantization: list[str | None] = Field(
        default_factory=lambda: [None, "fp8"], min_length=1, description="of the weights; null: as the model is published"
    )
    kv_dtype: list[str | None] = Field(default_factory=lambda: [None, "fp8_e4m3"], min_length=1, description="null: bf16")
    speculation: list[SpeculationOrMethod | None] = Field(default_factory=_no_speculation, min_length=1)
    max_num_seqs: list[int] = Field(default_factory=lambda: [64, 16, 256], min_length=1)
    max_num_batched_tokens: list[int] = Field(default_factory=lambda: [8192, 2048], min_length=1)
    long_prefill_token_threshold: list[int] = Field(default_factory=lambda: [0, 1024], min_length=1)
    disaggregated: list[str] = Field(default_factory=lambda: ["1:3", "1:1", "3:1"], description="ratios prefill:decode that are compared")
    shortlist: int = Field(8, ge=1, description="configurations that are simulated, by an estimate the cheapest, for each set of tiers")
    max_workers: int = Field(64, ge=1, description="workers of one pool at most")

    @field_validator("disaggregated")
    @classmethod
    def _ratios(cls, ratios: list[str]) -> list[str]:
        for ratio in ratios:
            parts = ratio.split(":")
            if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
                raise ValueError(f"{ratio!r} is no ratio of prefill to decode workers; write '1:3' (quoted)")
        return ratios


def _one_tier() -> dict[TierName, TierWish]:
    return {"standard": TierWish()}


class Request(_Part):
    """One request for a fleet."""

    traffic: Traffic
    model: str = Field(min_length=1, description="a built-in model, or the name of what `workers` serve")
    accelerators: list[Rentable] = Field(default_factory=list, description="names, or with price_per_hour and gpus")
    workers: dict[str, WorkerProfile] = Field(
        default_factory=dict, description="configurations of your own (calibrated, say), besides or instead of accelerators"
    )
    tiers: dict[TierName, TierWish] = Field(default_factory=_one_tier, min_length=1)
    budget: Budget = Field(default_factory=Budget)
    search: Search = Field(default_factory=Search)
    policy: str = Field("warm", description="routing policy")
    knowledge: Literal["memory", "exact"] = Field(
        "memory", description="how the router knows the caches; exact: by KV events and tokenizer"
    )
    overhead_s: float = Field(0.005, ge=0, description="seconds between a client and its engine: gateway, network, tokenisation")
    seeds: int = Field(5, ge=1, description="simulations of the final fleet, for the spread")

    @field_validator("accelerators", mode="before")
    @classmethod
    def _names_alone(cls, value: object) -> object:
        return [{"name": item} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _something_to_choose(self) -> Self:
        if not self.accelerators and not self.workers:
            raise ValueError("needs 'accelerators' (e.g. [h100, b200]) or 'workers' of your own")
        if self.accelerators:
            model_named(self.model)  # says which are known
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; known: {', '.join(POLICIES)}")
        priced = [bool(profile.price_per_hour) for profile in self.workers.values()] + [True] * len(self.accelerators)
        if any(priced) and not all(priced):
            without = [name for name, profile in self.workers.items() if not profile.price_per_hour]
            raise ValueError(f"workers.{without[0]}: needs a price_per_hour, as others have one")
        if not any(priced) and (
            self.budget.price_per_hour or any(tier.pays_per_million_output is not None for tier in self.tiers.values())
        ):
            raise ValueError("a budget or what a tier pays needs workers with a price_per_hour")
        for name, profile in self.workers.items():
            try:
                profile.latency_model()
            except KeyError as error:
                raise ValueError(f"workers.{name}: {error.args[0]}") from None
        return self

    def read_sessions(self) -> list[Session]:
        """The traffic's trace. Raises TraceError, RequestError."""
        traffic = self.traffic
        sessions = read_trace(traffic.trace, traffic.trace_format, traffic.gaps)
        if traffic.max_context is not None:
            sessions = limit_context(sessions, traffic.max_context)
            if not sessions:
                raise RequestError(f"traffic.max_context: no session has a step within {traffic.max_context:,} tokens")
        return sessions

    def load(self, tiers: tuple[TierName, ...]) -> Load:
        """The load that the sessions of these tiers bring, growth included."""
        share = sum(self.tiers[tier].share for tier in tiers) / sum(tier.share for tier in self.tiers.values())
        scale = share * (1 + self.traffic.growth)
        options = dict(self.traffic.load)
        if "requests" not in options:
            options.setdefault("duration_s", LOAD_DEFAULTS["duration_s"])
        for name in ("warmup_s", "ramp_s", "advance", "shuffle"):
            if not (name == "warmup_s" and "warmup" in options):
                options.setdefault(name, LOAD_DEFAULTS[name])
        if self.traffic.sessions is not None:
            options |= {"mode": "closed", "live_sessions": max(1, round(self.traffic.sessions * scale))}
        else:
            assert self.traffic.rate is not None
            options |= {"mode": "open", "rate": self.traffic.rate * scale}
        return _LOAD.validate_python(options | {"tiers": {tier: self.tiers[tier].share for tier in tiers}})


def load_request(file: Path) -> Request:
    """A request from a YAML file. Raises RequestError."""
    data = read_fields(file, RequestError, "'traffic:', 'model:' and 'accelerators:'")
    traffic = data.get("traffic")
    if isinstance(traffic, dict) and isinstance(traffic.get("trace"), str):
        traffic["trace"] = str(file.parent / Path(traffic["trace"]).expanduser())
    return parse_request(data, str(file))


def parse_request(data: object, where: str) -> Request:
    """A request from plain data; `where` begins the message of a RequestError."""
    try:
        return Request.model_validate(data)
    except ValidationError as error:
        raise RequestError("; ".join(f"{where}: {_describe(fault)}" for fault in error.errors())) from None


def _describe(fault: Any) -> str:
    place = [str(part) for part in fault["loc"] if part not in ("[key]", "LatencyModel", "Speculation", "str")]
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        message = "unknown field"
    if fault["type"] == "literal_error" and "tiers" in place:
        message = f"is no tier of the gateway; its tiers are {', '.join(get_args(TierName))}"
    return f"{'.'.join(place)}: {message}" if place else message
