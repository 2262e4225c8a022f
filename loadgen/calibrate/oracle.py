"""A latency model from NVIDIA's aiconfigurator-core: its database of measured kernels stands in for an engine.

Optional (`pip install --no-deps aiconfigurator-core`, with numpy, pandas and pyyaml; 82 MB, Linux). It knows no queue and no eviction, and
its estimates are of one backend version; docs/latency.md compares them with measurements and with the built-in shapes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

from loadgen.calibrate.fit import Calibration, DecodePoint, PrefillPoint, fit
from loadgen.calibrate.probe import CalibrationError

LENGTHS = (512, 2048, 8192, 32_768, 98_304)  # prompt tokens
NEW_TOKENS = (256, 1024, 4096)  # on a cached prefix that is a little longer than each of the above
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 16_384, 65_536)
_MOST_KV = 2_000_000  # tokens of a decode point: more than fits a worker is not asked


def measure_oracle(
    model: str, system: str, backend: str, *, tp: int = 1, attention_dp: int = 1
) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """Points of a configuration: `model` as on Hugging Face, `system` e.g. h200_sxm, `backend` vllm, sglang or trtllm.

    Experts are sliced with tensor parallelism alone, and spread over all GPUs with attention data parallelism. Raises CalibrationError
    where the package is missing, or knows no such configuration.
    """
    slices, spread = (tp, 1) if attention_dp == 1 else (1, tp * attention_dp)
    engine = {"tp_size": tp, "attention_dp_size": attention_dp, "moe_tp_size": slices, "moe_ep_size": spread}
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError:
        raise CalibrationError(
            "the oracle needs aiconfigurator-core: pip install --no-deps aiconfigurator-core && pip install numpy pandas pyyaml packaging"
        ) from None
    prefills, decodes = [], []
    # it warns about every kernel that it has to interpolate
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("aiconfigurator_core").setLevel(logging.CRITICAL)
        try:
            handle = EngineHandle.compile(model, system, backend, **engine)
            for length in LENGTHS:
                prefills.append(PrefillPoint(length, length, handle.predict_prefill_latency(1, length, 0) / 1e3))
                prefills += [
                    PrefillPoint(new, length + new, handle.predict_prefill_latency(1, length + new, length) / 1e3)
                    for new in NEW_TOKENS
                    if new <= length
                ]
            decodes += [
                DecodePoint(batch, batch * context, handle.decode_step_latency(batch, context, 2) / 1e3)
                for batch in BATCHES
                for context in CONTEXTS
                if batch * context <= _MOST_KV
            ]
        except Exception as error:  # the package raises many kinds, some from its compiled part
            raise CalibrationError(f"aiconfigurator-core has no estimate of {model} on {system} with {backend}: {error}") from None
    return prefills, decodes


def fit_oracle(model: str, system: str, backend: str, *, tp: int = 1, attention_dp: int = 1) -> Calibration:
    """The latency model that fits the oracle's points best, with the error of the fit (not of the oracle). Raises CalibrationError."""
    prefills, decodes = measure_oracle(model, system, backend, tp=tp, attention_dp=attention_dp)
    source = f"aiconfigurator-core: {model} on {system}, {backend}, tp {tp}, attention dp {attention_dp}"
    return fit(prefills, decodes, chunk=max(LENGTHS) + max(NEW_TOKENS), source=source, overhead=False)
