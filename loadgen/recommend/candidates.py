"""Which engine configurations could serve the model at all: those that the search's limits span and that fit the memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loadgen.recommend.request import Rentable, Request
from workers.hardware.accelerators import accelerator_named
from workers.hardware.models import model_named
from workers.hardware.preset import preset
from workers.hardware.quantization import weights_named
from workers.profile import WorkerProfile


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine configuration. `name` says what it is: h100 tp2 fp8 kv-fp8_e4m3."""

    name: str
    profile: WorkerProfile

    @property
    def price(self) -> float:
        """What a worker costs: per hour, or its GPUs where nothing has a price."""
        return self.profile.price_per_hour or float(self.profile.gpu_count)

    def with_limits(self, **limits: int) -> Candidate:
        """The same hardware with other batch limits."""
        return Candidate(self.name, self.profile.model_copy(update=limits))

    @property
    def limits(self) -> str:
        profile = self.profile
        text = f"max_num_seqs {profile.max_num_seqs}, max_num_batched_tokens {profile.max_num_batched_tokens}"
        threshold = profile.long_prefill_token_threshold
        return text + (f", long_prefill_token_threshold {threshold}" if threshold else "")


@dataclass(frozen=True, slots=True)
class Rejected:
    """A configuration that cannot serve the model or this traffic, and why."""

    name: str
    why: str


def candidates(request: Request, longest_tokens: int) -> tuple[list[Candidate], list[Rejected]]:
    """All configurations that fit; a worker's KV cache has room for the longest request, of `longest_tokens`."""
    fitting: list[Candidate] = []
    rejected: list[Rejected] = []
    for name, profile in request.workers.items():
        _sort(Candidate(name, profile), longest_tokens, fitting, rejected)
    for rentable in request.accelerators:
        for settings in _settings(request, rentable):
            name = _name(rentable.name, settings)
            gpus = settings["tp"] * settings["attention_dp"]
            price = round(rentable.price * gpus, 4)
            try:
                profile = preset(request.model, rentable.name, **settings, **_first_limits(request), price_per_hour=price)
            except ValueError as error:
                rejected.append(Rejected(name, str(error)))
                continue
            _sort(Candidate(name, profile), longest_tokens, fitting, rejected)
    return fitting, rejected


def _sort(candidate: Candidate, longest_tokens: int, fitting: list[Candidate], rejected: list[Rejected]) -> None:
    room = candidate.profile.kv_capacity_tokens // candidate.profile.attention_dp  # a request lives on one rank
    if room < longest_tokens:
        rejected.append(Rejected(candidate.name, f"room for {room:,} tokens of KV, the longest request has {longest_tokens:,}"))
    else:
        fitting.append(candidate)


def _first_limits(request: Request) -> dict[str, Any]:
    search = request.search
    return {
        "max_num_seqs": search.max_num_seqs[0],
        "max_num_batched_tokens": search.max_num_batched_tokens[0],
        "long_prefill_token_threshold": search.long_prefill_token_threshold[0],
    }


def _settings(request: Request, rentable: Rentable) -> Iterator[dict[str, Any]]:
    search, shape = request.search, model_named(request.model)
    ranks = search.attention_dp or ([1, 8] if shape.latent_kv else [1])
    domain = accelerator_named(rentable.name).domain
    seen = set()
    axes = itertools.product(search.tp, ranks, search.quantization, search.kv_dtype, search.speculation)
    for tp, attention_dp, quantization, kv_dtype, speculation in axes:
        if search.attention_dp is None and attention_dp > 1 and tp * attention_dp > domain:
            continue  # only where it is asked for
        same = (tp, attention_dp, weights_named(quantization, shape), kv_dtype, speculation)
        if same not in seen:
            seen.add(same)
            yield {"tp": tp, "attention_dp": attention_dp, "quantization": quantization, "kv_dtype": kv_dtype, "speculation": speculation}


def _name(accelerator: str, settings: dict[str, Any]) -> str:
    parts = [accelerator, f"tp{settings['tp']}"]
    if settings["attention_dp"] != 1:
        parts.append(f"dp{settings['attention_dp']}")
    if settings["quantization"]:
        parts.append(str(settings["quantization"]))
    if settings["kv_dtype"]:
        parts.append(f"kv-{settings['kv_dtype']}")
    if (speculation := settings["speculation"]) is not None:
        parts.append(str(getattr(speculation, "method", speculation)))
    return " ".join(parts)
