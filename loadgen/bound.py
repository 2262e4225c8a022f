"""What a prefix cache could have hit: the infinite cache, and one pooled LRU cache of a given size.

Both are fed the requests as they were issued, each as the prefix-chained keys of its blocks. A hit is a whole block, and the last
token of a prompt is always computed (an engine needs its logits), so a fully cached prompt still recomputes its last block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


def _leading(chain: Sequence[int], blocks: int, held: Callable[[int], bool]) -> int:
    """How many leading blocks are held. Holders are prefix-closed (a held block's whole prefix is held), so bisection finds it."""
    low, high = 0, blocks
    while low < high:
        middle = (low + high + 1) // 2
        if held(chain[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


def _hit_tokens(blocks: int, block_size: int, tokens: int) -> int:
    return min(blocks * block_size, (tokens - 1) // block_size * block_size)


class InfiniteCache:
    """A cache that forgets nothing: the most that any routing can hit."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, chain: Sequence[int], blocks: int, block_size: int, tokens: int) -> int:
        """Issue a prompt of `tokens` tokens whose block keys are chain[:blocks]; returns its hit in tokens."""
        held = _leading(chain, blocks, self._seen.__contains__)
        self._seen.update(chain[held:blocks])
        return _hit_tokens(held, block_size, tokens)


class LruCache:
    """One cache of `capacity_tokens`, least recently used block first: the fleet's KV memory as if it were one worker's."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._held: OrderedDict[int, int] = OrderedDict()  # block key -> tokens, least recently used first
        self._tokens = 0

    def add(self, chain: Sequence[int], blocks: int, block_size: int, tokens: int) -> int:
        """Issue a prompt of `tokens` tokens whose block keys are chain[:blocks]; returns its hit in tokens."""
        held = self._held
        found = _leading(chain, blocks, held.__contains__)
        # Last block first: a prompt's leaves must be older than its prefix, or the prefix would be evicted before them.
        for position in range(blocks - 1, -1, -1):
            key = chain[position]
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = block_size
                self._tokens += block_size
        while self._tokens > self._capacity:
            _, size = held.popitem(last=False)
            self._tokens -= size
        return _hit_tokens(found, block_size, tokens)
