"""Latency models: what was measured comes out of the built-in shapes, and what should not change the time does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import WorkerConfig
from workers.hardware import ACCELERATORS, MODELS, kv_capacity_tokens, latency_model
from workers.hardware.preset import preset, price_per_hour
from workers.latency import GPT_OSS_120B_H200, LATENCY_MODELS, LatencyModel
from workers.profile import Speculation, WorkerProfile


@dataclass(frozen=True)
class Anchor:
    """Something measured (or estimated by others), the model's value for it, and how far apart they may be."""

    what: str
    measured: float
    modelled: Callable[[], float]
    within: float  # relative


def prefill(model: str, accelerator: str, tokens: int, cached: int = 0, **configuration: object) -> Callable[[], float]:
    """Seconds of a prefill in chunks of 8,192."""

    def seconds() -> float:
        latency = latency_model(model, accelerator, **configuration)  # type: ignore[arg-type]
        return latency.prefill_s(tokens, tokens + cached) + (max(1, -(-tokens // 8192)) - 1) * latency.prefill_base

    return seconds


def itl(model: str, accelerator: str, batch: int, context: int, **configuration: object) -> Callable[[], float]:
    """Seconds per output token."""

    def seconds() -> float:
        latency = latency_model(model, accelerator, **configuration)  # type: ignore[arg-type]
        return latency.step_s(batch, batch * context) / latency.tokens_per_step

    return seconds


def capacity(model: str, accelerator: str, **configuration: object) -> Callable[[], float]:
    return lambda: kv_capacity_tokens(model, accelerator, **configuration)  # type: ignore[arg-type]


FP8 = {"weights": "fp8", "kv_dtype": "fp8"}
NVFP4 = {"weights": "nvfp4", "kv_dtype": "fp8"}
DEP16 = {**FP8, "attention_dp": 16, "ep": 16}
MTP = {**DEP16, "speculation": "mtp", "num_drafts": 3}
SPARK = {"kv_dtype": "fp8", "speculation": "dspark"}
ANCHORS = [
    Anchor("Qwen3-32B, 2 H100, 8,192 tokens (llm-d R_peak 20,480/s)", 0.400, prefill("qwen3-32b", "h100", 8192, tp=2), 0.20),
    Anchor("Qwen3-32B, 2 H100, 8,192 tokens (llm-d recipe 15,928/s)", 0.514, prefill("qwen3-32b", "h100", 8192, tp=2), 0.15),
    Anchor("Qwen3-32B-FP8, 2 H200, 100k cold (aiconfigurator)", 12.1, prefill("qwen3-32b", "h200", 100_000, tp=2, **FP8), 0.10),
    Anchor("Qwen3-32B-FP8, 2 H200, 4k on 96k (aiconfigurator)", 0.834, prefill("qwen3-32b", "h200", 4000, 96_000, tp=2, **FP8), 0.10),
    Anchor("Qwen3-32B-FP8, 2 H200, 2k on 100k (aiconfigurator)", 0.437, prefill("qwen3-32b", "h200", 2000, 100_000, tp=2, **FP8), 0.10),
    Anchor("gpt-oss-120B, H200, 2,048 tokens (llm-d)", 0.078, prefill("gpt-oss-120b", "h200", 2048), 0.15),
    Anchor("gpt-oss-120B, H200, 8,192 tokens (llm-d)", 0.250, prefill("gpt-oss-120b", "h200", 8192), 0.15),
    Anchor("gpt-oss-120B, H200, 49,152 tokens (llm-d)", 1.988, prefill("gpt-oss-120b", "h200", 49_152), 0.15),
    Anchor("gpt-oss-120B, H100, 8,192 tokens (llm-d R_peak 39,065/s)", 0.210, prefill("gpt-oss-120b", "h100", 8192), 0.20),
    Anchor("GLM-5.2-NVFP4, 8 B200 TP8, 32,768 tokens (llm-d)", 1.369, prefill("glm-5.2", "b200", 32_768, tp=8, **NVFP4), 0.15),
    Anchor(
        "GLM-5.2-NVFP4, 4 B300 DEP4, 8,192 tokens (47,806/s)", 0.1714, prefill("glm-5.2", "b300", 8192, attention_dp=4, ep=4, **NVFP4), 0.15
    ),
    Anchor("GLM-5.2-FP8, 16 H200 DEP16, step at batch 32 (llm-d)", 0.0286, itl("glm-5.2", "h200", 32, 50_000, **DEP16), 0.10),
    Anchor("GLM-5.2-FP8, 16 H200 DEP16, step at batch 64 (llm-d)", 0.0307, itl("glm-5.2", "h200", 64, 50_000, **DEP16), 0.10),
    Anchor("GLM-5.2-FP8, 16 H200 DEP16, step at batch 128 (llm-d)", 0.0351, itl("glm-5.2", "h200", 128, 50_000, **DEP16), 0.10),
    Anchor("the same with MTP-3, ITL at batch 32 (llm-d)", 0.0135, itl("glm-5.2", "h200", 32, 50_000, **MTP), 0.15),
    Anchor("the same with MTP-3, ITL at batch 128 (llm-d)", 0.0171, itl("glm-5.2", "h200", 128, 50_000, **MTP), 0.15),
    Anchor("Kimi K3, 8 GB300 TP8, batch 1 (vLLM, 111 tok/s)", 0.0090, itl("kimi-k3", "gb300", 1, 1000, tp=8, kv_dtype="fp8"), 0.15),
    Anchor("Kimi K3, 16 GB300 TP16, batch 1 (vLLM, 118 tok/s)", 0.0085, itl("kimi-k3", "gb300", 1, 1000, tp=16, kv_dtype="fp8"), 0.15),
    Anchor("Kimi K3, 8 GB300 TP8, DSpark, batch 1 (331 tok/s)", 1 / 331, itl("kimi-k3", "gb300", 1, 1000, tp=8, **SPARK), 0.25),
    Anchor("Kimi K3, 16 GB300 TP16, DSpark, batch 1 (370 tok/s)", 1 / 370, itl("kimi-k3", "gb300", 1, 1000, tp=16, **SPARK), 0.15),
    # InferenceX, 1,024 tokens in and out, time per output token; the prompts of others are prefilled in between (3 to 5 % of it)
    Anchor("Llama-3.1-70B-FP8, 1 H200, batch 4 (InferenceX, vLLM)", 0.0215, itl("llama-3-70b", "h200", 4, 1536, **FP8), 0.15),
    Anchor("Llama-3.1-70B-FP8, 8 H200, batch 4 (InferenceX, vLLM)", 0.0079, itl("llama-3-70b", "h200", 4, 1536, tp=8, **FP8), 0.15),
    Anchor("gpt-oss-120B, 1 H200, batch 4 (InferenceX, vLLM)", 0.0063, itl("gpt-oss-120b", "h200", 4, 1536), 0.15),
    Anchor("gpt-oss-120B, 1 H200, batch 64 (InferenceX, vLLM)", 0.0248, itl("gpt-oss-120b", "h200", 64, 1536), 0.15),
    Anchor("GLM-5-FP8, 8 H200 TP8, batch 4 (InferenceX, SGLang)", 0.0179, itl("glm-5", "h200", 4, 1536, tp=8, **FP8), 0.15),
    Anchor("GLM-5-NVFP4, 8 B200 TP8, batch 4 (InferenceX, SGLang)", 0.0143, itl("glm-5", "b200", 4, 1536, tp=8, **NVFP4), 0.15),
    Anchor("KV tokens: Qwen3-32B-FP8, 1 H200 (aiconfigurator)", 738e3, capacity("qwen3-32b", "h200", **FP8), 0.10),
    Anchor("KV tokens: Qwen3-32B-FP8, 4 H200 (aiconfigurator)", 3.75e6, capacity("qwen3-32b", "h200", tp=4, **FP8), 0.10),
    Anchor("KV tokens: Qwen3-32B, 2 H100 (llm-d)", 307_328, capacity("qwen3-32b", "h100", tp=2), 0.10),
    Anchor("KV tokens: gpt-oss-120B, 2 H100 (aiconfigurator)", 2.28e6, capacity("gpt-oss-120b", "h100", tp=2), 0.10),
    Anchor("KV tokens: GLM-5.2-FP8, 8 H200 TP8 (llm-d)", 598e3, capacity("glm-5.2", "h200", tp=8, **FP8), 0.10),
    Anchor("KV tokens: GLM-5.2-FP8, 8 H200 DEP8 (llm-d)", 1.77e6, capacity("glm-5.2", "h200", attention_dp=8, **FP8), 0.10),
]


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda anchor: anchor.what)
def test_what_was_measured_comes_out(anchor: Anchor) -> None:
    assert anchor.modelled() == pytest.approx(anchor.measured, rel=anchor.within)


def test_attention_data_parallelism_holds_what_tensor_parallelism_replicates() -> None:
    """MLA's KV: each tensor-parallel rank holds all of it. Grouped-query attention is sharded by both, and pays for replicated weights."""
    assert kv_capacity_tokens("glm-5.2", "h200", attention_dp=8, **FP8) > 2.5 * kv_capacity_tokens("glm-5.2", "h200", tp=8, **FP8)
    coder = {"weights": "fp8", "kv_dtype": "fp8"}
    assert kv_capacity_tokens("qwen3-coder-480b", "h200", tp=8, **coder) > kv_capacity_tokens(
        "qwen3-coder-480b", "h200", attention_dp=8, **coder
    )


def test_speculation_pays_at_a_small_batch_and_not_at_a_large_one() -> None:
    plain = latency_model("qwen3-32b", "h100", tp=2, **FP8)
    drafts = latency_model("qwen3-32b", "h100", tp=2, speculation="draft_model", num_drafts=8, **FP8)
    gains = [(plain.step_s(b, 0)) / (drafts.step_s(b, 0) / drafts.tokens_per_step) for b in (1, 8, 64, 256)]
    assert gains[0] > 1.3
    assert gains[-1] < 1.0
    assert all(later < earlier for earlier, later in pairwise(gains))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("accelerator", ["h200", "b300"])
def test_more_gpus_and_fewer_bits_are_never_slower_at_a_large_batch(model: str, accelerator: str) -> None:
    def step(**configuration: object) -> float:
        return latency_model(model, accelerator, **configuration).step_s(64, 64 * 30_000)  # type: ignore[arg-type]

    assert step(tp=8) < step(tp=4)
    assert step(tp=8, weights="fp8", kv_dtype="fp8") <= step(tp=8, weights="bf16")
    wide = latency_model(model, accelerator, attention_dp=8, ep=8).prefill_s(8192, 8192)
    assert wide < latency_model(model, accelerator, attention_dp=4, ep=4).prefill_s(8192, 8192)


def test_the_kernel_factor_multiplies_every_time() -> None:
    whole, half = latency_model("glm-5.2", "b300", tp=8), latency_model("glm-5.2", "b300", tp=8, kernel=0.5)
    assert half.prefill_s(1000, 9000) == pytest.approx(whole.prefill_s(1000, 9000) / 2)
    assert half.step_s(9, 9000) == pytest.approx(whole.step_s(9, 9000) / 2)


@given(st.integers(0, 100_000), st.integers(1, 100_000), st.integers(1, 20_000))
def test_a_prefill_costs_the_same_whole_or_in_chunks(cached: int, new: int, chunk: int) -> None:
    model = LATENCY_MODELS["qwen3-32b-h100-tp2"]
    chunks, done = 0.0, 0
    while done < new:
        size = min(chunk, new - done)
        done += size
        chunks += model.prefill_s(size, cached + done) - model.prefill_base
    assert chunks + model.prefill_base == pytest.approx(model.prefill_s(new, cached + new))


def test_gpt_oss_recompute_times_are_within_three_percent() -> None:
    for tokens, measured in ((2048, 0.078), (8192, 0.250), (16_384, 0.510), (32_768, 1.173), (49_152, 1.988)):
        assert GPT_OSS_120B_H200.prefill_s(tokens, tokens) == pytest.approx(measured, rel=0.03)


# Profiles


def test_latency_auto_follows_the_profile() -> None:
    fields = {
        "model": "zai-org/GLM-5.2-FP8",
        "accelerator": "NVIDIA H200",
        "attention_dp": 8,
        "quantization": "fp8",
        "kv_dtype": "fp8_e4m3",
    }
    profile = WorkerProfile.model_validate({**fields, "latency": "auto"})
    assert profile.latency_model() == latency_model("glm-5.2", "h200", attention_dp=8, **FP8)
    drafting = WorkerProfile(**fields, latency="auto", speculation=Speculation(method="mtp", num_tokens=2))  # type: ignore[arg-type]
    assert drafting.latency_model() == latency_model("glm-5.2", "h200", attention_dp=8, speculation="mtp", num_drafts=2, **FP8)
    slower = WorkerProfile(**fields, latency="auto", kernel_factor=2)  # type: ignore[arg-type]
    assert slower.latency_model().decode_base == pytest.approx(2 * profile.latency_model().decode_base)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": None}, "needs 'model' and 'accelerator'"),
        ({"model": "my-finetune"}, "no built-in shape of model 'my-finetune'; known: llama-3-70b"),
        ({"accelerator": "tpu-v7"}, "unknown accelerator 'tpu-v7'; known: a100, h100"),
        ({"quantization": "q5_k"}, "unknown quantization 'q5_k'; known: bf16"),
        ({"kv_dtype": "turbo"}, "unknown KV cache type 'turbo'"),
        ({"speculation": "psychic"}, "unknown speculation method 'psychic'; known: eagle"),
    ],
)
def test_what_auto_cannot_resolve_is_named(change: dict[str, object], says: str) -> None:
    fields = {"model": "glm-5.2", "accelerator": "h200", "latency": "auto"} | change
    with pytest.raises(KeyError) as error:
        WorkerProfile.model_validate(fields).latency_model()
    assert says in error.value.args[0]
    with pytest.raises(ValueError, match=says.split("'")[0].split(";")[0]):
        WorkerConfig.model_validate({**fields, "url": "http://a:1"})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="known: auto, qwen3-32b-h100-tp2"):
        WorkerProfile(latency="warp").latency_model()


def test_a_preset_is_a_whole_profile() -> None:
    profile = preset("glm-5.2", "b300", tp=8, quantization="nvfp4", kv_dtype="fp8", max_num_seqs=64)
    assert (profile.gpus, profile.gpu_count, profile.max_num_seqs, profile.block_size) == (8, 8, 64, 16)
    assert profile.price_per_hour == 8 * ACCELERATORS["b300"].price_per_hour == price_per_hour(profile)
    assert profile.kv_capacity_tokens == kv_capacity_tokens("glm-5.2", "b300", tp=8, **NVFP4)
    assert isinstance(profile.latency_model(), LatencyModel)
    assert preset("glm-5.2", "b300", attention_dp=8, quantization="nvfp4").ep == 8


@pytest.mark.parametrize(("model", "says"), [("kimi-k3", "does not fit 8 x h100"), ("gpt-7", "no built-in shape")])
def test_a_preset_that_cannot_be_says_why(model: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        preset(model, "h100", tp=8)
