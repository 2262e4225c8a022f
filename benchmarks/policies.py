"""All routing policies side by side, in the fleet simulator: every workload at hand on equal and mixed fleets, below, near and above
KV capacity, several seeds. Tells where `warm` is best, within noise of the best other policy, or worse, and by how much.

A seed decides the load (order of sessions, arrivals, window of a trace) and is the same for every policy, so that policies are compared
in pairs. Recorded traces are read from ../shared/traces beside the repository; cells whose trace is absent are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from policy_cells import FLEETS, PRESSURES, WORKLOADS, Cell, cell_named, cells

from loadgen.simulate import simulate
from routing.policies import POLICIES, Policy, new_policy
from routing.policies.ablation import TERMS, ablated

VERDICT_METRICS = ("ttft_p90_s", "ttft_p99_s", "e2e_p90_s")
SINGLE_SEED_NOISE = 0.05  # without repetitions, this much counts as noise
WITHOUT = "without "


@dataclass(slots=True)
class Row:
    """One policy on one cell with one seed. Seconds, shares."""

    cell: str
    policy: str
    seed: int
    hit: float
    bound: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p90_s: float
    e2e_p99_s: float
    imbalance: float  # busiest worker's prefilled tokens over the mean
    goodput: float  # share of requests within the TTFT and ITL objectives
    lost: float  # share of prompt tokens that had been cached where they went and were evicted
    busy: float  # share of time engines step
    per_s: float  # requests that ended per second
    errors: int
    wall_s: float


SHOWN = (
    ("hit", "hit", "{:.3f}"), ("bound", "bound", "{:.3f}"), ("lost", "lost", "{:.3f}"),
    ("ttft_p50_s", "TTFT p50", "{:.2f}"), ("ttft_p90_s", "p90", "{:.2f}"), ("ttft_p99_s", "p99", "{:.2f}"),
    ("e2e_p50_s", "E2E p50", "{:.2f}"), ("e2e_p90_s", "p90", "{:.2f}"), ("e2e_p99_s", "p99", "{:.2f}"),
    ("imbalance", "imbal", "{:.2f}"), ("goodput", "goodput", "{:.3f}"), ("busy", "busy", "{:.2f}"), ("per_s", "req/s", "{:.2f}"),
)  # fmt: skip


def policy_named(name: str, seed: int) -> Policy:
    return ablated(name.removeprefix(WITHOUT)) if name.startswith(WITHOUT) else new_policy(name, seed)


def run(job: tuple[str, str, int]) -> Row:
    name, policy, seed = job
    cell = cell_named(name)
    workload = cell.workload
    result = simulate(workload.sessions(seed), cell.fleet_spec(), workload.load, seed, policy=policy_named(policy, seed))
    figures = result.figures
    good = sum(
        1 for turn in result.turns
        if turn.ended_at is not None and turn.ttft_s <= workload.ttft_slo_s
        and (turn.e2e_s - turn.ttft_s) <= workload.itl_slo_s * max(1, turn.output_tokens - 1)
    )  # fmt: skip
    return Row(
        cell.name, policy, seed, figures.hit_rate or 0.0, figures.hit_bound or 0.0,
        figures.ttft_p50_s or 0.0, figures.ttft_p90_s or 0.0, figures.ttft_p99_s or 0.0,
        figures.e2e_p50_s or 0.0, figures.e2e_p90_s or 0.0, figures.e2e_p99_s or 0.0,
        figures.imbalance or 1.0, good / max(1, len(result.turns)), figures.evicted_tokens / max(1, figures.prompt_tokens),
        figures.busy or 0.0, figures.requests / figures.duration_s, figures.errors, result.wall_s,
    )  # fmt: skip


@dataclass(slots=True)
class Verdict:
    """A policy against another by one metric: ratio of geometric means over the seeds, with its 95 % interval from the paired logs."""

    ratio: float
    low: float
    high: float

    @property
    def word(self) -> str:
        if self.high < 1.0:
            return "best"
        return "worse" if self.low > 1.0 else "noise"

    def __str__(self) -> str:
        return f"{self.word} {self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def compare(ours: list[float], theirs: list[float]) -> Verdict:
    """Smaller is better; the lists are paired by seed."""
    logs = [math.log(max(a, 1e-9) / max(b, 1e-9)) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    spread = _T95[min(len(logs) - 1, len(_T95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else SINGLE_SEED_NOISE
    return Verdict(math.exp(mean), math.exp(mean - spread), math.exp(mean + spread))


# Student's t, two-sided 95 %, by degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Results:
    """Rows by cell and policy, ordered by seed."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows: dict[tuple[str, str], list[Row]] = {}
        for row in sorted(rows, key=lambda row: row.seed):
            self.rows.setdefault((row.cell, row.policy), []).append(row)

    def values(self, cell: str, policy: str, metric: str) -> list[float]:
        return [getattr(row, metric) for row in self.rows[cell, policy]]

    def rivals(self, cell: str) -> list[str]:
        return [policy for c, policy in self.rows if c == cell and policy != "warm" and not policy.startswith(WITHOUT)]

    def best_rival(self, cell: str, metric: str) -> str:
        """The policy other than warm with the smallest geometric mean."""
        return min(self.rivals(cell), key=lambda p: statistics.fmean(math.log(max(v, 1e-9)) for v in self.values(cell, p, metric)))

    def verdict(self, cell: str, metric: str, against: str | None = None) -> Verdict:
        other = against or self.best_rival(cell, metric)
        return compare(self.values(cell, "warm", metric), self.values(cell, other, metric))


