"""What rendering keeps from one turn to the next, within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class RecentlyUsed:
    """Values that are found again by their key, the least recently used out first; `max_bytes` is what they may cost together."""

    def __init__(self, max_bytes: int = 128 * 1024 * 1024):
        self.max_bytes = max_bytes
        self.kept_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """The value, None where it is not known."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: Any, cost: int) -> None:
        """Keep a value that takes about `cost` bytes, its key included."""
        replaced = self._kept.pop(key, None)
        self._kept[key] = (value, cost)
        self.kept_bytes += cost - (replaced[1] if replaced else 0)
        while self.kept_bytes > self.max_bytes:
            self.kept_bytes -= self._kept.popitem(last=False)[1][1]
