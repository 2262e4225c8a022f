"""Latency and KV capacity of known models on known accelerators, from their shapes."""

from workers.hardware.accelerators import ACCELERATORS, Accelerator, accelerator_named
from workers.hardware.memory import kv_capacity_tokens
from workers.hardware.models import MODELS, ModelShape, model_named
from workers.hardware.roofline import latency_model

__all__ = [
    "ACCELERATORS", "MODELS", "Accelerator", "ModelShape", "accelerator_named", "kv_capacity_tokens", "latency_model", "model_named",
]  # fmt: skip
