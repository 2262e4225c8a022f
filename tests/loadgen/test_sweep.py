"""The sweep's file, what a configuration means, and carrying it out: resuming, crashes, interruption."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loadgen.generate import generate
from loadgen.results import append_run, read_runs
from loadgen.sweep import config as sweep_config
from loadgen.sweep.config import Sweep, SweepError, load_sweep
from loadgen.sweep.configuration import CannotRun, Configuration, configuration
from loadgen.sweep.evaluate import Evaluate, SimulatedRuns, Task
from loadgen.sweep.processes import Outcome, Processes, attempt
from loadgen.sweep.runner import Progress, run_sweep
from loadgen.sweepcli import sweep_command
from loadgen.trace import write_trace
from tests.loadgen import sweep_samples as samples
from tests.loadgen.sweep_samples import write_sweep

SWEEPS = Path(__file__).parents[2] / "deploy" / "sweeps"


class Inline:
    """Runs tasks here, `after` says what happens after how many."""

    def __init__(self, evaluate: Evaluate = samples.measured, stop_after: int | None = None) -> None:
        self._evaluate = evaluate
        self._stop_after = stop_after
        self.tasks: list[Task] = []
        self.closed = False

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        for task in tasks:
            if len(self.tasks) == self._stop_after:
                raise KeyboardInterrupt
            self.tasks.append(task)
            yield Outcome(task, *attempt(self._evaluate, task))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Sweep]:
    return lambda **changes: load_sweep(write_sweep(tmp_path, **changes))


def meaning(sweep: Sweep, **arm: Any) -> Configuration:
    return configuration(sweep, sweep.settings({name.replace("__", "."): value for name, value in arm.items()}))


# The file


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"trace": None}, "trace: Field required"),
        ({"axis": {}}, "axis: unknown key; did you mean 'axes'?"),
        ({"axes": {}}, "axes: Dictionary should have at least 1 item"),
        ({"axes": {"policy": []}}, "policy has no values"),
        ({"axes": {"profile.tp": {"from": 4, "to": 1, "steps": 3}}}, "axes.profile.tp: 'to' must be above 'from'"),
        ({"axes": {"profile.speculation": [{"method": "mtp"}]}}, "give a value of several fields a name"),
        ({"exclude": [{"policy": "warmest"}]}, "the axis policy has no value 'warmest'"),
        ({"exclude": [{"tp": 1}]}, "'tp' is no axis"),
        ({"search": "clever"}, "search.kind: Input should be 'grid', 'random' or 'adaptive'"),
        ({"search": {"kind": "grid", "budget": 3}}, "with a budget choose random or adaptive"),
        ({"objective": {"x": "user_token_per_s"}}, "did you mean user_tokens_per_s?"),
        ({"slo": ["ttft_p90_s<5"]}, "is not an objective"),
        ({"seeds": 0}, "seeds: must be a number of at least 1"),
        ({"engines": {"speed": 2}}, "'engines' is for mode: live"),
        ({"base": "absent.yaml"}, "absent.yaml: cannot be read"),
        ({"base": 3}, "base: must be a fleet's fields"),
    ],
)
def test_mistakes_in_the_file_name_their_place(make: Callable[..., Sweep], changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SweepError) as caught:
        make(**changes)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("profile.tpp", 2, "pools.0.profile.tpp: Extra inputs are not permitted"),
        ("profile.tp", "many", "pools.0.profile.tp: Input should be a valid integer"),
        ("load.live_session", 3, "did you mean 'live_sessions'?"),
        ("load.live_sessions", "many", "load.live_sessions: Input should be a valid integer"),
        ("polcy", "warm", "did you mean 'policy'?"),
        ("policy", "warmest", "unknown policy 'warmest'"),
        ("pd", "1-3", "no ratio of prefill to decode workers"),
        ("pools.3.count", 2, "the base has 1 pools"),
        ("profile.latency", "h999", "unknown latency model 'h999'"),
        ("preset.model", "gpt-9", "needs accelerator"),
    ],
)
def test_settings_that_nobody_can_mean_are_mistakes(make: Callable[..., Sweep], path: str, value: Any, complaint: str) -> None:
    with pytest.raises(SweepError) as caught:
        configuration(make(), {path: value})
    assert complaint in str(caught.value)


def test_ranges_are_even_or_grow_by_equal_ratios(make: Callable[..., Sweep]) -> None:
    sweep = make(
        axes={
            "load.live_sessions": {"from": 1, "to": 64, "steps": 7, "log": True},
            "profile.max_num_seqs": {"from": 1, "to": 4, "steps": 9},
            "load.time_scale": {"from": 0.1, "to": 0.3, "steps": 3},
        }
    )
    assert sweep.axis("load.live_sessions").values == (1, 2, 4, 8, 16, 32, 64)
    assert sweep.axis("profile.max_num_seqs").values == (1, 2, 3, 4)
    assert sweep.axis("load.time_scale").values == (0.1, 0.2, 0.3)


# What a configuration means


def test_paths_reach_fleet_and_load(make: Callable[..., Sweep]) -> None:
    sweep = make(
        axes={
            "topology": {"wide": {"profile.tp": 4, "profile.max_num_seqs": 8}, "many": {"count": 6}},
            "load.live_sessions_per_gpu": [1.5, 3],
            "policy": ["random"],
            "tier": ["latency", "standard"],
        },
        load={"live_sessions": 7, "requests": 50},
    )
    made = meaning(sweep, topology="wide", load__live_sessions_per_gpu=1.5, policy="random", tier="latency")
    assert (made.fleet.gpus, made.fleet.pools[0].profile.max_num_seqs, made.fleet.policy) == (8, 8, "random")
    assert made.load.live_sessions == 12 and made.load.tiers == {"latency": 1.0}
    assert made.load.requests == 50 and made.load.duration_s is None
    assert meaning(sweep, topology="many").fleet.gpus == 6
    assert meaning(sweep, topology="many").load.live_sessions == 7


def test_gpus_held_equal_decide_the_count_and_what_does_not_divide_cannot_run(make: Callable[..., Sweep]) -> None:
    sweep = make(gpus=8, axes={"profile.tp": [1, 2, 3]})
    assert [meaning(sweep, profile__tp=tp).fleet.pools[0].count for tp in (1, 2)] == [8, 4]
    with pytest.raises(CannotRun, match="8 GPUs do not divide into workers of 3"):
        meaning(sweep, profile__tp=3)


def test_a_preset_fits_its_kv_cache_to_the_profile(make: Callable[..., Sweep]) -> None:
    sweep = make(
        base={"pools": [{"preset": {"model": "qwen3-coder-480b", "accelerator": "h200"}}]},
        axes={"profile.tp": [1, 4, 8], "profile.quantization": ["fp8"]},
    )
    small, large = (meaning(sweep, profile__tp=tp, profile__quantization="fp8").fleet for tp in (4, 8))
    assert large.kv_capacity_tokens > 2 * small.kv_capacity_tokens and large.price_per_hour == 2 * small.price_per_hour
    with pytest.raises(CannotRun, match="does not fit 1 x h200"):
        meaning(sweep, profile__tp=1, profile__quantization="fp8")
    with pytest.raises(SweepError, match="unknown accelerator"):
        configuration(sweep, {"preset.accelerator": "abacus"})


def test_a_ratio_splits_the_workers_by_role(make: Callable[..., Sweep]) -> None:
    sweep = make(base={"pools": [{"count": 8, "profile": {"tp": 2}}]}, axes={"pd": ["0:1", "1:3", "1:2"]})
    assert [(pool.count, pool.profile.role) for pool in meaning(sweep, pd="1:3").fleet.pools] == [(2, "prefill"), (6, "decode")]
    assert [(pool.count, pool.profile.role) for pool in meaning(sweep, pd="0:1").fleet.pools] == [(8, "both")]
    assert meaning(sweep, pd="1:3").fleet.gpus == 16
    with pytest.raises(CannotRun, match="8 workers do not divide 1:2"):
        meaning(sweep, pd="1:2")


# Carrying it out


def test_a_sweep_goes_on_where_it_was_stopped(make: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep, file = make(seeds=2), tmp_path / "r.jsonl"
    stopped = Inline(stop_after=5)
    summary = run_sweep(sweep, file, stopped)
    assert summary.interrupted and stopped.closed and len(read_runs(file)) == 5
    with file.open("ab") as out:
        out.write(b'{"id":"cut o')  # as a kill in the middle of a write leaves it
    seen: list[tuple[int, int]] = []
    rest = Inline()
    summary = run_sweep(sweep, file, rest, lambda progress: seen.append((progress.done, progress.total)))
    assert (summary.found, len(rest.tasks), len(summary.runs)) == (5, 7, 12)
    assert len({run.id for run in read_runs(file)}) == 12
    assert seen[0] == (5, 12) and seen[-1] == (12, 12)


def test_runs_of_another_base_are_not_taken_for_this_ones(make: Callable[..., Sweep], tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    run_sweep(make(), file, Inline())
    run_sweep(make(axes={"load.live_sessions": [1, 2, 4, 8], "policy": ["warm", "round-robin"]}), file, grown := Inline())
    assert len(grown.tasks) == 2, "an axis may grow"
    with pytest.raises(SweepError, match="another sweep"):
        run_sweep(make(load={"duration_s": 60}), file, Inline())


def test_an_adaptive_sweep_takes_the_same_way_again(make: Callable[..., Sweep], tmp_path: Path) -> None:
    axes = {"load.live_sessions": list(range(1, 31)), "policy": ["warm", "round-robin"]}
    sweep, file = make(axes=axes, search={"kind": "adaptive", "budget": 20}), tmp_path / "r.jsonl"
    run_sweep(sweep, file, Inline(stop_after=12))
    assert len(run_sweep(sweep, file, rest := Inline()).runs) == 12 + len(rest.tasks) <= 20


def test_a_configuration_that_cannot_run_is_a_line_with_its_reason(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", generate(2, 1, 20_000))
    sweep = load_sweep(
        write_sweep(tmp_path, gpus=4, axes={"profile.tp": [2, 3], "profile.kv_capacity_tokens": [1000, 200_000]}, load={"requests": 5})
    )
    run_sweep(sweep, tmp_path / "r.jsonl", Inline(SimulatedRuns(sweep)))
    errors = {(run.arm["profile.tp"], run.arm["profile.kv_capacity_tokens"]): run.error for run in read_runs(tmp_path / "r.jsonl")}
    assert "do not divide" in str(errors[3, 1000]) and "exceeds a worker's KV cache of 1,000" in str(errors[2, 1000])
    assert errors[2, 200_000] is None
    (good,) = (run for run in read_runs(tmp_path / "r.jsonl") if run.error is None)
    assert good.gpus == 4 and good.figures.requests > 0 and good.output_per_gpu > 0


def test_a_process_that_crashes_costs_its_run_only(make: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep, file = make(axes={"load.live_sessions": [1, 2]}, seeds=3), tmp_path / "r.jsonl"
    summary = run_sweep(sweep, file, Processes(samples.crashing, jobs=2))
    assert sorted(run.seed for run in read_runs(file)) == [0, 0]
    assert sum("its process crashed (SIGKILL" in failure for failure in summary.failures) == 2
    assert sum("ZeroDivisionError: three by nothing" in failure for failure in summary.failures) == 2
    again = run_sweep(sweep, file, Inline())
    assert again.found == 2 and len(read_runs(file)) == 6, "what failed is tried again"


def test_a_process_that_cannot_start_ends_the_sweep(make: Callable[..., Sweep], tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="the trace is not there"):
        run_sweep(make(), tmp_path / "r.jsonl", Processes(samples.unable_to_start, jobs=1))


def test_progress_tells_the_time_left() -> None:
    progress = Progress(total=10, done=4, found=2, started_at=time.perf_counter() - 8)
    assert progress.left_s == pytest.approx(24, rel=0.01)
    assert Progress(total=10, done=2, found=2).left_s is None


# The command


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(sweep_command, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_trace(tmp_path / "t.jsonl", generate(2, 1, 20_000))
    return write_sweep(tmp_path, load={"requests": 10}, axes={"load.live_sessions": [1, 2], "policy": ["warm", "random"]})


def test_check_and_dry_run_say_what_would_happen(file: Path) -> None:
    checked = invoke(file, "--check")
    assert checked.exit_code == 0, checked.output
    assert "4 configurations x 1 seeds = 4 runs" in checked.output and "time: about" in checked.output
    planned = invoke(file, "--dry-run")
    assert planned.output.count("random") == 2 and "4 configurations" in planned.output


def test_the_command_writes_results_and_shows_the_front(file: Path) -> None:
    output = file.with_name("r.jsonl")
    result = invoke(file, "-o", output, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert len(read_runs(output)) == 4
    assert "front" in result.output and "4 runs of 4 configurations" in result.output
    assert "4 of them from before" in invoke(file, "-o", output).output


@pytest.mark.parametrize(
    ("changes", "arguments", "complaint"),
    [
        ({"axes": {"profile.tpp": [1]}}, ["-o", "r"], "axes.profile.tpp: 1: pools.0.profile.tpp: Extra inputs"),
        ({}, [], "name the results file with -o"),
        ({"trace": "absent.jsonl"}, ["--check"], "absent.jsonl: no such file"),
        ({"mode": "live"}, ["--ray", "-o", "r"], "--ray is for simulated sweeps"),
        ({"mode": "live", "axes": {"pd": ["1:1"]}}, ["-o", "r"], "axes.pd: 1:1: pd: not for mode: live"),
        ({"mode": "live", "axes": {"profile.tpp": [1]}}, ["-o", "r"], "profile.tpp: Extra inputs"),
    ],
)
def test_the_command_explains_mistakes(file: Path, changes: dict[str, Any], arguments: list[str], complaint: str) -> None:
    result = invoke(write_sweep(file.parent, **changes), *arguments)
    assert result.exit_code != 0 and complaint in " ".join(result.output.split())


@pytest.mark.parametrize("sample", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.name)
def test_sample_sweeps_are_accepted(sample: Path) -> None:
    result = invoke(sample, "--dry-run")
    assert result.exit_code == 0, result.output
    assert load_sweep(sample).trace.exists()


def test_the_agentic_sample_is_large_enough() -> None:
    assert len(list(load_sweep(SWEEPS / "agentic.yaml").grid().points())) >= 300


INTERRUPTED = """
import sys
from pathlib import Path
from loadgen import sweepcli
from loadgen.sweep.processes import Processes
from tests.loadgen import sweep_samples
if __name__ == "__main__":
    sweepcli._executor = lambda sweep, jobs, ray: Processes(sweep_samples.slow, jobs)
    sweepcli.sweep_command(sys.argv[1:])
