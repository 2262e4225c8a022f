"""What engines report and what is seen corrects the estimates."""

from __future__ import annotations

import random

import pytest

from routing.calibration import ConfigurationScale, WorkerScale
from routing.router import Router
from tests.routing.virtual import blocks, new_router, request
from workers.latency import QWEN3_32B_H100_TP2
from workers.profile import WorkerProfile


def serve(router: Router, speed: dict[str, float], count: int, now: float = 0.0) -> float:
    """First turns, one after the other, on workers that take `speed[worker]` times what the model says."""
    for _ in range(count):
        now += 60.0
        decision = router.decide(request(blocks(100), None), now)
        worker = decision.worker
        took = speed[worker.id] * worker.profile.latency_model().prefill_s(decision.prompt_tokens, decision.prompt_tokens)
        decision.reservation.first_token(now + took)
        decision.reservation.release(now + took)
        router.learn(decision, prompt_tokens=round(decision.prompt_tokens), cached_tokens=0, ttft_s=took)
    return now


@pytest.mark.parametrize("speed", [0.02, 0.5, 1.0, 5.0])
def test_the_scale_of_equal_workers_is_found_within_a_few_requests(speed: float) -> None:
    router = new_router(4)
    serve(router, dict.fromkeys(router.workers, speed), 12)
    for worker in router.workers.values():
        assert worker.prefill_scale == pytest.approx(speed, rel=0.35)


def test_equal_workers_that_are_faster_than_modelled_go_on_sharing_the_work() -> None:
    """The first one found to be fast must not get everything."""
    router = new_router(4)
    serve(router, dict.fromkeys(router.workers, 0.02), 200)
    counts = [w.live_sessions for w in router.workers.values()]
    assert max(counts) <= 1.6 * min(counts), counts


def test_a_worker_slower_than_its_kind_is_found_out_and_tried_again_when_it_has_recovered() -> None:
    shared = ConfigurationScale()
    workers = [WorkerScale(shared) for _ in range(4)]
    for _ in range(30):
        for number, worker in enumerate(workers):
            worker.observe(5.0 if number == 0 else 1.0, worker.value)
    assert workers[0].value > 3.0 and all(w.value == pytest.approx(1.0, rel=0.35) for w in workers[1:])
    slow = workers[0].value
    for _ in range(300):  # it gets nothing while the others go on
        for worker in workers[1:]:
            worker.observe(1.0, worker.value)
    assert workers[0].value < slow / 2
    assert workers[0].value == pytest.approx(1.0, rel=0.5)


def test_noise_does_not_move_the_scale_far_and_an_outlier_little() -> None:
    draw = random.Random(1)
    scale = WorkerScale(ConfigurationScale())
    for _ in range(200):
        scale.observe(draw.lognormvariate(0.0, 0.5), scale.value)
    before = scale.value
    assert before == pytest.approx(1.0, rel=0.3)
    scale.observe(10_000.0, scale.value)
    assert scale.value < 1.3 * before
    for observed, modelled in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        scale.observe(observed, modelled)
    assert 0 < scale.value < 1.3 * before


def test_workers_of_another_configuration_learn_apart() -> None:
    fast = WorkerProfile(latency=QWEN3_32B_H100_TP2.scaled(0.5))
    router = new_router([WorkerProfile(), fast])
    serve(router, {"w0": 1.0, "w1": 1.0}, 10)
    router.workers["w0"].observe_prefill(8.0, 1.0)
    assert router.workers["w1"].prefill_scale == pytest.approx(1.0, rel=0.05)
    # discovery tells that it is of the other kind after all: it learns with that from now on
    router.add_worker("w0", ["m"], fast.model_copy(update={"kv_capacity_tokens": 5}))
    assert router.workers["w0"].prefill_scale == pytest.approx(router.workers["w1"].prefill_scale, rel=0.05)
    router.remove_worker("w0")
    router.workers["w1"].observe_prefill(1.0, 1.0)


def test_a_time_that_is_mostly_wait_says_nothing_of_the_worker() -> None:
    router = new_router(1)
    [worker] = router.workers.values()
    router.decide(request(blocks(2000)), 0.0)
    behind = router.decide(request(blocks(4)), 0.0)
    assert behind.wait_s > behind.prefill_s
    router.learn(behind, prompt_tokens=None, cached_tokens=None, ttft_s=100.0)
    assert worker.prefill_scale == 1.0


def test_tokens_are_learned_from_usage() -> None:
    """A prompt of 4,000 bytes has 1,000 tokens until an engine says otherwise; the KV capacity follows in blocks."""
    router = new_router(1)
    capacity = router.memory.capacity_blocks("w0")
    prompt = blocks(100)
    decision = router.decide(request(prompt), 0.0)
    assert decision.prompt_tokens == 100 * 512 / 4
    for _ in range(50):
        router.learn(decision, prompt_tokens=100 * 512 // 2, cached_tokens=0, ttft_s=None)
    decision.reservation.release(1.0)
    assert router.decide(request(blocks(100)), 2.0).prompt_tokens == pytest.approx(100 * 512 / 2, rel=0.05)
    assert router.memory.capacity_blocks("w0") <= capacity


def test_an_engine_that_had_less_cached_than_expected_lowers_what_is_believed_of_it() -> None:
    router = new_router([WorkerProfile(kv_capacity_tokens=50_000)])
    prompt = blocks(200)
    first = router.decide(request(prompt, "s"), 0.0)
    first.reservation.release(1.0)
    router.learn(first, prompt_tokens=25_600, cached_tokens=0, ttft_s=None)
    before = router.memory.capacity_blocks("w0")
    second = router.decide(request(prompt + blocks(2), "s"), 2.0)
    assert second.cached_tokens == pytest.approx(25_600)
    second.reservation.release(3.0)
    router.learn(second, prompt_tokens=25_856, cached_tokens=1_000, ttft_s=None)
    assert router.memory.capacity_blocks("w0") < before
