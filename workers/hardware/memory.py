"""How many tokens of KV cache a worker holds: what of its memory weights and buffers leave."""

from __future__ import annotations

from workers.hardware.accelerators import accelerator_named
from workers.hardware.models import model_named
from workers.hardware.quantization import kv_bytes, weight_bytes, weights_named


def kv_capacity_tokens(
    model: str,
    accelerator: str,
    *,
    tp: int = 1,
    pp: int = 1,
    attention_dp: int = 1,
    weights: str | None = None,
    kv_dtype: str | None = None,
    memory_fraction: float = 0.9,
    max_num_seqs: int = 0,
) -> int:
    """Tokens of KV cache of the whole worker. Raises ValueError for unknown names, and where the weights do not fit.

    Tensor parallelism shards the KV of grouped-query attention up to its number of KV heads, and replicates that of latent attention
    (MLA); data-parallel attention shards either by sequence but replicates the dense weights. `max_num_seqs` reserves the fixed state of
    linear-attention layers.
    """
    shape, gpu = model_named(model), accelerator_named(accelerator)
    gpus = tp * pp * attention_dp
    experts, other = weight_bytes(weights_named(weights, shape), shape)
    held = experts / gpus + other / (tp * pp)
    free = gpu.memory * memory_fraction - shape.runtime - held
    if free <= 0:
        raise ValueError(
            f"{shape.name} does not fit {gpus} x {gpu.name}: {held / 1e9:.0f} GB of weights and {shape.runtime / 1e9:.0f} GB of buffers "
            f"per GPU, {gpu.memory * memory_fraction / 1e9:.0f} GB to use; use more GPUs or fewer bits"
        )
    token = shape.kv_elements * kv_bytes(kv_dtype)
    shards = pp * (1 if shape.latent_kv else min(tp, shape.kv_heads))
    tokens = free / (token / shards) * attention_dp - shape.state_tokens * max_num_seqs
    if tokens < 1:
        raise ValueError(f"{shape.name} on {gpus} x {gpu.name} leaves no room for KV cache")
    return int(tokens)
