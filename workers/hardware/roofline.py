"""Latency coefficients of any (model, accelerator, parallelism, quantization, speculation): a roofline times efficiencies.

A step reads weights and KV, multiplies, and talks to the other GPUs; every term is its bytes or FLOP over what the accelerator can do,
times a constant of `Efficiencies`. The constants are fitted to measured decode steps and prefills (docs/latency.md has the table of what
was measured and what comes out); a model's own `prefill` and `decode` factors take up what its kernels do better or worse.

Approximations, all on the side of simplicity:
- one LatencyModel stands for a whole worker, all its data-parallel attention ranks together: throughput is right, but a single prompt is
  prefilled as if every rank helped with its attention;
- a decode step is a straight line in the batch, though the experts it touches saturate (least relative error over powers of two, from one
  to 64 sequences per rank of data-parallel attention);
- routing of tokens to experts is uniform, but for an `imbalance` that grows with the ranks of expert parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from workers.hardware.accelerators import Accelerator, accelerator_named
from workers.hardware.models import ModelShape, model_named
from workers.hardware.quantization import compute_type, kv_bytes, weight_bytes, weights_named
from workers.hardware.speculation import Drafting, drafting
from workers.latency import LatencyModel

_HOP_S = 30e-6  # a pipeline stage hands its activations on


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What share of the data sheet is reached, and what every layer and step costs besides. Fitted; see docs/latency.md."""

    memory: float = 0.75  # of HBM bandwidth
    bf16: float = 0.75  # of dense FLOP/s in prefill
    fp8: float = 0.60
    fp4: float = 0.30
    experts: float = 0.55  # of those in routed experts: smaller matrices
    attention: float = 0.55  # of BF16 FLOP/s
    layer_s: float = 25e-6  # launches, norms, routing: per layer
    moe_layer_s: float = 20e-6
    reduce_s: float = 7e-6  # one all-reduce within a domain
    exchange_s: float = 20e-6  # one all-to-all of tokens between experts' ranks within a domain
    network_s: float = 25e-6  # more where it leaves the domain
    step_s: float = 1.0e-3  # scheduling, sampling
    sequence_s: float = 20e-6  # per sequence: sampling, detokenisation, metadata
    link: float = 0.7  # of the interconnect's bandwidth
    imbalance: float = 0.025  # busiest expert rank over the mean, minus 1, for each doubling of the ranks


FITTED = Efficiencies()


@dataclass(frozen=True, slots=True)
class _Worker:
    """Everything a step's time is computed from."""

    model: ModelShape
    accelerator: Accelerator
    tp: int
    pp: int
    ep: int
    dp: int  # ranks of data-parallel attention
    weights: str
    compute: str
    kv_size: float  # bytes per element
    drafting: Drafting
    eff: Efficiencies

    @property
    def _stage_gpus(self) -> int:
        """GPUs that work on one layer together."""
        return self.tp * self.dp

    @property
    def _exchanges(self) -> bool:
        """Tokens travel to where their experts are, since not every rank sees every token."""
        return self.model.experts > 0 and self.dp > 1

    @property
    def _imbalance(self) -> float:
        """Of whole experts on their ranks; experts that are sliced over all ranks load them alike."""
        return 1.0 + self.eff.imbalance * log2(self.ep) if self.model.experts else 1.0

    def _layers_s(self, tokens: float) -> float:
        """Fixed and communication time of one pass over all layers with `tokens` tokens in the worker."""
        model, eff, gpu = self.model, self.eff, self.accelerator
        seconds = eff.layer_s + (eff.moe_layer_s if model.experts else 0.0)
        outside = self._stage_gpus > gpu.domain
        bandwidth = eff.link * (gpu.network if outside else gpu.link)
        local = tokens / self.dp  # of one data-parallel rank
        if self.tp > 1:
            reduces = 1 if self._exchanges else 2
            wire = eff.link * (gpu.network if self.tp > gpu.domain else gpu.link)
            seconds += reduces * (eff.reduce_s + local * model.hidden * 2 * 2 * (self.tp - 1) / self.tp / wire)
        if self._exchanges:
            latency = eff.exchange_s + (eff.network_s if outside else 0.0)
            # out in FP8 (1 byte), back in BF16 (2 bytes), to the ranks of a token's experts; to all where these are sliced
            copies = min(model.experts_per_token, self.ep - 1) if self.ep > 1 else self._stage_gpus - 1
            seconds += 2 * latency + local / self.tp * model.hidden * 3 * copies / bandwidth
        return seconds * model.layers + (self.pp - 1) * (_HOP_S + local * model.hidden * 2 / (eff.link * gpu.link))

    def _weights_s(self, tokens: float) -> float:
        """Reading the weights that a pass with `tokens` tokens touches."""
        experts, other = weight_bytes(self.weights, self.model)
        read = experts * self.model.touched(tokens) * self._imbalance / self._stage_gpus + other / self.tp
        return read / (self.eff.memory * self.accelerator.bandwidth)

    def _flops_s(self, tokens: float) -> float:
        """Multiplying `tokens` tokens with all weights, at prefill's efficiency."""
        model, eff = self.model, self.eff
        rate = getattr(eff, self.compute) * self.accelerator.flops(self.compute)
        routed = model.active_parameters - model.dense_parameters
        # what 4-bit checkpoints leave in a wider type is multiplied in it
        wide = "fp8" if self.compute == "fp4" else self.compute
        dense_rate = getattr(eff, wide) * self.accelerator.flops(wide) if model.experts else rate
        dense = model.dense_parameters / dense_rate
        return 2 * tokens * (dense + routed * self._imbalance / (rate * eff.experts)) / self._stage_gpus

    def step_s(self, batch: float) -> float:
        """One decode step of `batch` sequences, without the KV they read."""
        tokens = batch * self.drafting.verified
        one = self._layers_s(tokens) + self._weights_s(tokens) + self._flops_s(tokens) + self.model.index_s
        one += tokens * self.model.token_flops / self._attention_rate()
        drafts = self.drafting.passes * one * self.drafting.cost
        return one + drafts + self.eff.step_s + self.eff.sequence_s * batch / self.dp

    def kv_s(self) -> float:
        """Reading one token's KV once, where it lies."""
        model = self.model
        size = model.kv_elements * self.kv_size * model.kv_read
        shards = self.dp * (1 if model.latent_kv else min(self.tp, model.kv_heads))
        return size / shards / (self.eff.memory * self.accelerator.bandwidth)

    def prefill_base_s(self) -> float:
        return (self._layers_s(1) + self._weights_s(64) + self.model.index_s) * self.model.prefill + self.eff.step_s

    def prefill_token_s(self) -> float:
        moved = (self._layers_s(1024) - self._layers_s(0)) / 1024
        attention = self.model.token_flops / self._attention_rate()
        return (self._flops_s(1) + moved + attention) * self.model.prefill

    def prefill_pair_s(self) -> float:
        return self.model.pair_flops / self._attention_rate() * self.model.prefill

    def _attention_rate(self) -> float:
        """FLOP/s of attention over the worker."""
        return self.eff.attention * self.accelerator.flops_bf16 * (self.dp if self.model.sparse else self._stage_gpus)


