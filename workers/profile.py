"""What a worker is: one engine configuration, as the gateway and the simulated engine both need it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from workers.hardware import latency_model
from workers.latency import LATENCY_MODELS, QWEN3_32B_H100_TP2, LatencyModel

Engine = Literal["auto", "vllm", "sglang", "trtllm", "sim"]
Role = Literal["both", "prefill", "decode"]
SchedulingPolicy = Literal["fcfs", "priority"]


SpeculationMethod = Literal["ngram", "suffix", "eagle", "eagle3", "mtp", "dspark", "dflash", "draft_model"]
_NEEDS_DRAFT = ("eagle", "eagle3", "dflash", "draft_model")
_DRAWS_FROM_TEXT = ("ngram", "suffix")
_DRAWS_TREES = ("eagle", "eagle3", "mtp")
_DROPS_LAST_BLOCK = ("eagle", "eagle3", "mtp", "dflash", "dspark")


class Speculation(BaseModel):
    """Speculative decoding: who drafts, and how much.

    `num_tokens` counts what is drafted per step, without the token that the model itself adds. Drafts are a chain unless `topk` is
    above 1: then they are a tree of `steps` levels, of which `num_tokens` nodes are verified.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: SpeculationMethod = Field(description="who drafts: the text so far (ngram, suffix), the model's MTP layer, or a draft model")
    model: str | None = Field(None, description="draft model: a Hugging Face name or a directory")
    num_tokens: int | None = Field(None, ge=1, description="drafted tokens per step; the draft model's own number when absent")
    steps: int | None = Field(None, ge=1, description="levels of the draft tree (eagle, eagle3, mtp)")
    topk: int | None = Field(None, ge=1, description="branches per level of the draft tree (eagle, eagle3, mtp)")
    ngram_max: int | None = Field(None, ge=1, description="longest n-gram to look up (ngram)")
    ngram_min: int | None = Field(None, ge=1, description="shortest n-gram to look up (ngram)")

    @model_validator(mode="after")
    def _complete(self) -> Speculation:
        if self.method in _NEEDS_DRAFT and self.model is None:
            raise ValueError(f"{self.method} needs a draft model; name it in 'model'")
        if self.method in _DRAWS_FROM_TEXT and self.model is not None:
            raise ValueError(f"{self.method} drafts from the text alone; leave out 'model'")
        if self.method in ("ngram", "eagle", "eagle3", "draft_model") and self.num_tokens is None:
            raise ValueError(f"{self.method} needs 'num_tokens'")
        if (self.steps or self.topk) and self.method not in _DRAWS_TREES:
            raise ValueError(f"{self.method} drafts no tree; leave out 'steps' and 'topk'")
        if (self.topk or 1) > 1 and (self.steps is None or self.num_tokens is None):
            raise ValueError("a draft tree (topk above 1) needs 'steps' and 'num_tokens'")
        if (self.topk or 1) == 1 and self.steps is not None and self.steps != self.num_tokens:
            raise ValueError("a chain has as many steps as tokens: leave out 'steps', or set 'topk' above 1 for a tree")
        if (self.ngram_max or self.ngram_min) and self.method != "ngram":
            raise ValueError(f"{self.method} looks up no n-grams; leave out 'ngram_max' and 'ngram_min'")
        if self.ngram_max and self.ngram_min and self.ngram_min > self.ngram_max:
            raise ValueError("'ngram_min' is above 'ngram_max'")
        return self


def _shape(value: object) -> str:
    return "str" if isinstance(value, str) else "Speculation"


# The method alone, where that is all that is known; told apart by shape, so that a fault is reported once.
SpeculationOrMethod = Annotated[Annotated[Speculation, Tag("Speculation")] | Annotated[str, Tag("str")], Discriminator(_shape)]


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
    speculation: SpeculationOrMethod | None = Field(None, description="speculative decoding; its method suffices, e.g. eagle3, mtp, ngram")
    max_num_seqs: int = Field(256, ge=1, description="batch slots")
    max_num_batched_tokens: int = Field(8192, ge=1, description="token budget of one engine step (chunk size)")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="most tokens of one prompt in a step while others run or wait; 0: as many as the budget has"
    )
    scheduling_policy: SchedulingPolicy = Field(
        "fcfs", description="order of waiting requests: fcfs by arrival, priority by priority first (lower values earlier)"
    )
    kv_capacity_tokens: int = Field(1_000_000, ge=1, description="tokens of KV cache the worker holds")
    block_size: int = Field(16, ge=1, description="engine's KV block in tokens")
    role: Role = Field("both", description="both, or one side of prefill/decode disaggregation")
    restore_host_s: float = Field(10e-6, ge=0, description="seconds a token takes from host memory to the accelerator (10 us: 25 GB/s)")
    restore_disk_s: float = Field(60e-6, ge=0, description="the same from disk or remote storage (60 us: 4 GB/s)")
    price_per_hour: float = Field(0.0, ge=0, description="currency units per hour for the whole worker")
    latency: LatencyModel | str = Field(
        QWEN3_32B_H100_TP2,
        description=f"latency coefficients, the name of a built-in set ({', '.join(LATENCY_MODELS)}), or auto: from this profile's "
        "model, accelerator, parallelism, quantization and speculation",
    )
    kernel_factor: float = Field(1.0, gt=0, description="with latency auto: every time is multiplied by this (0.8: kernels a fifth faster)")

    @property
    def gpu_count(self) -> int:
        """Accelerators of this worker."""
        return self.gpus or self.tp * self.pp * self.attention_dp

    @property
    def dropped_hit_tokens(self) -> int:
        """Tokens at the end of a prefix hit that the engine computes again: drafting from hidden states needs those of the last block.

        vLLM drops that block for these methods (config/speculative.py, use_eagle_block_drop); others are not known to.
        """
        method = self.speculation.method if isinstance(self.speculation, Speculation) else self.speculation
        return self.block_size if self.engine == "vllm" and method in _DROPS_LAST_BLOCK else 0

    def restore_token_s(self, tier: str) -> float:
        """Seconds to bring one token's KV back from a tier (cpu or disk)."""
        return self.restore_host_s if tier == "cpu" else self.restore_disk_s

    def latency_model(self) -> LatencyModel:
        """The coefficients. Raises KeyError that says what is unknown and names what is known."""
        if isinstance(self.latency, LatencyModel):
            return self.latency
        if self.latency == "auto":
            return self._latency_of_fields()
        try:
            return LATENCY_MODELS[self.latency]
        except KeyError:
            raise KeyError(f"unknown latency model {self.latency!r}; known: auto, {', '.join(LATENCY_MODELS)}") from None

    def _latency_of_fields(self) -> LatencyModel:
        if self.model is None or self.accelerator is None:
            raise KeyError("latency auto needs 'model' and 'accelerator'")
        speculation = self.speculation
        if not isinstance(speculation, Speculation):
            method, drafts = speculation, None
        else:
            method, drafts = speculation.method, speculation.num_tokens
        try:
            return latency_model(
                self.model, self.accelerator, tp=self.tp, pp=self.pp, ep=self.ep, attention_dp=self.attention_dp,
                weights=self.quantization, kv_dtype=self.kv_dtype, speculation=method, num_drafts=drafts,
                kernel=self.kernel_factor, max_num_seqs=self.max_num_seqs,
            )  # fmt: skip
        except ValueError as error:
            raise KeyError(str(error)) from None