def cell_table(results: Results, cell: str, policies: list[str]) -> Iterator[str]:
    yield f"\n{cell}"
    yield f"  {'policy':22}" + "".join(f"{title:>9}" for _, title, _ in SHOWN)
    shown = [p for p in policies if (cell, p) in results.rows]
    for policy in sorted(shown, key=lambda p: statistics.fmean(results.values(cell, p, "ttft_p90_s"))):
        means = [form.format(statistics.fmean(results.values(cell, policy, name))) for name, _, form in SHOWN]
        errors = sum(row.errors for row in results.rows[cell, policy])
        yield f"  {policy:22}" + "".join(f"{value:>9}" for value in means) + (f"   {errors} errors" if errors else "")


def verdict_table(results: Results, names: list[str]) -> Iterator[str]:
    yield "\nwarm against the best other policy: ratio [95 % interval], below 1 is better"
    yield f"  {'cell':28}" + "".join(f"{metric:>46}" for metric in VERDICT_METRICS)
    counts = dict.fromkeys(("best", "noise", "worse"), 0)
    for cell in names:
        line = f"  {cell:28}"
        for metric in VERDICT_METRICS:
            verdict = results.verdict(cell, metric)
            counts[verdict.word] += 1
            line += f"{f'{verdict}  {results.best_rival(cell, metric)}':>46}"
        yield line
    yield "  " + ", ".join(f"{word}: {count}" for word, count in counts.items())


def ablation_table(results: Results, names: list[str], terms: list[str]) -> Iterator[str]:
    yield "\nwhat each term is worth: metric without it over metric with it (geometric mean over cells and seeds); above 1 the term helps"
    yield f"  {'without':14}" + "".join(f"{metric:>14}" for metric in VERDICT_METRICS) + f"{'cells it hurts / helps (p90 TTFT)':>40}"
    for term in terms:
        line, helped, hurt = f"  {term:14}", [], []
        for metric in VERDICT_METRICS:
            verdicts = [results.verdict(cell, metric, WITHOUT + term) for cell in names]
            line += f"{math.exp(-statistics.fmean(math.log(v.ratio) for v in verdicts)):>14.3f}"
            if metric == "ttft_p90_s":
                helped = [cell for cell, v in zip(names, verdicts, strict=True) if v.word == "best"]
                hurt = [cell for cell, v in zip(names, verdicts, strict=True) if v.word == "worse"]
        yield line + f"{f'{len(hurt)} / {len(helped)} of {len(names)}':>40}   {TERMS[term]}"


def chosen_cells(only: list[str]) -> list[Cell]:
    """Cells whose trace is here and whose name has all parts of one of the patterns (weka/mixed, near)."""
    picked = [c for c in cells() if not only or any(set(pattern.split("/")) <= set(c.name.split("/")) for pattern in only)]
    absent = {c.trace for c in picked if c.workload.needs is not None and not c.workload.needs.exists()}
    for trace in sorted(absent):
        print(f"{trace}: left out, {WORKLOADS[trace].needs} is absent", file=sys.stderr)
    return [c for c in picked if c.trace not in absent]


def play(jobs: list[tuple[str, str, int]], processes: int) -> list[Row]:
    """All runs, with progress on stderr."""
    rows: list[Row] = []
    began = time.monotonic()
    with multiprocessing.Pool(processes) as pool:
        for row in pool.imap_unordered(run, jobs, chunksize=max(1, min(8, len(jobs) // processes // 4))):
            rows.append(row)
            left = (time.monotonic() - began) / len(rows) * (len(jobs) - len(rows))
            print(f"\r{len(rows)}/{len(jobs)} runs, {left:.0f} s left   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help=f"cells, by commas: parts of trace/fleet/pressure, e.g. weka/mixed,near ({', '.join(WORKLOADS)}; "
        f"{', '.join(FLEETS)}; {', '.join(PRESSURES)})"
    )  # fmt: skip
    parser.add_argument("--policies", default=",".join(POLICIES), help="by commas; all when absent")
    parser.add_argument("--seeds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--first-seed", type=int, default=1, help="to check on seeds that nothing was tuned on")
    parser.add_argument("--quick", action="store_true", help="2 seeds, without the hardware fleet")
    parser.add_argument("--ablation", action="store_true", help="also run warm without each of its terms")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    picked = chosen_cells([part for part in options.only.split(",") if part])
    if options.quick:
        picked = [cell for cell in picked if cell.fleet != "hardware"]
    if not picked:
        parser.error(f"no cell is called {options.only!r}")
    policies = [name for name in options.policies.split(",") if name]
    if unknown := [name for name in policies if name not in POLICIES and name.removeprefix(WITHOUT) not in TERMS]:
        parser.error(f"no such policy: {', '.join(unknown)}; known: {', '.join(POLICIES)}")
    terms = list(TERMS) if options.ablation else []
    policies += [WITHOUT + term for term in terms]
    seeds = range(options.first_seed, options.first_seed + (2 if options.quick else options.seeds))
    rows = play([(cell.name, policy, seed) for cell in picked for seed in seeds for policy in policies], options.jobs)

    results, names = Results(rows), [cell.name for cell in picked]
    for name in names:
        print(*cell_table(results, name, policies), sep="\n")
    if "warm" in policies and any(results.rivals(name) for name in names):
        print(*verdict_table(results, names), sep="\n")
    if "warm" in policies and terms:
        print(*ablation_table(results, names, terms), sep="\n")
    if options.json:
        verdicts = [
            {"cell": name, "metric": metric, "rival": results.best_rival(name, metric), "word": verdict.word, **asdict(verdict)}
            for name in names if "warm" in policies and results.rivals(name)
            for metric in VERDICT_METRICS for verdict in [results.verdict(name, metric)]
        ]  # fmt: skip
        options.json.write_text(json.dumps({"runs": [asdict(row) for row in rows], "warm": verdicts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
