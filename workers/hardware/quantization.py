"""Bytes per element, and the type the tensor cores multiply in."""

from __future__ import annotations

from workers.hardware.accelerators import Accelerator
from workers.hardware.models import ModelShape

# weights: bytes per parameter of the experts, and of everything else (which 4-bit checkpoints leave in a wider type); scales included
_WEIGHTS: dict[str, tuple[float, float]] = {
    "bf16": (2.0, 2.0), "fp8": (1.01, 1.05), "int8": (1.0, 1.05), "int4": (0.53, 0.6), "mxfp4": (0.531, 2.0), "nvfp4": (0.563, 1.4),
    "fp4+fp8": (0.531, 1.05),
}  # fmt: skip
# by the word found in an engine's name for it: awq, gptq_marlin, modelopt_fp4, compressed-tensors ...
_WORDS = (
    ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("deepseek_v4", "fp4+fp8"), ("fp4", "nvfp4"), ("fp8", "fp8"), ("w8a8", "fp8"), ("int8", "int8"),
    ("awq", "int4"), ("gptq", "int4"), ("int4", "int4"), ("w4a", "int4"), ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "bf16"),
    ("float16", "bf16"), ("none", "bf16"),
)  # fmt: skip
_KV = (
    ("nvfp4", 0.5625),
    ("fp4", 0.5625),
    ("int4", 0.53),
    ("fp8", 1.0),
    ("int8", 1.0),
    ("bf16", 2.0),
    ("bfloat16", 2.0),
    ("float16", 2.0),
    ("auto", 2.0),
)


def weights_named(name: str | None, model: ModelShape) -> str:
    """One of the known weight types for an engine's quantization option; the model's own without one. Raises ValueError."""
    if name is None:
        return model.native
    if name in _WEIGHTS:
        return name
    for word, known in _WORDS:
        if word in name.lower():
            return known
    raise ValueError(f"unknown quantization {name!r}; known: {', '.join(_WEIGHTS)}")


def weight_bytes(weights: str, model: ModelShape) -> tuple[float, float]:
    """Bytes of all routed experts, and of everything else."""
    expert, other = _WEIGHTS[weights]
    if not model.experts and weights in ("nvfp4", "mxfp4"):
        other = expert * 1.1  # dense models quantize all but embeddings and head
    return model.expert_parameters * expert, model.dense_parameters * other


def compute_type(weights: str, activations: str | None, accelerator: Accelerator) -> str:
    """bf16, fp8 or fp4: what the tensor cores multiply, which is the wider of weights and activations.

    Without `activations` as engines choose it: FP8 weights with FP8 activations, NVFP4 with NVFP4 where the GPU has FP4, MXFP4 with FP8
    there, and 4-bit weights with BF16 activations elsewhere.
    """
    if activations is not None:
        word = activations.lower()
        return "fp4" if "fp4" in word and weights in ("nvfp4", "mxfp4", "fp4+fp8") else "fp8" if "8" in word else "bf16"
    has_fp4 = accelerator.flops_fp4 > accelerator.flops_fp8
    if weights == "nvfp4" and has_fp4:
        return "fp4"
    if weights in ("fp8", "int8", "fp4+fp8") or (weights == "mxfp4" and has_fp4):
        return "fp8"
    return "bf16"


def kv_bytes(kv_dtype: str | None) -> float:
    """Bytes per element of KV cache; BF16 unless said otherwise. Raises ValueError."""
    if kv_dtype is None:
        return 2.0
    for word, size in _KV:
        if word in kv_dtype.lower():
            return size
    raise ValueError(f"unknown KV cache type {kv_dtype!r}; known: bf16, fp8, nvfp4, int8, int4")
