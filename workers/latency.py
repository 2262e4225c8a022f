"""How long an engine step takes, as a function of what is in it.

Prefill time is linear in the uncached tokens plus a term for attention: each uncached token attends to everything before it, which for
u of n tokens is u x (n - u / 2) pairs. So a prompt costs the same in one piece or in chunks (but for `prefill_base`), and few new tokens
on a long cached prefix cost what they cost; a form in u x n is right for either cold prompts or warm ones, but off by two for the other.
A decode step is linear in the batch and in the KV it reads.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LatencyModel(BaseModel):
    """Latency coefficients of one worker configuration; every coefficient is in seconds.

    prefill(u, n) = prefill_base + prefill_token * u + prefill_attention * u * (n - u / 2)    u uncached of n prompt tokens
    step(b, k)    = decode_base + decode_seq * b + decode_kv * k                              b sequences holding k KV tokens together
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill_base: float = Field(0.0187, ge=0, description="seconds a prefill costs whatever its length")
    prefill_token: float = Field(3.9e-5, ge=0, description="seconds per uncached prompt token")
    prefill_attention: float = Field(1.9e-9, ge=0, description="seconds per pair of an uncached token and one before it")
    decode_base: float = Field(0.0125, ge=0, description="seconds a decode step costs whatever its batch")
    decode_seq: float = Field(1.5e-4, ge=0, description="seconds per sequence in the batch")
    decode_kv: float = Field(1.0e-8, ge=0, description="seconds per KV token read")
    tokens_per_step: float = Field(1.0, ge=1, description="output tokens a sequence gains per step (above 1 with speculation)")
    source: str = Field("", description="where the coefficients come from")

    def prefill_s(self, uncached: float, total: float) -> float:
        """Seconds to prefill `uncached` of `total` prompt tokens on an otherwise idle engine."""
        return self.prefill_base + uncached * (self.prefill_token + self.prefill_attention * (total - uncached / 2))

    def step_s(self, batch: float, kv_tokens: float) -> float:
        """Seconds of one decode step for `batch` sequences that hold `kv_tokens` tokens of KV together."""
        return self.decode_base + self.decode_seq * batch + self.decode_kv * kv_tokens

    def scaled(self, factor: float) -> LatencyModel:
        """The same engine with every time multiplied by `factor` (0.1: ten times faster)."""
        times = {
            name: getattr(self, name) * factor
            for name in ("prefill_base", "prefill_token", "prefill_attention", "decode_base", "decode_seq", "decode_kv")
        }
        return self.model_copy(update=times)


# Qwen3-32B on H100 TP2: 8,192-token chunk in 400 ms (llm-d); attention and decode from aiconfigurator's H200 TP2 estimates
# (100k cold 12.1 s, 2k on 100k cached 437 ms; steps of 22.7 ms at batch 1, 36.5 ms at batch 8, 100k tokens each).
QWEN3_32B_H100_TP2 = LatencyModel(
    prefill_base=0.0187, prefill_token=3.9e-5, prefill_attention=1.9e-9,
    decode_base=0.0207, decode_seq=1.5e-4, decode_kv=1.85e-8, source="llm-d R_peak, aiconfigurator",
)  # fmt: skip
# gpt-oss-120B on H200: measured recompute 78 ms at 2,048 to 1,988 ms at 49,152 tokens.
GPT_OSS_120B_H200 = LatencyModel(
    prefill_base=0.0248, prefill_token=2.485e-5, prefill_attention=6.15e-10,
    decode_base=0.0052, decode_seq=1.2e-4, decode_kv=2.0e-9, source="llm-d P2P study (fit within 1 %)",
)  # fmt: skip
# GLM-5.2-FP8 on H200 DEP16: ITL 26.4 ms + 1.086 ms per sequence per rank; prefill R_peak about 24k tokens/s.
GLM_5_2_H200_DEP16 = LatencyModel(
    prefill_base=0.030, prefill_token=4.16e-5, prefill_attention=2.0e-11,
    decode_base=0.0264, decode_seq=1.086e-3, decode_kv=0.0, source="llm-d GLM-5.2 runs",
)  # fmt: skip

LATENCY_MODELS: dict[str, LatencyModel] = {
    "qwen3-32b-h100-tp2": QWEN3_32B_H100_TP2,
    "gpt-oss-120b-h200": GPT_OSS_120B_H200,
    "glm-5.2-h200-dep16": GLM_5_2_H200_DEP16,
}
