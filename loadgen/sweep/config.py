"""What sweep.yaml holds: the configuration to start from, what is varied, and what to look for."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from loadgen.frontier.metrics import METRICS, FrontierError
from loadgen.frontier.objectives import parse_objective
from loadgen.readers import Gaps, TraceFormat
from loadgen.results import Scalar
from loadgen.sweep.grid import Axis, Grid
from loadgen.sweep.objective import Goal
from loadgen.yamlfile import read_fields

Kind = Literal["grid", "random", "adaptive"]


class SweepError(ValueError):
    """A sweep cannot be run as asked; the message names the place and what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Range(_Part):
    """Evenly spaced values, or with `log` evenly spaced ratios. Whole numbers where both ends are."""

    start: int | float = Field(alias="from", description="first value")
    end: int | float = Field(alias="to", description="last value")
    steps: int = Field(ge=2, le=1000, description="values, both ends included")
    log: bool = Field(False, description="equal ratios instead of equal differences")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.end <= self.start:
            raise ValueError("'to' must be above 'from'")
        if self.log and self.start <= 0:
            raise ValueError("with 'log' the values must be above 0")
        return self

    def values(self) -> list[Scalar]:
        whole = isinstance(self.start, int) and isinstance(self.end, int)
        found: dict[Scalar, None] = {}
        for step in range(self.steps):
            share = step / (self.steps - 1)
            value = self.start * (self.end / self.start) ** share if self.log else self.start + (self.end - self.start) * share
            found[round(value) if whole else float(f"{value:.6g}")] = None
        return list(found)


def _axis_shape(value: object) -> str:
    if isinstance(value, Range) or (isinstance(value, dict) and value.keys() & {"from", "to", "steps", "log"}):
        return "range"
    return "named" if isinstance(value, dict) else "values"


AxisValues = Annotated[
    Annotated[list[Scalar], Tag("values")] | Annotated[Range, Tag("range")] | Annotated[dict[str, dict[str, Any]], Tag("named")],
    Discriminator(_axis_shape),
]
"""A list of values; a range; or names, each standing for several settings (path -> value)."""


class Search(_Part):
    """Which of the grid's configurations are run."""

    kind: Kind = Field("grid", description="grid: all; random: some; adaptive: near the front and around cliffs")
    budget: int | None = Field(None, ge=1, description="configurations at most; a third of the grid when absent (not with grid: all)")
    seed: int = Field(0, description="of the first or random sample")

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.kind == "grid" and self.budget is not None:
            raise ValueError("a grid runs every configuration; with a budget choose random or adaptive")
        return self


class Front(_Part):
    """The two figures whose front is looked for."""

    x: str = "user_tokens_per_s"
    y: str = "output_per_gpu"

    @field_validator("x", "y")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            raise ValueError(f"unknown figure {name!r}" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(METRICS)}"))
        return name


class Engines(_Part):
    """What a live sweep starts as workers."""

    launch: Path | None = Field(None, description="launch profile (as of `warmroute worker launch`); absent: simulated engines")
    python: Path | None = Field(None, description="interpreter that has the engine; what is on the PATH when absent")
    devices: int | None = Field(
        None, ge=1, description="accelerators of this machine, numbered from 0: every worker gets its own; absent: all see all"
    )
    startup_timeout_s: float = Field(1800.0, gt=0, description="seconds until an engine that is not ready has failed")
    speed: float = Field(1.0, gt=0, description="simulated engines: how many times faster than real")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.launch is None and (self.python is not None or self.devices is not None):
            raise ValueError("'python' and 'devices' are for real engines; name their profile in 'launch'")
        if self.launch is not None and self.speed != 1.0:
            raise ValueError("'speed' is for simulated engines; leave out 'launch'")
        return self


