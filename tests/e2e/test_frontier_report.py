"""The frontier's page in a browser: it draws, asks no server, follows its controls, and finds the fronts that Python finds."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loadgen.frontier.analysis import Analysis, analyse, charted
from loadgen.frontier.factors import expansion
from loadgen.frontier.metrics import METRICS
from loadgen.frontier.objectives import parse_objective
from loadgen.frontier.points import gather
from loadgen.frontier.report import write_report
from loadgen.results import Run
from tests.loadgen.frontier_runs import agentic_sweep, run
from tests.programs import program

pytestmark = pytest.mark.e2e

# What a person would do, run in the page after it has drawn; what it sees is written into the page.
_PROBE = """
<script>
"use strict";
function shown() {
  const traces = at("chart").data ?? [];
  const front = traces.filter((trace) => trace.meta === "front");
  return {
    markers: document.querySelectorAll("#chart .scatterlayer .point").length,
    fronts: front.map((trace) => [trace.name, trace.x.length]),
    failing: (traces.find((trace) => trace.name === "failing") ?? { x: [] }).x.length,
    envelope: traces.find((trace) => trace.name === "envelope").x,
    title: document.querySelector("#chart .xtitle")?.textContent,
    annotations: at("chart").layout.annotations.length,
    tiles: [...document.querySelectorAll(".tile b")].map((tile) => tile.textContent),
    rows: document.querySelectorAll("#front tbody tr").length,
    cliffs: [...document.querySelectorAll("#cliffs li")].map((item) => item.textContent),
    factors: [...document.querySelectorAll(".factor .value")].map((item) => item.firstChild.textContent),
    problem: at("problem").textContent,
    scripts: document.scripts.length,
  };
}
function change(id, value) {
  if (typeof value === "boolean") at(id).checked = value; else at(id).value = value;
  at(id).dispatchEvent(new Event("change", { bubbles: true }));
  return shown();
}
const seen = { first: shown() };
seen.ttft = change("x", "ttft_p90_s");
seen.address = location.hash;
seen.series = change("series", "");
seen.hidden = change("failing", false);
seen.strict = change("objectives", "ttft_p90_s<=0.2");
seen.wrong = change("objectives", "ttft<1");
change("objectives", "");
document.querySelector("#cliffs li")?.click();
seen.chosen = shown();
seen.all = {};
const axes = data.metrics.filter((metric) => metric.axis).map((metric) => metric.key);
for (const x of axes) for (const y of axes) if (x !== y) seen.all[`${x} ${y}`] = front(data.points, x, y).map((point) => point.id);
const answer = document.createElement("script");
answer.type = "application/json";
answer.id = "seen";
answer.textContent = JSON.stringify(seen).replaceAll("<", "\\\\u003c");
document.body.append(answer);
</script>
"""


def browse(page: Path, scratch: Path, *options: str) -> tuple[str, str]:
    """What headless Chromium prints and what it logs."""
    command = [
        program("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={scratch / 'profile'}", "--enable-logging=stderr", "--window-size=1400,1800", "--virtual-time-budget=10000",
        *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr


def probed(found: Analysis, scratch: Path) -> tuple[dict[str, Any], list[str]]:
    """What the probe saw, and the page's messages on the console."""
    page = scratch / "probed.html"
    write_report(page, found)
    page.write_text(page.read_text("utf-8").replace("</body>", _PROBE + "</body>"), "utf-8")
    dom, log = browse(page, scratch, "--dump-dom")
    seen = re.search(r'<script type="application/json" id="seen">(.*?)</script>', dom, re.DOTALL)
    messages = [line for line in log.splitlines() if "CONSOLE" in line]
    assert seen, f"the probe did not end: {messages}"
    return json.loads(seen[1]), messages


def swept(seeds: int = 2) -> Analysis:
    points = gather(agentic_sweep(seeds))
    found = analyse(points, METRICS["user_tokens_per_s"], METRICS["output_per_gpu"], [parse_objective("ttft_p90_s<=5")])
    baseline = {"profile.accelerator": "H100", "profile.quantization": "bf16"}
    groups = {"hardware": ["profile.accelerator", "profile.tp"], "quantization": ["profile.quantization"]}
    found.expansion = expansion(points, found.y, baseline, groups, found.objectives, (found.x, 50))
    return found


