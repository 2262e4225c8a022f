"""From a configuration's settings to the fleet and the load that they mean.

Settings are paths: `profile.tp` and `preset.model` (of every pool), `count` (of the only pool), `pools.0.profile.tp`, `load.live_sessions`,
`load.live_sessions_per_gpu`, `gpus`, `pd` (prefill:decode, e.g. 1:3; 0:1 is no disaggregation), `tier`, or a field of the fleet (`policy`,
`knowledge` ...). A pool with `preset: {model: ..., accelerator: ...}` has the KV capacity, latency and price that follow from
these and from the settings of its profile, such as `profile.tp`.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.load import Load
from loadgen.sweep.config import Sweep, SweepError
from workers.hardware.preset import preset as make_preset

# A window that is steady and cheap: sessions start mid-way, so that a short warm-up suffices.
LOAD_DEFAULTS: dict[str, Any] = {"duration_s": 300.0, "warmup_s": 120.0, "ramp_s": 60.0, "advance": 1.0}
_LOAD_FIELDS = {field.name for field in fields(Load)}
_LOAD = TypeAdapter(Load)
_FLEET_PATHS = frozenset(FleetSpec.model_fields) - {"pools"}
_RATIO = re.compile(r"(\d+):(\d+)")


class CannotRun(ValueError):
    """A configuration that no fleet can have (it does not fit memory, or the GPUs do not divide); the message says why."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is run: a fleet under a load."""

    fleet: FleetSpec
    load: Load


@dataclass(slots=True)
class Draft:
    """A configuration as plain data, settings applied, before it is checked. `pools` have what `FleetSpec` takes, and `preset`."""

    fleet: dict[str, Any]
    load: dict[str, Any]
    gpus: int | None = None
    pd: str | None = None
    per_gpu: float | None = None

    @property
    def pools(self) -> list[dict[str, Any]]:
        pools: list[dict[str, Any]] = self.fleet["pools"]
        return pools


def draft(sweep: Sweep, settings: Mapping[str, Any]) -> Draft:
    """Apply settings to the sweep's base. Raises SweepError for a path that leads nowhere."""
    fleet = copy.deepcopy(sweep.base)
    fleet.setdefault("pools", [{}])
    made = Draft(fleet, copy.deepcopy(sweep.load), sweep.gpus)
    if "live_sessions_per_gpu" in made.load:
        made.per_gpu = made.load.pop("live_sessions_per_gpu")
    if not isinstance(made.pools, list) or not all(isinstance(pool, dict) for pool in made.pools):
        raise SweepError("base.pools: must be a list of pools, e.g. [{count: 4, profile: {tp: 2}}]")
    for path, value in settings.items():
        _apply(made, path, value)
    for name in made.load:
        if name not in _LOAD_FIELDS:
            raise SweepError(f"load.{name}: unknown field{_near(name, [*_LOAD_FIELDS, 'live_sessions_per_gpu'])}")
    if "requests" not in made.load:
        made.load.setdefault("duration_s", LOAD_DEFAULTS["duration_s"])
    if "warmup" not in made.load:
        made.load.setdefault("warmup_s", LOAD_DEFAULTS["warmup_s"])
    made.load.setdefault("ramp_s", LOAD_DEFAULTS["ramp_s"])
    if sweep.mode == "simulated":  # sessions in the middle of which a live engine begins would be cold at once
        made.load.setdefault("advance", LOAD_DEFAULTS["advance"])
    return made


def _apply(made: Draft, path: str, value: Any) -> None:
    head, _, rest = path.partition(".")
    if path == "load.live_sessions_per_gpu":
        made.per_gpu = value
    elif head == "load" and rest:
        made.load[rest] = value
        if rest == "live_sessions":
            made.per_gpu = None
    elif path == "gpus":
        made.gpus = value
    elif path == "pd":
        made.pd = str(value)
    elif path == "tier":
        made.load["tiers"] = {str(value): 1.0}
    elif head in ("profile", "preset") and rest:
        for pool in made.pools:
            _set(pool, path, value)
    elif path == "count":
        if len(made.pools) > 1:
            raise SweepError("count: the fleet has several pools; say which, e.g. pools.0.count")
        made.pools[0]["count"] = value
    elif head == "pools" and rest:
        number, _, inner = rest.partition(".")
        if not number.isdigit() or int(number) >= len(made.pools) or not inner:
            raise SweepError(f"{path}: must be pools.NUMBER.FIELD; the base has {len(made.pools)} pools, the first is 0")
        _set(made.pools[int(number)], inner, value)
    elif path in _FLEET_PATHS:
        made.fleet[path] = value
    else:
        known = [*_FLEET_PATHS, "profile.", "preset.", "load.", "count", "gpus", "pd", "tier", "pools."]
        raise SweepError(f"{path}: leads nowhere{_near(path, known)}; write e.g. profile.tp, load.live_sessions, policy or count")


