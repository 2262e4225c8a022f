"""What a prefix hit needs of the KV cache groups beside full attention, by the rules of vLLM's own cache managers.

A hybrid model's layers form groups with a cache each: full attention holds a whole prefix, a sliding window only its last blocks, a
recurrent state (Mamba, linear attention, short convolution: one kind in the events) only checkpoints. The engine takes the longest
prefix that every group can serve. A block has the same engine hash in all groups, whatever their block sizes, since the hash
stands for the prefix up to the block's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

from kvindex.events import EngineHash

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
RECURRENT_KINDS = frozenset({"mamba"})
CHUNKED_KINDS = frozenset({"chunked_local_attention"})

Rule = Literal["whole", "window", "checkpoint"]


def rule_for(kind: str, window: int | None) -> Rule | None:
    """How a group of this kind is checked; None for a kind whose needs are not known.

    Chunked local attention needs its current chunk, but the chunk's length is not in the events; nor is it known what a window
    group of mixed widths needs. The whole prefix covers both.
    """
    if kind in RECURRENT_KINDS:
        return "checkpoint"
    if kind in WINDOW_KINDS and window:
        return "window"
    if kind in FULL_KINDS | WINDOW_KINDS | CHUNKED_KINDS:
        return "whole"
    return None


class CacheGroup:
    """The blocks one group holds, per storage tier, and the longest hit they allow.

    Hits are looked at where index blocks end. Of a group with smaller blocks only those that end there are looked at: blocks
    in between come and go with their neighbours.
    """

    def __init__(self, rule: Rule, group_tokens: int, index_tokens: int, window: int | None, tiers: int) -> None:
        self.rule = rule
        self._step = math.lcm(group_tokens, index_tokens) // index_tokens  # index blocks between two places to look
        self._needed = -(-((window or 1) - 1) // (self._step * index_tokens))  # vLLM: cdiv(window - 1, block size)
        self._copies: list[dict[EngineHash, int]] = [{} for _ in range(tiers)]

    def store(self, tier: int, hashes: Iterable[EngineHash]) -> None:
        copies = self._copies[tier]
        for block in hashes:
            copies[block] = copies.get(block, 0) + 1

    def remove(self, tier: int, hashes: Iterable[EngineHash]) -> None:
        copies = self._copies[tier]
        for block in hashes:
            if copies.get(block, 0) > 1:
                copies[block] -= 1
            else:
                copies.pop(block, None)

    def clear(self) -> None:
        for copies in self._copies:
            copies.clear()

    def holds(self, block: EngineHash, tier: int) -> bool:
        """Whether the block is in this tier or a faster one."""
        return any(block in copies for copies in self._copies[: tier + 1])

    def longest(self, depth: int, held: Callable[[int], bool]) -> int:
        """The longest hit of at most `depth` index blocks; `held(d)` says whether the group's block that ends with the first d is held."""
        step = self._step
        if self.rule == "checkpoint":
            return next((end for end in range(depth, 0, -1) if held(end)), 0)
        if self.rule == "whole":
            end = 0
            while end + step <= depth and held(end + step):
                end += step
            return end
        if not self._needed:
            return depth - depth % step
        run = 0
        for end in range(depth - depth % step, 0, -step):
            run = run + 1 if held(end) else 0
            if run == self._needed:
                return end + (run - 1) * step
        return run * step  # the sequence is shorter than the window: all of it
