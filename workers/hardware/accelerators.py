"""Accelerators: memory, arithmetic, interconnect and price of one GPU, each as its vendor or a named table states it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU. Bytes, bytes per second and FLOP/s (dense, without sparsity)."""

    name: str
    memory: float  # bytes of HBM
    bandwidth: float  # bytes/s of HBM
    flops_bf16: float
    flops_fp8: float
    flops_fp4: float  # that of FP8 or BF16 where the tensor cores have no FP4
    link: float  # bytes/s and direction to its neighbours within the NVLink domain
    network: float  # bytes/s and direction beyond it
    domain: int  # GPUs that NVLink joins
    price_per_hour: float  # US dollars
    kilowatts: float  # per GPU, with its share of the server and the cooling
    source: str

    def flops(self, dtype: str) -> float:
        """Dense FLOP/s for operands of this type: bf16, fp8 or fp4."""
        return {"bf16": self.flops_bf16, "fp8": self.flops_fp8, "fp4": self.flops_fp4}[dtype]


# Prices: SemiAnalysis InferenceX, three-year rental (h100, h200, b200, gb200); what it does not list is scaled from these by memory and
# arithmetic and marked so. Power: the same tables. Memory as nvidia-smi reports it.
_RENTAL = "data sheet; price and power: InferenceX, 3-year rental"
_SCALED = "data sheet; price and power scaled from the b200's and gb200's"

ACCELERATORS: dict[str, Accelerator] = {
    each.name: each
    for each in (
        Accelerator("a100", 85.9e9, 2.04e12, 312e12, 312e12, 312e12, 300e9, 25e9, 8, 1.00, 0.9, "data sheet; price and power estimated"),
        Accelerator("h100", 85.9e9, 3.35e12, 989e12, 1978e12, 1978e12, 450e9, 50e9, 8, 1.30, 1.73, _RENTAL),
        Accelerator("h200", 151.4e9, 4.8e12, 989e12, 1978e12, 1978e12, 450e9, 50e9, 8, 1.60, 1.73, _RENTAL),
        Accelerator("b200", 193.3e9, 7.7e12, 2250e12, 4500e12, 9000e12, 900e9, 100e9, 8, 2.90, 2.17, _RENTAL),
        Accelerator("b300", 288.4e9, 7.75e12, 2250e12, 4500e12, 14000e12, 900e9, 100e9, 8, 3.50, 2.4, _SCALED),
        Accelerator("gb200", 198.7e9, 8.0e12, 2500e12, 5000e12, 10000e12, 900e9, 100e9, 72, 3.30, 2.1, _RENTAL),
        Accelerator("gb300", 298.0e9, 8.0e12, 2500e12, 5000e12, 15000e12, 900e9, 100e9, 72, 3.95, 2.4, _SCALED),
    )
}


def accelerator_named(name: str) -> Accelerator:
    """The accelerator of this name, however it is spelled (H200, h200-sxm, "NVIDIA H200"). Raises ValueError naming the known ones."""
    spelled = name.lower()
    found = [each for each in ACCELERATORS.values() if each.name in spelled]
    if not found:
        raise ValueError(f"unknown accelerator {name!r}; known: {', '.join(ACCELERATORS)}")
    return max(found, key=lambda each: len(each.name))  # gb200, not b200