def latency_model(
    model: str,
    accelerator: str,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    attention_dp: int = 1,
    weights: str | None = None,
    activations: str | None = None,
    kv_dtype: str | None = None,
    speculation: str | None = None,
    num_drafts: int | None = None,
    kernel: float = 1.0,
    max_num_seqs: int = 256,
    efficiencies: Efficiencies = FITTED,
) -> LatencyModel:
    """Coefficients of one configuration; see the module's docstring for what they approximate.

    `weights`, `activations` and `kv_dtype` are engine names (fp8, nvfp4, mxfp4, awq ...); the model's own type and BF16 KV without them.
    `kernel` multiplies every time (0.8: kernels a fifth faster). Raises ValueError for an unknown name.
    """
    worker = _worker(
        model, accelerator, tp, pp, ep, attention_dp, weights, activations, kv_dtype, drafting(speculation, num_drafts), efficiencies
    )
    base, sequence = _line(_batches(attention_dp, max_num_seqs), worker.step_s)
    return LatencyModel(
        prefill_base=kernel * worker.prefill_base_s(),
        prefill_token=kernel * worker.prefill_token_s(),
        prefill_attention=kernel * worker.prefill_pair_s(),
        decode_base=kernel * base,
        decode_seq=kernel * sequence,
        decode_kv=kernel * worker.kv_s(),
        tokens_per_step=worker.drafting.tokens_per_step,
        source=f"roofline of {worker.model.name} on {worker.accelerator.name}",
    )


def _worker(
    model: str, accelerator: str, tp: int, pp: int, ep: int, dp: int, weights: str | None, activations: str | None, kv_dtype: str | None,
    drafts: Drafting, efficiencies: Efficiencies,
) -> _Worker:  # fmt: skip
    shape, gpu = model_named(model), accelerator_named(accelerator)
    kind = weights_named(weights, shape)
    return _Worker(shape, gpu, tp, pp, ep, dp, kind, compute_type(kind, activations, gpu), kv_bytes(kv_dtype), drafts, efficiencies)


def _batches(ranks: int, max_num_seqs: int) -> list[float]:
    """Powers of two sequences per rank of data-parallel attention, up to 64 of them and `max_num_seqs` in the worker."""
    most = max(1, min(64, max_num_seqs // ranks))
    return [float(ranks << power) for power in range(most.bit_length())]


def _line(batches: list[float], seconds: Callable[[float], float]) -> tuple[float, float]:
    """The straight line base + slope x batch of least squared relative error, neither below 0."""
    weights = [(batch, time, 1.0 / time**2) for batch in batches for time in (seconds(batch),)]
    w = sum(weight for _, _, weight in weights)
    wx = sum(weight * batch for batch, _, weight in weights)
    wxx = sum(weight * batch * batch for batch, _, weight in weights)
    wy = sum(weight * time for _, time, weight in weights)
    wxy = sum(weight * batch * time for batch, time, weight in weights)
    determinant = w * wxx - wx * wx
    if determinant <= 0.0:
        return weights[0][1], 0.0
    slope = max(0.0, (w * wxy - wx * wy) / determinant)
    return max(0.0, (wy - slope * wx) / w), slope