def _set(node: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    if value is None:
        node.pop(last, None)
    else:
        node[last] = value


def configuration(sweep: Sweep, settings: Mapping[str, Any]) -> Configuration:
    """The fleet and load of a configuration. Raises SweepError for settings that nobody could mean, CannotRun for those that do not fit."""
    made = draft(sweep, settings)
    for number, pool in enumerate(made.pools):
        if "preset" in pool:
            pool["profile"] = _from_preset(pool.pop("preset"), pool.get("profile", {}), f"pools.{number}")
    fleet = _fleet(made.fleet)
    if made.gpus is not None:
        made.pools[0]["count"] = _workers_of(made.gpus, fleet)
        fleet = _fleet(made.fleet)
    if made.pd is not None:
        made.fleet["pools"] = _split(made.pd, made.pools, fleet)
        fleet = _fleet(made.fleet)
    for made_pool in fleet.pools:
        try:
            made_pool.profile.latency_model()
        except KeyError as error:  # a model, accelerator or set that is not known
            raise SweepError(str(error.args[0])) from None
        except ValueError as error:
            raise CannotRun(str(error)) from None
    if made.per_gpu is not None:
        if not isinstance(made.per_gpu, int | float) or made.per_gpu <= 0:
            raise SweepError(f"load.live_sessions_per_gpu: must be a number above 0, found {made.per_gpu!r}")
        made.load["live_sessions"] = max(1, round(made.per_gpu * fleet.gpus))
    try:
        return Configuration(fleet, _LOAD.validate_python(made.load))
    except ValidationError as error:
        faults = [(".".join(map(str, ("load", *fault["loc"]))), fault["msg"].removeprefix("Value error, ")) for fault in error.errors()]
        raise SweepError("; ".join(f"{place}: {why}" for place, why in faults)) from None


def _fleet(data: dict[str, Any]) -> FleetSpec:
    try:
        return FleetSpec.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        text = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'fleet'}: {fault['msg'].removeprefix('Value error, ')}" for fault in faults)
        # what pydantic refuses by type or name is a mistake; what a validator refuses may be one combination of many
        if all(fault["type"] == "value_error" for fault in faults) and not any("unknown" in fault["msg"] for fault in faults):
            raise CannotRun(text) from None
        raise SweepError(text) from None


def _from_preset(preset: Any, profile: Any, where: str) -> dict[str, Any]:
    """The fields of `preset` and `profile` together, as a profile whose KV capacity, latency and price follow from them."""
    if not isinstance(preset, dict) or not isinstance(profile, dict):
        raise SweepError(f"{where}.preset: must have fields, e.g. {{model: qwen3-32b, accelerator: h100, tp: 2}}")
    values = {**preset, **profile}
    if missing := [name for name in ("model", "accelerator") if name not in values]:
        raise SweepError(f"{where}.preset: needs {' and '.join(missing)}")
    try:
        made = make_preset(**values)
    except ValidationError as error:
        faults = error.errors()
        text = "; ".join(f"{where}.preset.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
        raise (CannotRun if all(fault["type"] == "value_error" for fault in faults) else SweepError)(text) from None
    except ValueError as error:
        raise (SweepError if "; known: " in str(error) else CannotRun)(f"{where}.preset: {error}") from None
    return made.model_dump(exclude_unset=True)


def _workers_of(gpus: int, fleet: FleetSpec) -> int:
    if len(fleet.pools) > 1:
        raise SweepError("gpus: the fleet has several pools; set their counts instead")
    each = fleet.pools[0].profile.gpu_count
    if gpus % each:
        raise CannotRun(f"{gpus} GPUs do not divide into workers of {each}")
    return gpus // each


def _split(ratio: str, pools: list[dict[str, Any]], fleet: FleetSpec) -> list[dict[str, Any]]:
    """One pool's workers as prefill and decode workers."""
    match = _RATIO.fullmatch(ratio)
    if match is None or int(match[2]) == 0:
        raise SweepError(
            f"pd: {ratio!r} is no ratio of prefill to decode workers; write '1:3' in quotes, or '0:1' for workers that do both"
        )
    if len(fleet.pools) > 1:
        raise SweepError("pd: splits one pool, and the fleet has several")
    prefill, decode = int(match[1]), int(match[2])
    if not prefill:
        return pools
    count = fleet.pools[0].count
    if count % (prefill + decode):
        raise CannotRun(f"{count} workers do not divide {ratio} into prefill and decode workers")
    share = count // (prefill + decode)
    made = []
    for role, workers in (("prefill", prefill * share), ("decode", decode * share)):
        pool = copy.deepcopy(pools[0])
        pool |= {"count": workers, "name": f"{pool.get('name', '')}{role}"}
        pool["profile"] = {**pool.get("profile", {}), "role": role}
        made.append(pool)
    return made


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
