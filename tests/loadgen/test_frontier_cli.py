"""`loadgen frontier`: the table, the page, the images and the JSON of a results file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loadgen.frontier.analysis import analyse
from loadgen.frontier.metrics import METRICS
from loadgen.frontier.points import gather
from loadgen.frontier.report import report
from loadgen.frontiercli import frontier_command
from loadgen.results import Run, write_runs
from tests.loadgen.frontier_runs import agentic_sweep, run

Frontier = Callable[..., Result]


@pytest.fixture
def frontier(tmp_path: Path) -> Frontier:
    """Runs the command on a results file of these runs."""

    def invoke(runs: list[Run], *options: str) -> Result:
        write_runs(tmp_path / "results.jsonl", runs)
        return CliRunner().invoke(frontier_command, [str(tmp_path / "results.jsonl"), *options], env={"COLUMNS": "200"})

    return invoke


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_the_table_shows_front_cliffs_and_factors(frontier: Frontier) -> None:
    shown = frontier(
        [*agentic_sweep(1), run({"policy": "warm"}, error="does not fit", trace="agentic.jsonl")],
        "--slo", "ttft_p90_s<=5", "--baseline", "accelerator=H100,quantization=bf16,policy=round-robin", "--at", "50",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    text = shown.output
    assert "agentic.jsonl: 288 configurations, 288 runs, 1 a configuration" in text
    assert "front: output tokens/s/GPU against tokens/s/user (streaming)" in text
    assert re.search(r"live_sessions 64 -> 128 .* eviction: hit rate fell", text)
    for name in ("hardware", "quantization", "routing", "total"):
        assert re.search(rf"│ {name} .* \d+\.\d+x", text), name
    assert "1 x does not fit" in text


def test_json_holds_points_cliffs_and_factors(frontier: Frontier, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    shown = frontier(
        agentic_sweep(2), "--json", str(file), "--slo", "ttft_p90_s<=5", "--baseline", "policy=round-robin",
        "--factor", "routing=policy", "--factor", "hardware=accelerator,tp", "--factor", "quantization=quantization",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    data = json.loads(file.read_bytes())
    assert data["configurations"] == 288 and data["runs"] == 576 and data["seeds"] == {"fewest": 2, "most": 2}
    within = [point for point in data["points"] if point["front_within_objectives"]]
    assert within and all(point["breaks"] == [] and point["figures"]["ttft_p90_s"] <= 5 for point in within)
    assert any(point["breaks"] == ["ttft_p90_s<=5"] for point in data["points"])
    assert {"eviction", "queueing"} <= {cliff["cause"] for cliff in data["cliffs"]}
    assert prod(factor["value"] for factor in data["expansion"]["factors"]) == pytest.approx(data["expansion"]["total"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-x", "speed"], "no figure is named 'speed'"),
        (["--slo", "ttft<5"], "is not an objective"),
        (["--series", "colour"], "no axis is named 'colour'; the results have profile.accelerator"),
        (["--trace", "other"], "no run is of the trace 'other'"),
        (["--baseline", "accelerator"], "write --baseline accelerator=h100"),
        (["--baseline", "tp=16"], "profile.tp has no value '16'; it has 1, 2, 4"),
        (["--baseline", "tp=1", "--factor", "hardware"], "is not a factor"),
        (["--baseline", "tp=1", "--factor", "a=tp", "--factor", "b=tp"], "is in two factors, a and b"),
        (["--factor", "a=tp"], "add --baseline"),
        (["--baseline", "tp=1", "--at", "1e9"], "no configuration with profile.tp=1 keeps the objectives"),
    ],
)
def test_what_cannot_be_shown_is_explained(frontier: Frontier, options: list[str], message: str) -> None:
    shown = frontier(agentic_sweep(1), *options)
    assert shown.exit_code != 0
    assert message in " ".join(shown.output.split())


def test_files_without_runs(frontier: Frontier, tmp_path: Path) -> None:
    assert "the results hold no run" in frontier([]).output
    assert "none of the 1 runs has figures; the first: does not fit" in frontier([run({}, error="does not fit")]).output
    (tmp_path / "broken.jsonl").write_text("{}\n")
    shown = CliRunner().invoke(frontier_command, [str(tmp_path / "broken.jsonl")])
    assert shown.exit_code == 1 and "broken.jsonl:1: not a run" in shown.output


def test_the_page_is_one_file_that_loads_nothing(frontier: Frontier, tmp_path: Path) -> None:
    shown = frontier(agentic_sweep(1), "--html", str(tmp_path / "page.html"), "--title", "Coding agents <3")
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "page.html").read_text("utf-8")
    ours = page[: page.index('<script id="data"')]
    assert "default-src 'none'" in ours and "<title>Coding agents &lt;3</title>" in ours
    assert not re.search(r"(src|href)=[\"']", ours) and "url(" not in ours
    assert "Plotly" in page
    data = data_of(page)
    assert len(data["points"]) == 288
    assert {"output_per_gpu", "uncached_per_gpu", "total_per_gpu", "jobs_per_gpu_hour"} <= {m["key"] for m in data["metrics"] if m["axis"]}


def test_settings_and_reasons_cannot_write_html() -> None:
    evil = "</script><script>alert(1)</script>"
    runs = [
        run({"policy": evil}, 50, 10, trace=evil),
        run({"policy": "b", evil: 1}, 60, 5, trace=evil),
        run({"policy": "c"}, error=evil, trace=evil),
    ]
    page = report(analyse(gather(runs), METRICS["user_tokens_per_s"], METRICS["output_per_gpu"]))
    assert "<script>alert" not in page
    assert data_of(page)["axes"][0]["values"] == [evil, "b"]
    assert data_of(page)["failed"] == [["policy c", evil]]


def test_one_run_is_enough(frontier: Frontier, tmp_path: Path) -> None:
    shown = frontier([run({}, 50, 10)], "--html", str(tmp_path / "page.html"))
    assert shown.exit_code == 0, shown.output
    assert "1 configurations" not in shown.output and "1 configuration, 1 run" in shown.output


def test_figures_that_nobody_measured_leave_an_empty_front(frontier: Frontier, tmp_path: Path) -> None:
    shown = frontier([run({}, None, 10)], "-x", "itl_p99_s", "--html", str(tmp_path / "page.html"))
    assert shown.exit_code == 0, shown.output
    assert "no configuration measured both itl_p99_s and output_per_gpu" in " ".join(shown.output.split())


@pytest.mark.slow
def test_images_have_something_on_them(frontier: Frontier, tmp_path: Path) -> None:
    from matplotlib import image

    shown = frontier([*agentic_sweep(1)], "--png", str(tmp_path / "images"), "--slo", "ttft_p90_s<=5")
    assert shown.exit_code == 0, shown.output
    names = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert names == ["cost.png", "frontier.png", "ttft.png"]
    for name in names:
        pixels = image.imread(tmp_path / "images" / name)[..., :3]
        assert (pixels < 0.9).any(axis=2).mean() > 0.01, f"{name} is blank"


@pytest.mark.slow
def test_images_without_prices_leave_the_cost_out(frontier: Frontier, tmp_path: Path) -> None:
    shown = frontier([run({"policy": "$x"}, 50, 10), run({"policy": "$y$"}, 60, 5)], "--png", str(tmp_path / "images"))
    assert shown.exit_code == 0, shown.output
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["frontier.png"]
