"""Models: what a layer reads, computes and keeps per token, from their published configurations."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. Parameters are counts; `kv_*` are of all layers together.

    Attention work per pair of tokens and what of the context a decode step reads are kept apart from the size of the KV cache, because
    sparse attention reads less than it keeps.
    """

    name: str
    parameters: float
    expert_parameters: float  # of these, in routed experts: spread over all GPUs of a worker, read where a token is routed
    experts: int  # routed experts per layer; 0: dense
    experts_per_token: int
    layers: int
    hidden: int
    kv_elements: float  # elements of KV cache per token
    latent_kv: bool  # one compressed head (MLA): tensor parallelism replicates the cache instead of sharding it
    kv_heads: int  # how far tensor parallelism can shard it otherwise
    pair_flops: float  # FLOP per (query, key) pair that grows with the context
    token_flops: float = 0.0  # FLOP of attention per query that does not: windows, the top-k of sparse attention
    kv_read: float = 1.0  # share of the KV elements that a decode step reads in a long context
    sparse: bool = False  # attention picks keys by an indexer: neither is shared out by tensor parallelism (kernels pad to 64 heads)
    index_s: float = 0.0  # seconds a step waits for indexers and gathers, all layers together
    state_tokens: int = 0  # fixed cache per sequence (recurrent state), in tokens of KV
    native: str = "bf16"  # weights as published
    runtime: float = 6e9  # bytes per GPU for activations, graphs and communication buffers
    prefill: float = 1.0  # measured over modelled prefill time, from the anchors in docs/latency.md

    @property
    def dense_parameters(self) -> float:
        """Parameters outside the routed experts: read by every step, and held by every rank of attention data parallelism."""
        return self.parameters - self.expert_parameters

    @property
    def active_parameters(self) -> float:
        """Parameters a token passes through."""
        routed = self.expert_parameters * self.experts_per_token / self.experts if self.experts else 0.0
        return self.dense_parameters + routed

    def touched(self, tokens: float) -> float:
        """Share of the routed experts that a step of this many tokens reads, were tokens routed at random."""
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0


def _grouped(
    name: str,
    parameters: float,
    layers: int,
    hidden: int,
    heads: int,
    *,
    head: int = 128,
    experts: int = 0,
    per_token: int = 0,
    expert_hidden: int = 0,
    window: int = 0,
    native: str = "bf16",
    runtime: float = 6e9,
    prefill: float = 1.0,
) -> ModelShape:
    """Grouped-query attention with 8 KV heads. With a `window`, every other layer sees only that many tokens."""
    whole = layers // 2 if window else layers
    pair = 4 * heads * head
    return ModelShape(
        name, parameters, layers * experts * 3 * hidden * expert_hidden, experts, per_token, layers, hidden,
        kv_elements=2 * 8 * head * whole, latent_kv=False, kv_heads=8, pair_flops=pair * whole,
        token_flops=pair * (layers - whole) * window, native=native, runtime=runtime, prefill=prefill,
    )  # fmt: skip


def _glm(name: str, indexed: int) -> ModelShape:
    """GLM-5 family: MLA 512 + 64, sparse attention over the 2,048 best tokens, found by `indexed` indexers of 32 heads of 128."""
    layers = 78
    return ModelShape(
        name, 744e9, 75 * 256 * 3 * 6144 * 2048, 256, 8, layers, 6144, kv_elements=576 * layers, latent_kv=True, kv_heads=1,
        pair_flops=2 * 32 * 128 * indexed, token_flops=2 * 64 * (576 + 512) * 2048 * layers, kv_read=132 * indexed / (576 * layers),
        sparse=True, index_s=100e-6 * indexed, native="fp8", runtime=15e9, prefill=1.15,
    )  # fmt: skip


