"""Runs of a sweep on engines that are started here: real ones through `warmroute worker launch`, or simulated ones in real time.

For each configuration the workers start, then a gateway with the policy in front of them; when all are ready the trace is played, once
for each seed, and only what comes after the warm-up counts. Then everything ends, and the next configuration starts.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import yaml
from pydantic import ValidationError

from loadgen.local import Program, StartError
from loadgen.replay import ReplayError, ReplayOptions, replay
from loadgen.results import Run, Scalar
from loadgen.sweep.config import Engines, Sweep, SweepError
from loadgen.sweep.configuration import LOAD_DEFAULTS, CannotRun, draft
from loadgen.sweep.evaluate import Task, cannot_run, read_sessions
from loadgen.sweep.processes import Outcome
from workers.launchprofile import LaunchProfile, ProfileError, load_launch_profile
from workers.profile import WorkerProfile

_LOAD_FIELDS = frozenset(
    ("mode", "live_sessions", "requests", "duration_s", "warmup", "warmup_s", "time_scale", "max_gap_s", "ramp_s", "rate", "speedup")
) & {field.name for field in fields(ReplayOptions)}
# What the gateway is told of a launched worker; it asks the engine for the rest.
_TOLD = (
    "accelerator", "gpus", "tp", "pp", "ep", "attention_dp", "quantization", "kv_dtype", "max_num_seqs", "max_num_batched_tokens",
    "latency", "price_per_hour",
)  # fmt: skip
_DEVICES = "CUDA_VISIBLE_DEVICES"  # vLLM, SGLang and TensorRT-LLM take it, on AMD too
_READY_S = 60.0
_PORTS = range(20_000, 32_000)  # below those that systems hand out by themselves


@dataclass(frozen=True, slots=True)
class LiveConfiguration:
    """What is started: `count` workers of `profile`, and how the trace is played."""

    count: int
    profile: WorkerProfile
    settings: dict[str, Any]  # of the profile, by path
    policy: str
    load: dict[str, Any]

    @property
    def gpus(self) -> int:
        return self.count * (self.profile.accelerators if isinstance(self.profile, LaunchProfile) else self.profile.gpu_count)


def live_configuration(sweep: Sweep, arm: dict[str, Scalar]) -> LiveConfiguration:
    """Raises SweepError for what a live sweep cannot mean, CannotRun for a combination that no engine takes."""
    made = draft(sweep, sweep.settings(arm))
    fleet, engines = made.fleet, sweep.engines or Engines()
    unknown = sorted((set(fleet) - {"pools", "policy"}) | (set(made.load) - _LOAD_FIELDS) | ({"pd"} if made.pd else set()))
    if unknown:
        raise SweepError(
            f"{', '.join(unknown)}: not for mode: live; its fleet has one pool and a policy, its load {', '.join(sorted(_LOAD_FIELDS))}"
        )
    if len(made.pools) != 1 or set(made.pools[0]) - {"count", "profile"}:
        raise SweepError("base.pools: a live sweep has one pool, with 'count' and 'profile'")
    settings = dict(_flat(made.pools[0].get("profile", {})))
    found = LiveConfiguration(made.pools[0].get("count", 1), _profile(engines, settings), settings, fleet.get("policy", "warm"), made.load)
    if made.gpus is not None:
        each = found.gpus // found.count
        if made.gpus % each:
            raise CannotRun(f"{made.gpus} GPUs do not divide into workers of {each}")
        found = replace(found, count=made.gpus // each)
    if engines.devices is not None and found.gpus > engines.devices:
        raise CannotRun(f"{found.count} workers need {found.gpus} accelerators, and this machine has {engines.devices} (engines.devices)")
    if made.per_gpu is not None:
        found.load["live_sessions"] = max(1, round(made.per_gpu * found.gpus))
    return found


def _profile(engines: Engines, settings: dict[str, Any]) -> WorkerProfile:
    if engines.launch is None:
        try:
            profile = WorkerProfile.model_validate({"engine": "sim", **settings})
            profile.latency_model()
        except ValidationError as error:
            raise SweepError("; ".join(f"profile.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())) from None
        except KeyError as error:
            raise SweepError(str(error.args[0])) from None
        return profile
    try:
        return load_launch_profile(engines.launch, _as_options(settings))
    except ProfileError as error:
        raise (SweepError if "unknown key" in str(error) else CannotRun)(str(error)) from None


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _as_options(settings: dict[str, Any]) -> tuple[str, ...]:
    """KEY=VALUE as `--set` takes them: values are YAML."""
    return tuple(
        f"{name}={yaml.safe_dump(value, default_flow_style=True, width=10_000).split(chr(10))[0]}" for name, value in settings.items()
    )


def window_s(sweep: Sweep) -> float | None:
    """Seconds that a run's load takes; None where it is bounded by requests."""
    load = {**LOAD_DEFAULTS, **sweep.load}
    return None if "requests" in sweep.load else float(load["duration_s"] + load["warmup_s"])


