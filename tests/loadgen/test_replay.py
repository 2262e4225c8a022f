from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadgen.metrics import RunResult
from loadgen.replay import Progress, ReplayError, ReplayOptions, replay
from loadgen.trace import Request, Session
from tests.loadgen.fake_worker import FakeWorker, Seen


def growing(id: str, steps: int = 4, gap_s: float = 0.0, **fields: Any) -> Session:
    requests = [
        Request(128 * n + 7, 4, ((1, 2 * n),), kind="tool" if n > 1 else "user", gap_s=gap_s if n > 1 else 0.0) for n in range(1, steps + 1)
    ]
    return Session(id, requests, **fields)


async def run(worker: FakeWorker, sessions: list[Session], **options: Any) -> RunResult:
    result = await replay(ReplayOptions(sessions, worker.url, **{"ramp_s": 0.0, "live_sessions": 2, **options}))
    (only,) = result.runs.values()
    return only


def by_session(seen: list[Seen]) -> dict[str, list[Seen]]:
    sessions: dict[str, list[Seen]] = {}
    for request in seen:
        sessions.setdefault(request.headers["x-session-id"], []).append(request)
    return sessions


async def test_every_session_is_played_once_by_default() -> None:
    async with FakeWorker() as worker:
        result = await run(worker, [growing("a"), growing("b"), growing("c", 2)])
    assert (result.requests, result.errors, len(worker.seen)) == (10, 0, 10)
    assert sorted(len(seen) for seen in by_session(worker.seen).values()) == [2, 4, 4]
    assert result.worker_shares == {"w1": 1.0}
    assert not result.interrupted
    assert result.output_tokens_per_s == pytest.approx(10 * 4 / result.duration_s)


async def test_a_turn_waits_for_the_answer_before_it_and_its_gap() -> None:
    async with FakeWorker() as worker:
        await run(worker, [growing("a", gap_s=0.4), growing("b", gap_s=0.4)], time_scale=0.25)
        await run(worker, [growing("capped", gap_s=1000.0, steps=2)], max_gap_s=0.1)
    for seen in by_session(worker.seen).values():
        for before, after in pairwise(seen):
            assert after.arrived_at - before.answered_at >= 0.099


async def test_as_many_sessions_live_as_asked_for() -> None:
    release = asyncio.Event()
    async with FakeWorker(hold=release) as worker:
        task = asyncio.create_task(run(worker, [growing(str(n)) for n in range(9)], live_sessions=3))
        await worker.until_seen(3)
        release.set()
        result = await task
    assert result.requests == 36
    assert worker.most_in_flight == 3


async def test_request_count_is_exact_and_sessions_start_over_with_new_prompts() -> None:
    async with FakeWorker() as worker:
        result = await run(worker, [growing("a", 3, scope="global")], requests=7, warmup=1, live_sessions=1)
    assert (result.requests, len(worker.seen)) == (7, 8)
    plays = by_session(worker.seen)
    assert len(plays) == 3
    first, second, _ = plays.values()
    assert first[0].text[:256] != second[0].text[:256]
    # The second lap's first prompt is cold, so the bound has one cold prompt more than a single lap.
    assert result.hit_bound is not None
    assert result.hit_bound < (135 + 263) / (135 + 263 + 391)


async def test_hit_rate_is_the_servers_and_the_bound_is_next_to_it() -> None:
    async with FakeWorker() as worker:
        result = await run(worker, [growing("a"), growing("b")], kv_capacity_tokens=100_000)
    prompts = [128 * n + 7 for n in range(1, 5)]
    hits = [0, *(128 * n for n in range(1, 4))]
    assert result.hit_bound == pytest.approx(sum(hits) / sum(prompts))
    assert result.hit_rate == pytest.approx(result.hit_bound)
    assert result.hit_bound_lru == pytest.approx(result.hit_bound)
    assert result.uncached_input_tokens_per_s == pytest.approx(2 * (sum(prompts) - sum(hits)) / result.duration_s)


async def test_a_server_that_does_not_report_hits_has_no_hit_rate() -> None:
    async with FakeWorker(report_cached=False) as worker:
        result = await run(worker, [growing("a")])
    assert result.hit_rate is None
    assert result.hit_bound is not None


async def test_errors_are_counted_by_kind_and_sessions_go_on() -> None:
    async with FakeWorker(fail_every=4, cut_every=5) as worker:
        result = await run(worker, [growing("a", 10)], live_sessions=1)
    assert (result.requests, result.errors) == (10, 4)
    assert result.error_kinds == {"HTTP 503: overloaded": 2, "connection lost during the answer": 2}


