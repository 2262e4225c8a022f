"""One measured or simulated run of one configuration: a line of a results file, and the figures that every chart is drawn from.

A results file is JSON lines, one `Run` a line, appended as runs end, so that a sweep can go on where it was stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import orjson

Scalar = str | int | float | bool | None

_BEGINNING = b'{"id":"'  # of a line


class ResultsError(ValueError):
    """A results file cannot be read; the message names the file and the line."""


@dataclass(slots=True)
class Figures:
    """What a run measured in its window. Seconds and tokens; None where nothing was measured."""

    duration_s: float = 0.0
    requests: int = 0
    errors: int = 0
    sessions: int = 0  # that ended in the window: an agent's whole job
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    hit_bound: float | None = None  # of the same requests in a cache that forgets nothing
    hit_bound_lru: float | None = None  # in one LRU cache as large as the fleet's KV memory
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    itl_p90_s: float | None = None
    itl_p99_s: float | None = None
    e2e_mean_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None
    e2e_p99_s: float | None = None
    user_tokens_per_s: float | None = None  # median over requests of (output - 1) / (E2E - TTFT): what a user sees streaming
    user_tokens_per_s_e2e: float | None = None  # median over requests of output / E2E
    queue_p50_s: float | None = None  # in the engine's queue before the first chunk; simulated runs only
    queue_p90_s: float | None = None
    preemptions: int = 0
    evicted_tokens: int = 0  # of prompts that an infinite cache would have hit and their worker had had but no longer has
    batch: float | None = None  # mean sequences decoding per worker
    kv_use: float | None = None  # mean share of KV blocks held by running requests
    busy: float | None = None  # mean share of time an engine steps
    imbalance: float | None = None  # busiest worker's prefilled tokens over the mean

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True)
class Run:
    """A configuration, the seed it was run with, and its figures.

    `arm` names the configuration: axis -> value. Runs with equal arms are repetitions (seeds) of one point.
    `gpus` and `price_per_hour` are of the whole fleet. `tiers` has the figures of each tier where a run had several.
    """

    arm: dict[str, Scalar]
    seed: int
    figures: Figures
    gpus: int = 1
    price_per_hour: float = 0.0
    kv_capacity_tokens: int = 0  # of the whole fleet
    source: Literal["simulated", "live"] = "simulated"
    trace: str = ""
    tiers: dict[str, Figures] = field(default_factory=dict)
    error: str | None = None  # why there are no figures: the configuration cannot run
    wall_s: float = 0.0  # what the run took here
    setup: str = ""  # fingerprint of all that the arm does not say: base fleet, load, trace

    @property
    def id(self) -> str:
        """Of this configuration with this seed on this trace: what a sweep that goes on has already."""
        return run_id(self.arm, self.seed, self.trace, self.source)

    # Throughput is ambiguous unless the kinds of tokens are kept apart: cached prompt tokens cost nearly nothing.

    @property
    def output_per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self._per_gpu(self.figures.output_tokens)

    @property
    def uncached_per_gpu(self) -> float:
        """Prompt tokens that were computed, per second and GPU."""
        return self._per_gpu(self.figures.uncached_tokens)

    @property
    def total_per_gpu(self) -> float:
        """Prompt (cached ones included) and output tokens per second and GPU."""
        return self._per_gpu(self.figures.prompt_tokens + self.figures.output_tokens)

    @property
    def jobs_per_gpu_hour(self) -> float:
        """Sessions that ended per hour and GPU."""
        return self._per_gpu(self.figures.sessions) * 3600

    @property
    def price_per_million_output(self) -> float | None:
        """Currency units per million output tokens; None without a price or output."""
        return self._price_per_million(self.figures.output_tokens)

    @property
    def price_per_million_total(self) -> float | None:
        """Currency units per million prompt and output tokens."""
        return self._price_per_million(self.figures.prompt_tokens + self.figures.output_tokens)

    def _per_gpu(self, tokens: float) -> float:
        return tokens / self.figures.duration_s / self.gpus if self.figures.duration_s else 0.0

    def _price_per_million(self, tokens: int) -> float | None:
        if not tokens or not self.price_per_hour:
            return None
        return self.price_per_hour * self.figures.duration_s / 3600 / (tokens / 1e6)

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, **asdict(self)}


def run_id(arm: dict[str, Scalar], seed: int, trace: str = "", source: str = "simulated") -> str:
    key = orjson.dumps([arm, seed, trace, source], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(key).hexdigest()[:16]


def append_run(file: Path, run: Run) -> None:
    """Add a run to a results file, as one write of one line. Raises ResultsError."""
    _append(file, orjson.dumps(run.to_json()) + b"\n")


def mend(file: Path) -> None:
    """Make a results file ready to be appended to: it is made where there is none, and a last run that was cut off is taken out.

    Raises ResultsError for a file that cannot be written, or ends in something else than a run.
    """
    _append(file, b"")
    with file.open("r+b") as opened:
        data = opened.read()
        last = data.rfind(b"\n") + 1
        if last == len(data):
            return
        try:
            orjson.loads(data[last:])
        except ValueError:
            if not _BEGINNING.startswith(data[last : last + len(_BEGINNING)]):
                raise ResultsError(f"{file}: ends in something that is no run; write to another file") from None
            opened.truncate(last)
        else:
            opened.write(b"\n")


def _append(file: Path, data: bytes) -> None:
    try:
        with file.open("ab") as out:
            out.write(data)
    except OSError as error:
        raise ResultsError(f"{file}: cannot be written: {error}") from None


def read_runs(file: Path) -> list[Run]:
    """All runs of a results file. A last line that was cut off (the sweep was killed while writing) is left out. Raises ResultsError."""
    return list(_runs(file))


def _runs(file: Path) -> Iterator[Run]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultsError(f"{file}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = orjson.loads(line)
            yield _run(row)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):  # without its line break: cut off
                return
            raise ResultsError(f"{file}:{number}: not a run: {error}") from None


def _run(row: dict[str, Any]) -> Run:
    known = {f.name for f in fields(Run)}
    values = {name: value for name, value in row.items() if name in known}
    values["figures"] = _figures(row["figures"])
    values["tiers"] = {tier: _figures(figures) for tier, figures in row.get("tiers", {}).items()}
    return Run(**values)


def _figures(row: dict[str, Any]) -> Figures:
    known = {f.name for f in fields(Figures)}
    return Figures(**{name: value for name, value in row.items() if name in known})


def write_runs(file: Path, runs: Iterable[Run]) -> None:
    """Write a whole results file."""
    file.write_bytes(b"".join(orjson.dumps(run.to_json()) + b"\n" for run in runs))
