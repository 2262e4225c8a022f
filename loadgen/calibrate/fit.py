"""From measured prefills and decode steps to the coefficients of a latency model, and how well they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from loadgen.calibrate.squares import fit_ratios
from workers.latency import LatencyModel

P = TypeVar("P")

_HELD_OUT = 4  # every fourth point is kept back to tell the error


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Seconds from sending a prompt of `total` tokens, `uncached` of which had to be computed, to its first token."""

    uncached: int
    total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Seconds per output token of each of `batch` sequences that hold `kv_tokens` tokens together."""

    batch: int
    kv_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors of points that the fit has not seen; None without such points."""

    median: float | None
    p90: float | None

    @classmethod
    def of(cls, errors: Sequence[float]) -> Error:
        ordered = sorted(errors)
        return cls(median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1]) if ordered else cls(None, None)


@dataclass(frozen=True, slots=True)
class Calibration:
    """An engine's coefficients.

    `overhead_s` and `overhead_token_s` are what a request and each of its prompt tokens cost outside engine steps (HTTP, tokenisation).
    """

    latency: LatencyModel
    overhead_s: float
    overhead_token_s: float
    prefill_error: Error
    decode_error: Error
    prefills: int  # points
    decodes: int

    def ttft_s(self, uncached: float, total: float, chunk: int) -> float:
        """Seconds to the first token of a request alone, prefilled in chunks of `chunk` tokens."""
        steps = max(1, math.ceil(uncached / chunk))
        prefill = self.latency.prefill_s(uncached, total) + (steps - 1) * self.latency.prefill_base
        return self.overhead_s + self.overhead_token_s * total + prefill


def fit(
    prefills: Sequence[PrefillPoint],
    decodes: Sequence[DecodePoint],
    *,
    chunk: int,
    tokens_per_step: float = 1.0,
    source: str = "",
    overhead: bool = True,
) -> Calibration:
    """Coefficients of least error by ratio (half and double are equally far off), none of them negative.

    `chunk` is the engine's token budget of a step (max_num_batched_tokens): a prompt takes prefill_base once per chunk. A step's fixed
    cost is the same forward pass in prefill and decode, so what a request alone costs beyond `decode_base` is overhead, not prefill;
    without `overhead` all of it is the engine's.
    Errors are of every fourth point, by a fit to the others. Raises ValueError with too few points to fit.
    """
    if len(prefills) < 4 or len(decodes) < 3:
        raise ValueError(f"{len(prefills)} prefills and {len(decodes)} decode steps were measured; at least 4 and 3 are needed")
    training = _fit(_kept(prefills), _kept(decodes), chunk, tokens_per_step, source, overhead)
    prefill_errors = [abs(training.ttft_s(p.uncached, p.total, chunk) / p.seconds - 1) for p in _held_out(prefills)]
    decode_errors = [abs(training.latency.step_s(d.batch, d.kv_tokens) / tokens_per_step / d.seconds - 1) for d in _held_out(decodes)]
    whole = _fit(prefills, decodes, chunk, tokens_per_step, source, overhead)
    return Calibration(
        whole.latency,
        whole.overhead_s,
        whole.overhead_token_s,
        Error.of(prefill_errors),
        Error.of(decode_errors),
        len(prefills),
        len(decodes),
    )


def _kept(points: Sequence[P]) -> list[P]:
    return [point for number, point in enumerate(points) if number % _HELD_OUT != 2 or len(points) < 8]


def _held_out(points: Sequence[P]) -> list[P]:
    return [point for number, point in enumerate(points) if number % _HELD_OUT == 2 and len(points) >= 8]


def _fit(
    prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint], chunk: int, tokens_per_step: float, source: str, overhead: bool
) -> Calibration:
    step = fit_ratios([(1.0, d.batch, d.kv_tokens) for d in decodes], [d.seconds * tokens_per_step for d in decodes])
    # chunks after the first cost the base again: known from decoding, so taken off before the rest is fitted
    later = [(max(1, math.ceil(p.uncached / chunk)) - 1) * step[0] for p in prefills]
    rows = [(1.0, p.uncached, p.uncached * (p.total - p.uncached / 2), p.total if overhead else 0.0) for p in prefills]
    fixed, token, attention, overhead_token = fit_ratios(
        rows, [max(p.seconds - base, 0.05 * p.seconds) for p, base in zip(prefills, later, strict=True)]
    )
    base = min(fixed, step[0]) if overhead else fixed
    latency = LatencyModel(
        prefill_base=base, prefill_token=token, prefill_attention=attention, decode_base=step[0], decode_seq=step[1], decode_kv=step[2],
        tokens_per_step=tokens_per_step, source=source,
    )  # fmt: skip
    return Calibration(latency, fixed - base, overhead_token, Error(None, None), Error(None, None), len(prefills), len(decodes))
