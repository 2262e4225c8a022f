"""A worker's profile from a model and an accelerator: what sweeps and recommendations start from."""

from __future__ import annotations

from typing import Any

from workers.hardware.accelerators import accelerator_named
from workers.hardware.memory import kv_capacity_tokens
from workers.hardware.models import model_named
from workers.profile import WorkerProfile


def preset(
    model: str,
    accelerator: str,
    *,
    tp: int = 1,
    pp: int = 1,
    attention_dp: int = 1,
    quantization: str | None = None,
    kv_dtype: str | None = None,
    memory_fraction: float = 0.9,
    **fields: Any,
) -> WorkerProfile:
    """A profile with latency auto, the GPUs it takes, the KV cache that fits and the price of the GPUs.

    `fields` are any other fields of the profile, and win over what would be computed. Raises ValueError where the model does not fit or
    a name is unknown (pydantic.ValidationError, one too, for a field that no profile has).
    """
    gpus = tp * pp * attention_dp
    shape, gpu = model_named(model), accelerator_named(accelerator)
    values: dict[str, Any] = {
        "model": model, "accelerator": gpu.name, "gpus": gpus, "tp": tp, "pp": pp, "attention_dp": attention_dp,
        "ep": gpus if shape.experts and attention_dp > 1 else 1, "quantization": quantization, "kv_dtype": kv_dtype, "latency": "auto",
        "price_per_hour": round(gpu.price_per_hour * gpus, 4),
    } | fields  # fmt: skip
    if "kv_capacity_tokens" not in values:
        values["kv_capacity_tokens"] = kv_capacity_tokens(
            model, accelerator, tp=tp, pp=pp, attention_dp=attention_dp, weights=quantization, kv_dtype=kv_dtype,
            memory_fraction=memory_fraction, max_num_seqs=min(64, WorkerProfile.model_validate(values).max_num_seqs),
        )  # fmt: skip
    profile = WorkerProfile.model_validate(values)
    try:
        profile.latency_model()
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    return profile


def price_per_hour(profile: WorkerProfile) -> float:
    """What the worker costs per hour: its own price, else its GPUs' list price; 0 where neither is known."""
    if profile.price_per_hour or profile.accelerator is None:
        return profile.price_per_hour
    try:
        return accelerator_named(profile.accelerator).price_per_hour * profile.gpu_count
    except ValueError:
        return 0.0