def test_the_page_draws_and_follows_its_controls(tmp_path: Path) -> None:
    found = swept()
    seen, messages = probed(found, tmp_path)
    assert messages == []

    first = seen["first"]
    assert first["markers"] >= len(found.points.points)
    assert [name for name, _ in first["fronts"]] == ["B200", "H100", "H200"] and all(size > 0 for _, size in first["fronts"])
    assert first["envelope"] == [point.value("user_tokens_per_s") for point in found.front_within()]
    assert first["title"].startswith("tokens/s/user (streaming)")
    assert first["annotations"] > 0 and first["failing"] > 0
    assert first["rows"] >= len(found.front_within())
    assert len(first["cliffs"]) == len(found.cliffs) and any("hit rate fell" in text for text in first["cliffs"])
    assert first["factors"] == [f"{part.value:.2f}x" for part in found.expansion.factors] + [f"{found.expansion.total:.2f}x"]

    ttft = seen["ttft"]
    assert ttft["title"].startswith("TTFT p90") and "x=ttft_p90_s" in seen["address"]
    assert ttft["envelope"] == [point.value("ttft_p90_s") for point in found.front_within(x=METRICS["ttft_p90_s"])]
    assert len(seen["series"]["fronts"]) == 1
    assert seen["hidden"]["failing"] == 0
    assert 0 < len(seen["strict"]["envelope"]) < len(ttft["envelope"]) and max(seen["strict"]["envelope"]) <= 0.2
    assert "no run has a figure ttft" in seen["wrong"]["problem"] or "is not an objective" in seen["wrong"]["problem"]
    assert seen["wrong"]["envelope"] == seen["strict"]["envelope"]  # what was drawn stays
    assert seen["chosen"]["annotations"] > 0


def test_every_front_is_the_one_that_python_finds(tmp_path: Path) -> None:
    found = swept(1)
    seen, _ = probed(found, tmp_path)
    keys = charted(found.points)
    assert len(seen["all"]) == len(keys) * (len(keys) - 1)
    for pair, ids in seen["all"].items():
        x, y = (METRICS[key] for key in pair.split())
        assert ids == [point.id for point in found.front(x=x, y=y)], pair


@pytest.mark.parametrize("many", [False, True], ids=["one run", "2,000 configurations"])
def test_any_size_draws(tmp_path: Path, many: bool) -> None:
    runs: list[Run] = [run({}, 50, 10, ttft_p90_s=1)]
    if many:
        runs = [
            run({"tp": tp, "n": n, "policy": f"p{n % 5}"}, 1000 / n, n * tp / 9, ttft_p90_s=n / 50)
            for tp in range(1, 21)
            for n in range(1, 101)
        ]
    seen, messages = probed(analyse(gather(runs), METRICS["user_tokens_per_s"], METRICS["output_per_gpu"]), tmp_path)
    assert messages == []
    assert seen["first"]["markers"] >= len(runs) and seen["first"]["rows"] > 0


def test_settings_show_as_they_are_written(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)><b>bold</b>&amp;"
    runs = [run({"policy": evil, "n": n}, 60 / n, 10 * n, trace=evil, ttft_p90_s=n**4) for n in (1, 2)] + [
        run({"policy": "b", "n": 1}, 90, 5, trace=evil)
    ]
    seen, messages = probed(analyse(gather(runs), METRICS["user_tokens_per_s"], METRICS["output_per_gpu"]), tmp_path)
    assert messages == []
    assert any(evil in text for text in seen["first"]["cliffs"])


def test_a_screenshot_shows_lines_and_colours(tmp_path: Path) -> None:
    from matplotlib import image

    page = tmp_path / "page.html"
    write_report(page, swept())
    _, log = browse(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    assert "CONSOLE" not in log
    pixels = image.imread(tmp_path / "page.png")[..., :3]
    assert pixels.shape[:2] == (1800, 1400)
    coloured = pixels.max(axis=2) - pixels.min(axis=2) > 0.25
    chart = coloured[420:1000, 100:1300]
    assert 0.002 < chart.mean() < 0.5, "the chart has no coloured marks, or nothing else"
    assert len({tuple((pixel * 4).round()) for pixel in pixels[420:1000, 100:1300][chart][::7]}) >= 3, "one colour only"