async def test_subagents_run_side_by_side_and_their_parent_waits_for_them() -> None:
    parent = growing("parent", 3)
    parent.requests[1].spawns = [growing(f"parent/{name}", 3, gap_s=0.02) for name in ("x", "y")]
    async with FakeWorker() as worker:
        await run(worker, [parent])
    order = [seen.session for seen in worker.seen]
    assert order[:2] == ["parent", "parent"]
    assert order[-1] == "parent"
    assert sorted(order[2:8]) == ["parent/x"] * 3 + ["parent/y"] * 3
    assert set(order[2:4]) == {"parent/x", "parent/y"}


async def test_requests_are_spread_over_gateways_in_the_same_way_for_the_same_seed() -> None:
    async def shares(seed: int, **options: Any) -> list[list[tuple[str, int]]]:
        """What each of three gateways was sent: (session, length of the prompt)."""
        async with FakeWorker() as a, FakeWorker() as b, FakeWorker() as c:
            sessions = [growing(str(n)) for n in range(12)]
            more = (b.url, c.url)
            await replay(ReplayOptions(sessions, a.url, more_urls=more, ramp_s=0.0, seed=seed, policies=("warm",), **options))
            assert [gateway.policies for gateway in (a, b, c)] == [["warm"]] * 3
            return [sorted((seen.session, len(seen.text)) for seen in gateway.seen) for gateway in (a, b, c)]

    by_request = await shares(1, live_sessions=1)
    assert sum(map(len, by_request)) == 48 and min(map(len, by_request)) > 0
    assert by_request == await shares(1, live_sessions=8)
    assert by_request != await shares(2)
    by_session = [{session for session, _ in share} for share in await shares(1, spread="session")]
    assert sum(map(len, by_session)) == 12 and min(map(len, by_session)) > 0


async def test_subagents_stay_at_their_sessions_gateway() -> None:
    async with FakeWorker() as a, FakeWorker() as b:
        parents = [growing(f"p{n}", 2) for n in range(8)]
        for parent in parents:
            parent.requests[0].spawns = [growing(f"{parent.id}/x", 2)]
        await replay(ReplayOptions(parents, a.url, more_urls=(b.url,), spread="session", ramp_s=0.0))
        at_a, at_b = ({seen.session.partition("/")[0] for seen in gateway.seen} for gateway in (a, b))
    assert not at_a & at_b and len(at_a | at_b) == 8


async def test_one_of_several_gateways_that_is_gone_costs_only_its_own_requests() -> None:
    async with FakeWorker() as worker:
        options = ReplayOptions([growing("a", 100)], worker.url, more_urls=("http://127.0.0.1:9",), ramp_s=0.0)
        result = (await replay(options)).runs["current"]
    assert result.requests == 100 and result.errors == 100 - len(worker.seen) and len(worker.seen) > 20


async def test_policies_are_set_in_turn_with_prompts_of_their_own() -> None:
    async with FakeWorker() as worker:
        options = ReplayOptions([growing("a", scope="global")], worker.url, policies=("warm", "round-robin"), ramp_s=0.0)
        result = await replay(options)
    assert list(result.runs) == ["warm", "round-robin"]
    assert [seen.policy for seen in worker.seen] == ["warm"] * 4 + ["round-robin"] * 4
    assert worker.seen[0].text != worker.seen[4].text
    assert result.runs["warm"].hit_rate == result.runs["round-robin"].hit_rate
    assert worker.policies == ["warm", "round-robin", "warm"]  # left as it was asked for first
    figures = result.to_json()["warm"]
    assert {"hit_rate", "hit_bound", "ttft_p50_s", "itl_p99_s", "e2e_p90_s", "output_tokens_per_s", "schedule_lag_p99_s"} <= figures.keys()


