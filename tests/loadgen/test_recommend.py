"""`loadgen recommend`: which fleet is recommended, why, and whether its files can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.generate import generate
from loadgen.recommend.candidates import candidates
from loadgen.recommend.demand import Demand, workers_needed
from loadgen.recommend.output import launch_fields, write
from loadgen.recommend.plan import groups, partitions
from loadgen.recommend.recommend import Recommendation, recommend
from loadgen.recommend.request import Request, RequestError, load_request, parse_request
from loadgen.recommend.verdict import judge
from loadgen.recommendcli import recommend_command
from loadgen.simulate.fleet import load_fleet
from loadgen.simulate.load import Load
from loadgen.simulatecli import simulate_command
from loadgen.trace import write_trace
from workers.engines import engine_command
from workers.hardware.preset import preset
from workers.launchprofile import LaunchProfile, load_launch_profile
from workers.simlike import described_workers

LATENCY = {
    "prefill_base": 0.02,
    "prefill_token": 1e-4,
    "prefill_attention": 2e-9,
    "decode_base": 0.01,
    "decode_seq": 1e-3,
    "decode_kv": 1e-8,
}
SLOW = {name: 2.5 * value for name, value in LATENCY.items()}
LOAD = {"duration_s": 30.0, "warmup_s": 10.0, "ramp_s": 5.0, "time_scale": 0.05}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "small.jsonl"
    write_trace(file, generate(12, 3, 20_000))
    return file


def request_of(trace: Path, **changes: Any) -> Request:
    """A quick request: one configuration, one tier."""
    data: dict[str, Any] = {
        "traffic": {"trace": str(trace), "sessions": 24, "load": LOAD},
        "model": "small",
        "workers": {"good": worker(1.0)},
        "tiers": {"standard": {"slo": {"ttft_p90_s": 2, "user_tokens_per_s": 45}}},
        "search": {"max_num_seqs": [64], "max_num_batched_tokens": [8192], "long_prefill_token_threshold": [0], "disaggregated": []},
        "seeds": 2,
    }
    return parse_request(data | changes, "request")


def worker(price: float, latency: dict[str, float] = LATENCY) -> dict[str, Any]:
    return {"kv_capacity_tokens": 200_000, "max_num_seqs": 64, "price_per_hour": price, "latency": latency}


@pytest.fixture(scope="module")
def tiers(trace: Path) -> Recommendation:
    """Two tiers of which the demanding one needs the dear workers."""
    wanted = {
        "latency": {"share": 0.2, "slo": {"user_tokens_per_s": 60}},
        "throughput": {"share": 0.8, "slo": {"user_tokens_per_s": 12}},
    }
    return recommend(request_of(trace, workers={"fast": worker(3.0), "slow": worker(0.7, SLOW)}, tiers=wanted))


def test_the_fewest_workers_that_keep_the_objectives(trace: Path) -> None:
    made = recommend(request_of(trace))
    assert made.plan is not None and made.plan.pools[0].trial.count > 1
    assert all(verdict.kept for verdict in made.verdicts)
    assert len(made.runs) == 2
    less, more = made.neighbours
    assert (less.change, more.change) == (-1, 1)
    assert not less.kept and more.kept and less.cost < made.plan.cost < more.cost


def test_equal_configurations_differ_in_price_alone(trace: Path) -> None:
    made = recommend(request_of(trace, workers={"dear": worker(1.1), "cheap": worker(1.0)}))
    assert made.plan is not None
    assert made.plan.pools[0].trial.candidate.name == "cheap"
    runner_up = made.found[("standard",)].options[1]
    assert (runner_up.candidate.name, runner_up.count) == ("dear", made.plan.pools[0].trial.count)


@pytest.mark.slow
def test_growth_needs_more_workers(trace: Path) -> None:
    counts = []
    for growth in (0.0, 1.0):
        request = request_of(trace)
        made = recommend(request.model_copy(update={"traffic": request.traffic.model_copy(update={"growth": growth})}))
        assert made.plan is not None
        counts.append(made.plan.pools[0].trial.count)
    assert counts[1] > counts[0]


def test_tiers_get_pools_of_their_own_where_that_is_cheaper(tiers: Recommendation) -> None:
    assert tiers.plan is not None
    assert {pool.tiers: pool.trial.candidate.name for pool in tiers.plan.pools} == {("latency",): "fast", ("throughput",): "slow"}
    by_sharing = {plan.sharing: plan.cost for plan in tiers.sharings}
    assert by_sharing["latency | throughput"] < by_sharing["latency + throughput"]
    assert {verdict.tier for verdict in tiers.verdicts} == {"latency", "throughput"}


@pytest.mark.slow
def test_a_tier_that_pays_less_than_it_costs_is_left_out(trace: Path) -> None:
    slo = {"user_tokens_per_s": 45}
    wanted = {"latency": {"slo": slo, "pays_per_million_output": 1000}, "throughput": {"slo": slo, "pays_per_million_output": 0.0001}}
    made = recommend(request_of(trace, tiers=wanted))
    assert made.plan is not None
    assert made.plan.tiers == ("latency",)
    assert made.value > made.plan.cost
    assert made.load.live_sessions == 12  # its own half alone


def test_nothing_within_the_budget_says_what_is_closest_and_what_would_help(trace: Path, tmp_path: Path) -> None:
    request = {
        "traffic": {"trace": str(trace), "sessions": 24, "load": LOAD}, "model": "small", "workers": {"good": worker(1.0)},
        "tiers": {"standard": {"slo": {"user_tokens_per_s": 45}}}, "budget": {"price_per_hour": 1.0},
    }  # fmt: skip
    file = tmp_path / "request.yaml"
    file.write_text(yaml.safe_dump(request))
    result = CliRunner().invoke(recommend_command, [str(file), "--jobs", "1"])
    assert result.exit_code == 1
    assert "no fleet keeps every objective within the limits" in result.output
    assert "closest for standard: 1 x good" in result.output or "what would help" in result.output
    assert "keeps all for" in result.output
    assert "instead of 45" in result.output


def test_an_objective_that_nothing_reaches(trace: Path) -> None:
    made = recommend(request_of(trace, tiers={"standard": {"slo": {"user_tokens_per_s": 5000}}}))
    assert made.plan is None and made.over is None
    worst = made.closest[("standard",)].worst
    assert worst is not None and worst.ratio > 10


# --- files ---


def test_files_of_pools_of_their_own(tiers: Recommendation, tmp_path: Path) -> None:
    write(tiers, tmp_path, port=8123, first_worker_port=9500)
    config = yaml.safe_load((tmp_path / "gateway.yaml").read_text())
    assert [model["name"] for model in config["models"]] == ["small-latency", "small-throughput"]
    assert tiers.plan is not None
    assert len(config["workers"]) == sum(pool.trial.count for pool in tiers.plan.pools)
    served = {w["model"]: w["price_per_hour"] for w in config["workers"]}
    assert served == {"small-latency": 3.0, "small-throughput": 0.7}
    described = described_workers(tmp_path / "gateway.yaml")
    assert [each.port for each in described] == list(range(9500, 9500 + len(described)))
    assert [each.profile.kv_capacity_tokens for each in described] == [200_000] * len(described)
    assert load_fleet(tmp_path / "fleet.yaml") == tiers.fleet
    told = (tmp_path / "fleet.yaml").read_text().splitlines()[1].removeprefix("# loadgen ").split()
    assert simulate_command.make_context("simulate", told[1:]).params["live_sessions"] == tiers.load.live_sessions
    assert load_fleet(tmp_path / "fleet-latency.yaml").pools[0].tiers == []
    expected = orjson.loads((tmp_path / "expected.json").read_bytes())
    median, low, high = expected["tiers"]["latency"]["user_tokens_per_s"]
    assert median >= 60 and low <= median <= high
    assert all(objective["kept"] for objective in expected["objectives"])


def test_the_gateway_accepts_its_configuration(tiers: Recommendation, tmp_path: Path) -> None:
    # the gateway is another program to the load generator: tests may know both
    from gateway.config import load

    write(tiers, tmp_path)
    config = load(tmp_path / "gateway.yaml")
    assert tiers.plan is not None
    profile = tiers.plan.pools[0].trial.candidate.profile
    assert config.workers[0].profile().latency_model() == profile.latency_model()
    assert config.tiers["latency"].tokens_per_s == 60


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen3-32b", {"tp": 2, "quantization": "fp8", "kv_dtype": "fp8_e4m3", "max_num_batched_tokens": 2048}),
        ("glm-5.2", {"tp": 1, "attention_dp": 8, "max_num_seqs": 256, "speculation": "mtp"}),
        ("gpt-oss-120b", {"tp": 1, "long_prefill_token_threshold": 1024}),
    ],
)
def test_engines_can_be_launched(model: str, settings: dict[str, Any], tmp_path: Path) -> None:
    profile = preset(model, "h200", **settings)
    file = tmp_path / "engine.yaml"
    file.write_text(yaml.safe_dump(launch_fields(profile, model, "served")))
    launch = load_launch_profile(file)
    assert isinstance(launch, LaunchProfile)
    assert launch.max_num_seqs * profile.attention_dp == profile.max_num_seqs  # per data-parallel rank there
    assert "served" in engine_command(launch).shell("options.yaml")


def test_a_served_name_that_names_no_model(trace: Path, tmp_path: Path) -> None:
    own = preset("qwen3-32b", "h100", tp=2).model_dump(mode="json", exclude_unset=True)
    made = recommend(request_of(trace, workers={"own": own}, tiers={"standard": {}}))
    write(made, tmp_path)
    (described, *_) = described_workers(tmp_path / "gateway.yaml")
    assert described.model == "small"
    assert described.profile.latency_model() == preset("qwen3-32b", "h100", tp=2).latency_model()


# --- the parts ---


def test_configurations_that_do_not_fit_say_why(trace: Path) -> None:
    request = request_of(trace, model="llama-3-70b", accelerators=["h100"], workers={})
    fitting, rejected = candidates(request, 60_000)
    assert all(candidate.profile.kv_capacity_tokens >= 60_000 for candidate in fitting)
    assert any(each.name.startswith("h100 tp1") and "does not fit" in each.why for each in rejected)
    assert any(candidate.name == "h100 tp4 fp8" for candidate in fitting)
    _, rejected = candidates(request, 10_000_000)
    assert any("longest request" in each.why for each in rejected)


def test_own_price_counts() -> None:
    data = {
        "traffic": {"trace": "t", "sessions": 1}, "model": "qwen3-32b", "accelerators": [{"name": "H100", "price_per_hour": 9}],
        "search": {"tp": [2], "quantization": [None], "kv_dtype": [None]},
    }  # fmt: skip
    (only,), _ = candidates(parse_request(data, "r"), 1000)
    assert only.price == 18


def test_the_estimate_grows_with_the_load_and_falls_with_speed() -> None:
    demand = Demand(30_000, 1_500, 400, 10, 30, 60_000)
    fast, slow = preset("qwen3-32b", "h200", tp=4), preset("qwen3-32b", "h100", tp=4)
    few, many = (workers_needed(fast, demand, Load(live_sessions=n), [], 64) for n in (100, 400))
    assert few is not None and many is not None and few < many
    other = workers_needed(slow, demand, Load(live_sessions=400), [], 64)
    assert other is not None and other >= many


@given(st.integers(1, 5))
@settings(max_examples=5)
def test_partitions_divide_all_tiers_in_every_way(count: int) -> None:
    tiers: Any = [f"t{number}" for number in range(count)]
    divided = list(partitions(tiers))
    assert len(divided) == [1, 1, 2, 5, 15, 52][count]
    assert len({frozenset(map(frozenset, each)) for each in divided}) == len(divided)
    assert all(sorted(tier for group in each for tier in group) == tiers for each in divided)


def test_a_tier_that_names_no_price_is_always_served(trace: Path) -> None:
    request = request_of(trace, tiers={"standard": {}, "throughput": {"pays_per_million_output": 1}})
    assert set(groups(request)) == {("standard",), ("throughput",), ("standard", "throughput")}


def test_a_figure_that_was_not_measured_keeps_nothing(trace: Path) -> None:
    verdicts = judge(request_of(trace).tiers, ("standard",), [])
    assert verdicts and not any(verdict.kept for verdict in verdicts)


# --- what users get wrong ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiers": {"gold": {}}}, "tiers.gold: is no tier of the gateway; its tiers are latency, standard, throughput"),
        ({"tiers": {"standard": {"slo": {"ttft_p95_s": 1}}}}, "ttft_p95_s is no figure; did you mean"),
        ({"traffic": {"trace": "t"}}, "traffic: needs either 'sessions'"),
        ({"traffic": {"trace": "t", "sessions": 1, "load": {"rate": 2}}}, "rate follows from 'rate'"),
        ({"traffic": {"trace": "t", "sessions": 1, "load": {"time_scal": 2}}}, "did you mean 'time_scale'?"),
        ({"workers": {}}, "needs 'accelerators'"),
        ({"accelerators": ["tpu"], "model": "qwen3-32b"}, "unknown accelerator 'tpu'; known: a100"),
        ({"workers": {"a": worker(1), "b": worker(0)}}, "workers.b: needs a price_per_hour"),
        ({"search": {"disaggregated": ["1-3"]}}, "write '1:3'"),
        ({"sedes": 2}, "sedes: unknown field"),
        ({"tiers": {"standard": {"slo": {"ttft_p90_s": float("nan")}}}}, "finite number"),
        ({"traffic": {"trace": "t", "sessions": 1, "growth": float("inf")}}, "growth: Input should be a finite number"),
    ],
)
def test_faults_name_their_place(trace: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        request_of(trace, **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.jsonl"], "a trace needs --model"),
        (["t.jsonl", "--model", "qwen3-32b"], "a trace needs --accelerator"),
        (["r.yaml", "--model", "qwen3-32b"], "--model is for a trace; say it in r.yaml"),
        (["t.jsonl", "--model", "qwen3-32b", "--accelerator", "h100", "--slo", "ttft_p90_s>=2"], "of ttft_p90_s, less is better"),
        (["r.yaml", "--try", "10"], "--try starts what -o writes"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (
            ["t.jsonl", "--model", "qwen3-32b", "--accelerator", "h100", "--sessions", "4", "-o", "/dev/null/x"],
            "/dev/null/x: cannot be made",
        ),
    ],
)
def test_faults_on_the_command_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(recommend_command, arguments)
    assert result.exit_code != 0
    assert message in result.output


@pytest.mark.parametrize("name", ["simple.yaml", "tiers.yaml"])
def test_the_shipped_requests_can_be_used(name: str) -> None:
    request = load_request(Path(__file__).parents[2] / "deploy" / "recommend" / name)
    assert request.traffic.trace.is_file()
    fitting, _ = candidates(request, 60_000)
    assert fitting


@pytest.mark.slow
def test_several_processes_recommend_the_same(trace: Path) -> None:
    one, two = (recommend(request_of(trace, workers={"a": worker(1.0), "b": worker(0.5, SLOW)}), jobs) for jobs in (1, 2))
    assert one.plan is not None and two.plan is not None
    assert [(pool.trial.candidate, pool.trial.count) for pool in one.plan.pools] == [
        (pool.trial.candidate, pool.trial.count) for pool in two.plan.pools
    ]
    assert [run.figures for run in one.runs] == [run.figures for run in two.runs]
    options = [[(trial.candidate.name, trial.count) for trial in made.found[("standard",)].options] for made in (one, two)]
    assert options[0] == options[1]
