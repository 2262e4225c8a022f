"""Bytes of canonical prompt per token, learned per model from the prompt lengths that engines report."""

from __future__ import annotations

DEFAULT_BYTES_PER_TOKEN = 4.0
_LEARNING_RATE = 0.05
_RANGE = (0.5, 64.0)
_MIN_TOKENS = 64  # below, a chat template's own tokens dominate
_NOTABLE = 1.1  # a change worth acting on


class TokenRatio:
    """Text mode's scale between what is hashed (bytes) and what costs time (tokens)."""

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}
        self._announced: dict[str, float] = {}

    def of(self, model: str) -> float:
        """Bytes per token of this model."""
        return self._ratios.get(model, DEFAULT_BYTES_PER_TOKEN)

    def observe(self, model: str, length_bytes: int, prompt_tokens: int) -> bool:
        """Learn from one request; true when the ratio has moved by a tenth since it was last said so."""
        if prompt_tokens < _MIN_TOKENS or length_bytes <= 0:
            return False
        seen = min(max(length_bytes / prompt_tokens, _RANGE[0]), _RANGE[1])
        ratio = self._ratios.get(model)
        ratio = seen if ratio is None else ratio + _LEARNING_RATE * (seen - ratio)
        self._ratios[model] = ratio
        announced = self._announced.get(model, DEFAULT_BYTES_PER_TOKEN)
        if max(ratio, announced) / min(ratio, announced) < _NOTABLE:
            return False
        self._announced[model] = ratio
        return True
