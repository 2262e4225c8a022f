"""Speculative decoding: how many tokens a step yields, and what drafting and verifying them costs.

Tokens per step are a constant of a worker; that drafts pay at a small batch and not at a large one comes from the cost: every sequence
brings 1 + drafts tokens to verify, which touch more experts and multiply more, and drafting itself takes passes of a small model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drafting:
    """One way of drafting. `verified` tokens go through the model per sequence and step, and yield `tokens_per_step`."""

    tokens_per_step: float = 1.0
    verified: int = 1
    passes: int = 0  # of the draft model per step
    cost: float = 0.0  # of one such pass, as a share of the model's own
    source: str = ""


NONE = Drafting()


@dataclass(frozen=True, slots=True)
class _Method:
    drafts: int  # when the number is not given
    acceptance: float  # probability that the next draft is right, given that those before it were
    sequential: bool  # one pass per draft; False: one pass for all
    cost: float
    source: str


_METHODS: dict[str, _Method] = {
    "eagle": _Method(3, 0.60, True, 0.025, "EAGLE: chain acceptance of chat and code; estimate"),
    "eagle3": _Method(3, 0.70, True, 0.025, "EAGLE-3; estimate"),
    "mtp": _Method(3, 0.77, True, 0.03, "GLM-5.2 MTP-3: 2.95 tokens per step (llm-d)"),
    "dspark": _Method(7, 0.843, False, 0.05, "Kimi K3 with DSpark: 4.73 tokens per step when coding (vLLM)"),
    "dflash": _Method(7, 0.85, False, 0.05, "DFlash (arXiv 2602.06036); estimate from its speed-ups"),
    "draft_model": _Method(4, 0.70, True, 0.08, "estimate: a draft model of a tenth of the size"),
    "ngram": _Method(4, 0.40, False, 0.0, "estimate: edits and quotations of the prompt"),
    "suffix": _Method(8, 0.55, False, 0.0, "estimate: repetitive agent output"),
}


def drafting(method: str | None, num_tokens: int | None = None) -> Drafting:
    """What a method does with `num_tokens` drafts a step (its usual number without one). Raises ValueError naming the known methods.

    A chain of d drafts that are each right with probability a yields 1 + a + ... + a^d tokens.
    """
    if method is None:
        return NONE
    known = _METHODS.get(method.lower())
    if known is None:
        raise ValueError(f"unknown speculation method {method!r}; known: {', '.join(_METHODS)}")
    drafts = num_tokens or known.drafts
    tokens = sum(known.acceptance**position for position in range(drafts + 1))
    return Drafting(round(tokens, 3), 1 + drafts, drafts if known.sequential else 1, known.cost, known.source)