def _deepseek_v4(
    name: str,
    parameters: float,
    layers: int,
    hidden: int,
    heads: int,
    experts: int,
    expert_hidden: int,
    fine: int,
    best: int,
    runtime: float,
) -> ModelShape:
    """DeepSeek V4: one KV head of 512; `fine` layers keep one entry for 4 tokens and read the `best` of them that an indexer of 64 heads of
    128 picks, the others keep one for 128 and read all; every layer has a window of 128 tokens.
    """
    coarse = layers - fine
    return ModelShape(
        name, parameters, layers * experts * 3 * hidden * expert_hidden, experts, 6, layers, hidden,
        kv_elements=fine * (512 + 128) / 4 + coarse * 512 / 128, latent_kv=True, kv_heads=1,
        pair_flops=2 * 64 * 128 * fine / 4 + 4 * heads * 512 * coarse / 128, token_flops=4 * heads * 512 * (best * fine + 128 * layers),
        kv_read=0.2, sparse=True, index_s=100e-6 * fine, native="fp4+fp8", runtime=runtime,
    )  # fmt: skip


# 24 of 93 layers are MLA (512 + 64); the others keep a state of 96 x 128 x 128 per sequence, 17k to 33k tokens' worth of FP8 KV. Experts
# work in a latent space of 3,584.
_KIMI_K3 = ModelShape(
    "kimi-k3", 2.78e12, 92 * 896 * 3 * 3584 * 3072, 896, 16, 93, 7168, kv_elements=576 * 24, latent_kv=True, kv_heads=1,
    pair_flops=2 * 96 * (192 + 128) * 24, token_flops=4 * 96 * 128 * 128 * 69, state_tokens=17_000, native="mxfp4", runtime=15e9,
)  # fmt: skip

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _grouped("llama-3-70b", 70.6e9, 80, 8192, 64),
        _grouped("qwen3-32b", 32.8e9, 64, 5120, 64),
        _grouped(
            "gpt-oss-120b",
            116.8e9,
            36,
            2880,
            64,
            head=64,
            experts=128,
            per_token=4,
            expert_hidden=2880,
            window=128,
            native="mxfp4",
            prefill=1.06,
        ),
        _grouped("qwen3-coder-480b", 480e9, 62, 6144, 96, experts=160, per_token=8, expert_hidden=2560, runtime=10e9),
        _glm("glm-5", 78),
        _glm("glm-5.1", 78),
        _glm("glm-5.2", 21),  # one indexer for up to four layers
        _glm("glm-5.3", 21),
        _KIMI_K3,
        _deepseek_v4("deepseek-v4-pro", 1.6e12, 61, 7168, 128, 384, 3072, 30, 1024, 15e9),
        _deepseek_v4("deepseek-v4-flash", 284e9, 43, 4096, 64, 256, 2048, 21, 512, 10e9),
    )
}

# names under which the models are served
_SPELLINGS = (
    (r"llama-?3(\.\d)?-70b", "llama-3-70b"), (r"qwen3-32b", "qwen3-32b"), (r"gpt-oss-120b", "gpt-oss-120b"),
    (r"qwen3-coder-480b", "qwen3-coder-480b"), (r"glm-5\.1", "glm-5.1"), (r"glm-5\.2", "glm-5.2"), (r"glm-5\.3(?!-flash)", "glm-5.3"),
    (r"glm-5(?![.\d])", "glm-5"), (r"kimi-k3", "kimi-k3"), (r"deepseek-v4-flash", "deepseek-v4-flash"),
    (r"deepseek-v4(-pro)?(?!-flash)", "deepseek-v4-pro"),
)  # fmt: skip


def model_named(name: str) -> ModelShape:
    """The model of this name, or of a name it is served under (zai-org/GLM-5.2-FP8). Raises ValueError naming the known ones."""
    spelled = name.lower().replace("_", "-").replace(" ", "-").replace("meta-llama-3", "llama-3")
    for pattern, known in _SPELLINGS:
        if re.search(pattern, spelled):
            return MODELS[known]
    raise ValueError(f"no built-in shape of model {name!r}; known: {', '.join(MODELS)}")