class LiveRuns:
    """Runs tasks one after the other; consecutive ones of one configuration share their engines."""

    def __init__(self, sweep: Sweep, say: Callable[[str], None]) -> None:
        self._sweep = sweep
        self._say = say
        self._sessions = read_sessions(sweep)

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        for _, group in groupby(tasks, key=lambda task: sorted(task.arm.items(), key=str)):
            together = list(group)
            try:
                made = live_configuration(self._sweep, together[0].arm)
                with _Fleet(self._sweep, made, self._say) as fleet:
                    for task in together:
                        yield self._play(task, made, fleet)
            except (CannotRun, StartError) as error:
                self._say(str(error))
                yield from (Outcome(task, cannot_run(self._sweep, task, str(error))) for task in together)

    def close(self) -> None:
        """Closing the iterator has stopped what it had started."""

    def _play(self, task: Task, made: LiveConfiguration, fleet: _Fleet) -> Outcome:
        started = perf_counter()
        options = ReplayOptions(
            self._sessions, fleet.url, kv_capacity_tokens=made.count * made.profile.kv_capacity_tokens, seed=task.seed, **made.load
        )
        try:
            result = asyncio.run(replay(options)).runs.popitem()[1]
        except ReplayError as error:
            return Outcome(task, None, f"{error}; {fleet.last_words()}")
        if not result.requests or result.errors == result.requests:
            kinds = ", ".join(result.error_kinds) or "no request was answered in the window"
            return Outcome(task, None, f"{kinds}; {fleet.last_words()}")
        return Outcome(
            task,
            Run(
                task.arm, task.seed, result.figures(), made.gpus, made.count * made.profile.price_per_hour,
                made.count * made.profile.kv_capacity_tokens, "live", self._sweep.trace.name,
                wall_s=round(perf_counter() - started, 3), setup=task.setup,
            ),
        )  # fmt: skip


class _Fleet:
    """A configuration's programs. On entry everything is ready, on exit everything has ended. Raises StartError on entry."""

    def __init__(self, sweep: Sweep, made: LiveConfiguration, say: Callable[[str], None]) -> None:
        self._engines = sweep.engines or Engines()
        self._made = made
        self._say = say
        self._programs: list[Program] = []
        self.url = ""

    def __enter__(self) -> _Fleet:
        self._stack = ExitStack()
        self._scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-sweep-")))
        try:
            started = perf_counter()
            urls = self._start_simulated() if self._engines.launch is None else self._start_launched()
            self._start_gateway(urls)
            self._say(f"{len(urls)} workers ready after {perf_counter() - started:.0f} s")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def last_words(self) -> str:
        """The end of the programs' output, for an error."""
        return "\n".join(f"{program.name}: {program.tail(3)}" for program in self._programs)

    def _start_simulated(self) -> list[str]:
        profile = [word for option in _as_options(self._made.settings) for word in ("--profile", option)]
        command = ["worker", "sim", "--port", "0", "--count", str(self._made.count), "--speed", str(self._engines.speed), *profile]
        return self._program("workers", command).wait_for(r"simulated \S+ on (http://\S+)", self._made.count)

    def _start_launched(self) -> list[str]:
        profile, engines = self._made.profile, self._engines
        assert isinstance(profile, LaunchProfile) and engines.launch is not None
        base = ["worker", "launch", str(engines.launch), "--max-failures", "1", "--startup-timeout", str(engines.startup_timeout_s)]
        if engines.python is not None:
            base += ["--python", str(engines.python)]
        started = []
        for number in range(self._made.count):
            settings = {**self._made.settings, "port": _free_ports(1)}
            if profile.kv_events is not None:
                settings["kv_events.endpoint"] = f"tcp://*:{_free_ports(profile.ranks)}"
                settings["kv_events.replay_endpoint"] = f"tcp://127.0.0.1:{_free_ports(profile.ranks)}"
                settings["kv_events.topic"] = "kv"
            if engines.devices is not None:
                first = number * profile.accelerators
                settings[f"env.{_DEVICES}"] = ",".join(map(str, range(first, first + profile.accelerators)))
            options = [word for option in _as_options(settings) for word in ("--set", option)]
            started.append(self._program(f"worker {number}", [*base, *options]))
        ready = [program.wait_for(r"ready after .* at (http://\S+)", timeout_s=engines.startup_timeout_s + _READY_S) for program in started]
        return [urls[0] for urls in ready]

    def _start_gateway(self, urls: list[str]) -> None:
        profile = self._made.profile
        told = profile.model_dump(mode="json", include=set(_TOLD) & profile.model_fields_set) if self._engines.launch else {}
        config = self._scratch / "gateway.yaml"
        config.write_text(yaml.safe_dump({"policy": self._made.policy, "workers": [{"url": url, **told} for url in urls]}), "utf-8")
        gateway = self._program("gateway", ["serve", "--config", str(config), "--port", "0"])
        (self.url,) = gateway.wait_for(r"listening on (http://\S+)")
        ready = httpx.get(f"{self.url}/ready", trust_env=False)
        if ready.status_code != 200 or not all(ready.json()["workers"].values()):
            raise StartError(f"the gateway does not reach every worker: {ready.text}")

    def _program(self, name: str, command: list[str]) -> Program:
        program = Program(name, [sys.executable, "-m", "gateway.cli", *command], self._scratch / f"{name.replace(' ', '-')}.log")
        self._stack.callback(program.stop)
        self._programs.append(program)
        return program


def _free_ports(count: int) -> int:
    """The first of `count` consecutive ports that nobody listens on."""
    for _ in range(200):
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise StartError(f"found no {count} free ports in a row between {_PORTS.start} and {_PORTS.stop}")