"""


def test_ctrl_c_keeps_what_has_ended(file: Path, tmp_path: Path) -> None:
    script, output = tmp_path / "sweep.py", tmp_path / "r.jsonl"
    script.write_text(INTERRUPTED)
    write_sweep(file.parent, axes={"load.live_sessions": list(range(1, 400))})
    root = Path(sweep_config.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, script, file, "-o", output, "--jobs", "2"], env={"PYTHONPATH": str(root)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and (not output.exists() or output.stat().st_size == 0):
        time.sleep(0.05)  # another program's file: there is no event for its first line
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 130, said
    assert "goes on" in said and "Traceback" not in said
    assert 0 < len(read_runs(output)) < 399


def test_a_foreign_results_file_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"not": "a run"}\n')
    result = invoke(file, "-o", tmp_path / "r.jsonl")
    assert result.exit_code == 1 and "r.jsonl:1: not a run" in result.output


@pytest.mark.parametrize("text", ["dear diary", '{"id":"0"}\nnotes'])
def test_what_is_no_results_file_is_left_as_it_is(file: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "notes").write_text(text)
    result = invoke(file, "-o", tmp_path / "notes")
    assert result.exit_code == 1 and "notes" in result.output
    assert (tmp_path / "notes").read_text() == text


def test_results_that_cannot_be_written_are_told_before_the_first_run(file: Path, tmp_path: Path) -> None:
    result = invoke(file, "-o", tmp_path / "nowhere" / "r.jsonl")
    assert result.exit_code == 1 and "cannot be written" in result.output and "Traceback" not in result.output


def test_a_last_line_without_its_break_is_kept(make: Callable[..., Sweep], tmp_path: Path) -> None:
    file, sweep = tmp_path / "r.jsonl", make()
    run_sweep(sweep, file, Inline())
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    run_sweep(sweep, file, rest := Inline())
    assert not rest.tasks
    append_run(file, read_runs(file)[0])
    assert len(read_runs(file)) == 7


def test_partial_evaluators_reach_processes(make: Callable[..., Sweep], tmp_path: Path) -> None:
    processes = Processes(functools.partial(samples.plain), jobs=3)
    summary = run_sweep(make(), tmp_path / "r.jsonl", processes)
    assert not summary.failures and len(summary.runs) == 6
