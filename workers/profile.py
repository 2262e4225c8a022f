"""What a worker is: one engine configuration, as the gateway and the simulated engine both need it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from workers.latency import LATENCY_MODELS, QWEN3_32B_H100_TP2, LatencyModel

Engine = Literal["auto", "vllm", "sglang", "trtllm", "sim"]
Role = Literal["both", "prefill", "decode"]


class WorkerProfile(BaseModel):
    """One worker's engine configuration. Every field has a default, so that a bare URL is enough to start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Engine = Field("auto", description="engine behind the URL; auto asks it")
    model: str | None = Field(None, description="served model name; asked from /v1/models when absent")
    accelerator: str | None = Field(None, description="e.g. h100, h200, b200")
    gpus: int | None = Field(None, ge=1, description="accelerators this worker uses; tp x pp (x attention dp) when absent")
    tp: int = Field(1, ge=1, description="tensor parallel size")
    pp: int = Field(1, ge=1, description="pipeline parallel size")
    ep: int = Field(1, ge=1, description="expert parallel size")
    attention_dp: int = Field(1, ge=1, description="attention data-parallel size")
    quantization: str | None = Field(None, description="weight quantization, e.g. fp8, nvfp4, mxfp4")
    kv_dtype: str | None = Field(None, description="KV cache data type, e.g. fp8_e4m3")
    speculation: str | None = Field(None, description="speculative decoding method, e.g. eagle3, mtp, dspark, ngram")
    max_num_seqs: int = Field(256, ge=1, description="batch slots")
    max_num_batched_tokens: int = Field(8192, ge=1, description="token budget of one engine step (chunk size)")
    kv_capacity_tokens: int = Field(1_000_000, ge=1, description="tokens of KV cache the worker holds")
    block_size: int = Field(16, ge=1, description="engine's KV block in tokens")
    role: Role = Field("both", description="both, or one side of prefill/decode disaggregation")
    price_per_hour: float = Field(0.0, ge=0, description="currency units per hour for the whole worker")
    latency: LatencyModel | str = Field(
        QWEN3_32B_H100_TP2, description="latency coefficients, or the name of a built-in set: " + ", ".join(LATENCY_MODELS)
    )

    def latency_model(self) -> LatencyModel:
        """The coefficients; raises KeyError naming the known sets for an unknown name."""
        if isinstance(self.latency, LatencyModel):
            return self.latency
        try:
            return LATENCY_MODELS[self.latency]
        except KeyError:
            raise KeyError(f"unknown latency model {self.latency!r}; known: {', '.join(LATENCY_MODELS)}") from None