class Sweep(_Part):
    """One sweep. Paths in it are relative to its file."""

    trace: Path = Field(description="trace to play")
    trace_format: TraceFormat = Field("auto", description="format of the trace")
    gaps: Gaps = Field("quantiles", description="gaps of a trace that has none it can be trusted with")
    max_context: int | None = Field(None, ge=1, description="sessions are cut before a step whose prompt and answer exceed this")
    mode: Literal["simulated", "live"] = Field("simulated", description="the fleet simulator, or engines that are started")
    engines: Engines | None = Field(None, description="what a live sweep starts")
    base: Any = Field(default_factory=dict, description="fleet to start from, as of `loadgen simulate --fleet`, or the path of its file")
    gpus: int | None = Field(None, ge=1, description="accelerators of every configuration: `count` becomes as many workers as they make")
    load: dict[str, Any] = Field(default_factory=dict, description="how the trace is played")
    axes: dict[str, AxisValues] = Field(min_length=1, description="what is varied: path -> values")
    exclude: list[dict[str, Scalar]] = Field(default_factory=list, description="combinations that are left out: axis -> value")
    seeds: int | list[int] = Field(1, description="runs of each configuration: how many, or with which seeds")
    search: Search = Field(default_factory=Search, description="grid, random or adaptive")
    objective: Front = Field(default_factory=Front, description="figures whose front is looked for")
    slo: list[str] = Field(default_factory=list, description="conditions within which the front lies, e.g. ttft_p90_s<=5")

    @field_validator("search", mode="before")
    @classmethod
    def _kind_alone(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("axes", mode="after")
    @classmethod
    def _axes_have_values(cls, axes: dict[str, AxisValues]) -> dict[str, AxisValues]:
        for name, values in axes.items():
            if not values:
                raise ValueError(f"{name} has no values")
            if isinstance(values, list) and len(set(map(repr, values))) < len(values):
                raise ValueError(f"{name} has a value twice")
        return axes

    @field_validator("seeds", mode="after")
    @classmethod
    def _some_seeds(cls, seeds: int | list[int]) -> int | list[int]:
        if (isinstance(seeds, int) and seeds < 1) or seeds == [] or (isinstance(seeds, list) and len(set(seeds)) < len(seeds)):
            raise ValueError("must be a number of at least 1, or a list of different seeds")
        return seeds

    @field_validator("slo", mode="after")
    @classmethod
    def _conditions(cls, slo: list[str]) -> list[str]:
        for text in slo:
            try:
                parse_objective(text)
            except FrontierError as error:
                raise ValueError(str(error)) from None
        return slo

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for rule in self.exclude:
            for name, value in rule.items():
                if name not in self.axes:
                    raise ValueError(f"exclude: {name!r} is no axis; the axes are {', '.join(self.axes)}")
                if value not in self.axis(name).values:
                    raise ValueError(f"exclude: the axis {name} has no value {value!r}")
        if self.mode == "simulated" and self.engines is not None:
            raise ValueError("'engines' is for mode: live")
        if not isinstance(self.base, dict):
            raise ValueError("base: must be a fleet's fields, or the path of a file that holds them")
        return self

    def axis(self, name: str) -> Axis:
        values = self.axes[name]
        return Axis.of(name, values.values() if isinstance(values, Range) else list(values))

    def grid(self) -> Grid:
        return Grid([self.axis(name) for name in self.axes], self.exclude)

    def goal(self) -> Goal:
        return Goal(self.objective.x, self.objective.y, tuple(map(parse_objective, self.slo)))

    @property
    def seed_list(self) -> list[int]:
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def settings(self, arm: dict[str, Scalar]) -> dict[str, Any]:
        """Path -> value of a configuration: its axes, with names replaced by what they stand for."""
        found: dict[str, Any] = {}
        for name, value in arm.items():
            values = self.axes[name]
            found |= values[str(value)] if isinstance(values, dict) else {name: value}
        return found


def load_sweep(file: Path) -> Sweep:
    """Read a sweep; its paths become absolute. Raises SweepError."""
    data = read_fields(file, SweepError, "'trace:', 'base:' and 'axes:'")
    base = data.get("base")
    if isinstance(base, str):
        data["base"] = read_fields(_beside(file, base), SweepError, "'pools:' and 'policy:'")
    for place, name in ((data, "trace"), (data.get("engines"), "launch"), (data.get("engines"), "python")):
        if isinstance(place, dict) and isinstance(place.get(name), str):
            place[name] = _beside(file, place[name])
    try:
        return Sweep.model_validate(data)
    except ValidationError as error:
        raise SweepError("\n".join(f"{file}: {_describe(fault)}" for fault in error.errors())) from None


def _beside(file: Path, name: str) -> Path:
    """A path as the file means it. It is not resolved: the interpreter of a virtual environment is a link that must stay one."""
    return Path(os.path.normpath(file.absolute().parent / Path(name).expanduser()))


def _describe(fault: Any) -> str:
    loc = [str(part) for part in fault["loc"] if part not in ("values", "range", "named", "int", "list[int]")]
    if fault["type"] == "extra_forbidden":
        known = [*Sweep.model_fields, *Search.model_fields, *Front.model_fields, *Engines.model_fields]
        near = difflib.get_close_matches(loc[-1], known, n=1)
        return f"{'.'.join(loc)}: unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
    message = fault["msg"].removeprefix("Value error, ")
    if loc[:1] == ["axes"] and "valid string" in message:
        message += "; give a value of several fields a name: {mtp: {profile.speculation: {method: mtp, num_tokens: 3}}}"
    return f"{'.'.join(loc)}: {message}" if loc else message