async def test_requests_are_chat_requests_for_the_servers_model() -> None:
    async with FakeWorker() as worker:
        await run(worker, [growing("a", 1, system_tokens=32)], ignore_eos=False, session_header=False)
        await run(worker, [growing("a", 1)], model="mine")
    first, second = worker.seen
    assert first.body["model"] == "fake"
    assert first.body["max_tokens"] == 4
    assert first.body["stream"] is True
    assert first.body["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in first.body["messages"]] == ["system", "user"]
    assert "ignore_eos" not in first.body
    assert "x-session-id" not in first.headers
    assert (second.body["model"], second.body["ignore_eos"]) == ("mine", True)


async def test_duration_ends_sending_and_awaits_what_is_in_flight() -> None:
    async with FakeWorker() as worker:
        result = await run(worker, [growing("a", 3, gap_s=0.01)], duration_s=0.3)
    assert result.requests == len(worker.seen) > 3
    assert result.errors == 0


async def test_a_stop_before_the_first_answer_measured_no_time() -> None:
    stop = asyncio.Event()
    async with FakeWorker(hold=asyncio.Event()) as worker:
        options = ReplayOptions([growing("a", 3)], worker.url, ramp_s=0.0)
        running = asyncio.create_task(replay(options, stop=stop))
        await worker.until_seen(1)
        stop.set()
        only = (await running).runs["current"]
    assert only.interrupted and only.requests == 0
    assert f"{only.duration_s} {only.output_tokens_per_s} {only.uncached_input_tokens_per_s}" == "0.0 0.0 0.0"


async def test_stop_ends_early_and_keeps_what_was_measured() -> None:
    stop = asyncio.Event()
    release = asyncio.Event()
    release.set()
    async with FakeWorker(hold=release) as worker:

        def on_progress(progress: Progress) -> None:
            if progress.done >= 3:
                release.clear()
                stop.set()

        options = ReplayOptions([growing("a", 500, gap_s=0.2)], worker.url, ramp_s=0.0, live_sessions=1)
        result = await replay(options, on_progress, stop)
    only = result.runs["current"]
    assert only.interrupted
    assert 3 <= only.requests < 500
    assert only.errors == 0


async def test_open_loop_starts_sessions_at_their_times_whatever_the_server_does() -> None:
    release = asyncio.Event()
    sessions = [growing(f"s{n}", 1, start_s=100.0 + n) for n in (3, 1, 2, 0)]
    async with FakeWorker(hold=release) as worker:
        task = asyncio.create_task(run(worker, sessions, mode="open", speedup=20.0))
        await worker.until_seen(4)
        release.set()
        assert (await task).requests == 4
    assert [seen.session for seen in worker.seen] == ["s0", "s1", "s2", "s3"]
    for before, after in pairwise(worker.seen):
        assert after.arrived_at - before.arrived_at > 0.03


async def test_open_loop_at_a_rate() -> None:
    async with FakeWorker() as worker:
        result = await run(worker, [growing("a", 1)], mode="open", rate=500.0, requests=20)
    assert result.requests == 20


async def test_tokens_of_an_event_share_its_gap() -> None:
    async with FakeWorker(tokens_per_event=4) as worker:
        result = await run(worker, [growing("a")])
    assert result.output_tokens_per_s == pytest.approx(4 * 4 / result.duration_s)


async def test_context_limit_cuts_sessions() -> None:
    async with FakeWorker() as worker:
        assert (await run(worker, [growing("a")], max_context=300)).requests == 2
        with pytest.raises(ReplayError, match="within 10 tokens"):
            await run(worker, [growing("a")], max_context=10)


async def test_lag_is_measured() -> None:
    async with FakeWorker() as worker:
        result = await run(worker, [growing("a", gap_s=0.01)])
    assert result.schedule_lag_p50_s is not None
    assert result.schedule_lag_p99_s is not None
    assert result.schedule_lag_p99_s >= result.schedule_lag_p50_s >= 0


async def test_what_cannot_start_says_what_to_do() -> None:
    async with FakeWorker(refuse_admin=True) as worker:
        with pytest.raises(ReplayError, match=r"refused the policy 'warm'.*404.*leave them out"):
            await replay(ReplayOptions([growing("a")], worker.url, policies=("warm",)))
    with pytest.raises(ReplayError, match="start the gateway first"):
        await replay(ReplayOptions([growing("a")], "http://127.0.0.1:9"))
    with pytest.raises(ReplayError, match="no sessions"):
        await replay(ReplayOptions([], "http://127.0.0.1:9"))


async def test_a_server_that_goes_away_ends_the_replay() -> None:
    with pytest.raises(ReplayError, match="stopped taking connections"):
        await replay(ReplayOptions([growing("a", 50)], "http://127.0.0.1:9", model="m", ramp_s=0.0))


async def test_real_texts_hit_as_their_prefixes_do(real_traces: Path) -> None:
    async with FakeWorker() as worker:
        result = await replay(ReplayOptions(real_traces / "miniswe", worker.url, ramp_s=0.0, live_sessions=4, time_scale=0.0, requests=60))
    run = result.runs["current"]
    assert run.errors == 0
    assert run.hit_bound is not None
    assert run.hit_rate == pytest.approx(run.hit_bound, abs=0.03)
