"""The monitor: who is up, what they serve, and what their metrics tell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.stack import ScriptedWorker, until
from workers.monitor import Endpoint, Monitor, kv_capacity, parse_samples
from workers.profile import WorkerProfile

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",x="a\\"b"} 1.0
vllm:odd NaN
"""
SGLANG = "sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\nsglang:token_usage 0.5\nsglang:max_total_num_tokens 123456\n"


def test_samples_are_summed_over_their_labels() -> None:
    samples = parse_samples(VLLM)
    assert samples["vllm:num_requests_running"] == 5.0 and samples["vllm:num_requests_waiting"] == 7.0
    assert parse_samples("garbage {\nx\n") == {}


def test_kv_capacity_of_each_engine() -> None:
    assert kv_capacity(VLLM) == (16_000, 16)
    assert kv_capacity(SGLANG) == (123_456, None)
    assert kv_capacity("") == (None, None)
    assert kv_capacity('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1') == (None, None)


@asynccontextmanager
async def watched(
    worker: ScriptedWorker, profile: WorkerProfile | None = None, stated: frozenset[str] = frozenset()
) -> AsyncIterator[tuple[Endpoint, list[str]]]:
    changes: list[str] = []
    endpoint = Endpoint("w", worker.url, profile or WorkerProfile(), stated=stated)
    monitor = Monitor(
        [endpoint], lambda _, what: changes.append(what), interval_s=0.02, timeout_s=0.2, failures=2, scrape_s=0.05
    )  # fmt: skip
    await monitor.start()
    try:
        yield endpoint, changes
    finally:
        await monitor.stop()


async def test_start_finds_out_everything_about_a_worker() -> None:
    async with ScriptedWorker(models=("m", "lora"), metrics=VLLM) as worker, watched(worker) as (endpoint, changes):
        assert changes == ["discovered", "up"] and endpoint.up
        assert endpoint.models == ["m", "lora"] and endpoint.max_model_len == 100_000
        profile = endpoint.profile
        assert (profile.engine, profile.model, profile.kv_capacity_tokens, profile.block_size) == ("vllm", "m", 16_000, 16)
        assert (endpoint.running, endpoint.waiting, endpoint.kv_use) == (5.0, 7.0, 0.25)
        worker.metrics = SGLANG
        await until(lambda: endpoint.running == 4.0, "another scrape")
        assert changes[-1] == "load" and endpoint.profile.engine == "vllm"


async def test_what_the_configuration_states_is_not_overruled() -> None:
    profile = WorkerProfile(engine="sglang", kv_capacity_tokens=5_000)
    stated = frozenset({"engine", "kv_capacity_tokens"})
    async with ScriptedWorker(metrics=VLLM) as worker, watched(worker, profile, stated) as (endpoint, _):
        assert endpoint.profile.kv_capacity_tokens == 5_000 and endpoint.profile.engine == "sglang"
        assert endpoint.profile.block_size == 16


async def test_a_refused_connection_is_down_at_once_and_up_again_by_the_first_good_probe() -> None:
    async with ScriptedWorker() as worker, watched(worker) as (endpoint, changes):
        await worker.stop()
        await until(lambda: not endpoint.up, "down")
        worker.models = ("other",)
        await worker.start()
        await until(lambda: endpoint.up, "up")
        assert [c for c in changes if c != "load"] == ["discovered", "up", "down", "discovered", "up"]
        assert endpoint.models == ["other"]


async def test_a_silent_worker_is_down_after_several_probes_and_not_before() -> None:
    async with ScriptedWorker() as worker, watched(worker) as (endpoint, _):
        endpoint.failures = 0
        worker.silent = True
        failed: list[int] = []
        while endpoint.up:
            failed.append(endpoint.failures)
            await asyncio.sleep(0.01)
        assert max(failed) >= 1  # one failed probe had not been enough
        worker.silent = False
        await until(lambda: endpoint.up, "up")


async def test_a_worker_that_is_not_up_at_the_start_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmroute.monitor")  # whatever other tests' commands have silenced
    async with ScriptedWorker() as worker:
        await worker.stop()
        async with watched(worker) as (endpoint, changes):
            await until(lambda: endpoint.failures > 3)
    said = [record.getMessage().partition(":")[0] for record in caplog.records if record.name == "warmroute.monitor"]
    assert said == ["worker w is not up"]
    assert changes == []


async def test_a_worker_that_is_not_there_yet_is_found_when_it_comes() -> None:
    async with ScriptedWorker() as worker:
        await worker.stop()
        async with watched(worker) as (endpoint, changes):
            assert not endpoint.up and changes == []
            await worker.start()
            await until(lambda: endpoint.up, "up")


async def test_an_unhealthy_answer_takes_a_worker_out() -> None:
    async with ScriptedWorker() as worker, watched(worker) as (endpoint, _):
        worker.healthy = False
        await until(lambda: not endpoint.up, "down")
        worker.healthy = True
        await until(lambda: endpoint.up, "up")
