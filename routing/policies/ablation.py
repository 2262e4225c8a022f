"""`warm` without some of its terms, to measure what each is worth.

`Warm` itself knows nothing of this: terms are taken out of what it answers, so the full rule pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement, Terms
from routing.policies.warm import Warm, _break_ties, _hold_still

# term -> what is missing without it
TERMS = {
    "congestion": "own work is not priced by what it costs those who arrive behind it",
    "evict": "KV capacity is not looked at",
    "crowd": "new sessions do not count how many live on a worker already",
    "decode": "the speed of decoding is not looked at",
    "repeated": "a shared prefix that would be computed once more counts in full",
    "hold": "a session leaves a home that is busy as soon as another worker is cheaper",
    "ties": "costs that differ by noise decide",
}


_PARTS = ("congestion", "evict", "crowd", "decode")  # terms that are added up


class _NothingShared(Warm):
    """`Warm` where no other session begins alike."""

    def sharing(self, placement: Placement) -> float:
        return 0.0


class Ablated:
    """`Warm` without the terms named (keys of `TERMS`). Raises ValueError for others.

    A session whose home has nothing to prefill stays there in any case, as under `Warm`.
    """

    def __init__(self, *without: str) -> None:
        if unknown := [term for term in without if term not in TERMS]:
            raise ValueError(f"no such term: {', '.join(unknown)}; known: {', '.join(TERMS)}")
        self.without = frozenset(without)
        self.name = "-".join(["warm", *(["without", *without] if without else [])])
        self._columns = [Terms._fields.index(term) for term in _PARTS if term in self.without]
        self._warm = _NothingShared() if "repeated" in self.without else Warm()

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        session = placement.session
        regret = session.regret if session is not None else 0.0
        ranked = self._warm.rank(placement, candidates)
        if len(ranked) == 1:
            return ranked
        ranked = sorted([self._without_parts(entry) for entry in ranked])
        if session is not None and session.home is not None:
            session.regret = regret
            if "hold" not in self.without:
                _hold_still(session, session.home, ranked)
        elif "ties" not in self.without:
            _break_ties(ranked, session is not None, placement.crowded)
        return ranked

    def _without_parts(self, entry: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = list(entry)
        for column in self._columns:
            parts[0] -= parts[column]
            parts[column] = 0.0
        return tuple(parts)


def ablated(term: str) -> Ablated:
    """`warm` without one term."""
    return Ablated(term)
