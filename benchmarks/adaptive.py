"""Whether the adaptive search finds the grid's front, and with how many runs.

    loadgen sweep deploy/sweeps/agentic.yaml -o grid.jsonl
    python benchmarks/adaptive.py deploy/sweeps/agentic.yaml grid.jsonl

Runs are deterministic, so the search is played on the grid's results: what it would measure is looked up. Recall counts the grid's front
points that the search measured, and those that something it measured comes within 1 % of in both figures; the area is what the front
dominates. A random search with as many configurations stands beside it.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import click
import orjson

from loadgen.results import Run, read_runs
from loadgen.sweep.adaptive import AdaptiveSearch
from loadgen.sweep.config import load_sweep
from loadgen.sweep.grid import Grid, Point
from loadgen.sweep.objective import Value, front, hypervolume

CLOSE = 1.01
SHARES = (1 / 3, 1 / 4, 1 / 6)


def figures(values: dict[Point, Value], chosen: list[Point]) -> dict[str, float]:
    on_front = front(values)
    found = {point: values[point] for point in chosen if point in values}
    near = sum(
        any(other.x * CLOSE >= values[point].x and other.y * CLOSE >= values[point].y for other in found.values()) for point in on_front
    )
    return {
        "runs": len(chosen),
        "recall": sum(point in found for point in on_front) / len(on_front),
        "recall_1_percent": near / len(on_front),
        "area": hypervolume(found.values()) / hypervolume(values.values()),
    }


def adaptive(grid: Grid, values: dict[Point, Value], budget: int, seed: int) -> list[Point]:
    search = AdaptiveSearch(grid, budget, seed)
    chosen: list[Point] = []
    while points := search.next():
        chosen += points
        for point in points:
            search.tell(point, values.get(point))
    return chosen


@click.command()
@click.argument("sweep_file", type=click.Path(exists=True, path_type=Path))
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--seeds", default=12, show_default=True, help="First samples to start from.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures as JSON.")
def main(sweep_file: Path, results: Path, seeds: int, json_file: Path | None) -> None:
    """Adaptive against the whole grid and against random choice."""
    sweep = load_sweep(sweep_file)
    grid, goal = sweep.grid(), sweep.goal()
    runs: dict[str, list[Run]] = {}
    for run in read_runs(results):
        runs.setdefault(str(run.arm), []).append(run)
    points = list(grid.points())
    if missing := [point for point in points if str(grid.arm(point)) not in runs]:
        raise click.ClickException(f"{results} lacks {len(missing)} of the grid's {len(points)} configurations")
    values = {point: value for point in points if (value := goal.value(runs[str(grid.arm(point))])) is not None}
    print(f"grid: {len(points)} configurations, {len(values)} that count, {len(front(values))} on the front ({goal.x}, {goal.y})\n")
    print(
        f"{'search':<10}{'budget':>8}{'runs':>8}{'recall':>9}{'within 1 %':>12}{'area':>8}   (means over {seeds} starts; worst in brackets)"
    )
    rows = []
    for share in SHARES:
        budget = int(len(points) * share)
        for name in ("adaptive", "random"):
            found = [
                figures(values, adaptive(grid, values, budget, seed) if name == "adaptive" else grid.random_sample(budget, seed))
                for seed in range(seeds)
            ]
            row = {key: mean(each[key] for each in found) for key in found[0]}
            worst = {f"{key}_worst": min(each[key] for each in found) for key in found[0] if key != "runs"}
            rows.append({"search": name, "budget": budget, **row, **worst})
            print(
                f"{name:<10}{budget:>8}{row['runs']:>8.0f}{row['recall']:>9.3f}{row['recall_1_percent']:>12.3f}{row['area']:>8.4f}"
                f"   ({worst['recall_worst']:.2f}, {worst['recall_1_percent_worst']:.2f}, {worst['area_worst']:.4f})"
            )
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    main()
