"""Exact knowledge of simulated caches: the engines themselves are asked, as if their KV events came without delay."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvindex.memory import MemoryIndex
from workers.simengine import SimEngine


class ExactKnowledge:
    """What one engine holds, as the router asks it of KV events (`routing.router.CacheEvents`). Depths count index blocks.

    What was sent counts as held from the decision on until its time is over, as for the gateway's own followers of KV events.
    """

    def __init__(self, engine: SimEngine, worker: str) -> None:
        self.tiers = (f"kv:{worker}",)
        self.engine = engine
        self._expected: Counter[int] = Counter()
        self._until: deque[tuple[float, Sequence[int]]] = deque()

    def usable(self, hashes: Sequence[int], depth: int) -> int:
        expected = self._expected
        low, high = depth, len(hashes)
        while low < high:  # whoever expects a block expects or holds all before it
            middle = (low + high + 1) // 2
            if expected[hashes[middle - 1]]:
                low = middle
            else:
                high = middle - 1
        return low

    def expect(self, hashes: Sequence[int], held: int, until: float) -> None:
        new = hashes[held:]
        if new:
            self._expected.update(new)
            self._until.append((until, new))

    def withdraw(self, hashes: Sequence[int]) -> None:
        """Nothing is: what a refused request was to compute is expected a little longer."""

    def expire(self, now: float) -> None:
        until = self._until
        while until and until[0][0] <= now:
            _, hashes = until.popleft()
            for key in hashes:
                if self._expected[key] > 1:
                    self._expected[key] -= 1
                else:
                    del self._expected[key]


class ExactIndex(MemoryIndex):
    """An index that also says what the engines hold of the prompt that is being routed (`prompt`, one key per engine block)."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.prompt: Sequence[int] = ()
        self.followed: dict[str, ExactKnowledge] = {}

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        matches = dict(super().match(hashes))
        for holder, knowledge in self.followed.items():
            # also where nothing is held: what is expected is asked of those that hold something
            blocks = knowledge.engine.cached_prefix(self.prompt) // (knowledge.engine.block_size * self.step)
            depth = knowledge.usable(hashes, min(blocks, len(hashes)))
            if depth:
                matches[holder] = depth
        return matches
