"""What rendering keeps from one turn to the next, within a budget."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

RUN = 16  # of what stands in a row, so many are also remembered together: found by one look-up


class RecentlyUsed:
    """Values that are found again by their key; `max_bytes` is what they may cost together.

    Two generations in place of an order of use: what is asked for is in the young one or goes back there, and what is still in the
    old one when the young one has filled half of the budget goes. So a value that was asked for lately is found by one look-up.
    """

    def __init__(self, max_bytes: int = 128 * 1024 * 1024):
        self.max_bytes = max_bytes
        self._young: dict[Hashable, tuple[Any, int]] = {}
        self._old: dict[Hashable, tuple[Any, int]] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """What the values cost together."""
        return self._young_bytes + self._old_bytes

    def get(self, key: Hashable) -> Any:
        """The value, None where it is not known."""
        found = self._young.get(key)
        if found is None:
            found = self._old.pop(key, None)
            if found is None:
                return None
            self._old_bytes -= found[1]
            self.put(key, *found)
        return found[0]

    def get_all(self, keys: Sequence[Hashable]) -> list[Any]:
        """The values of these keys, None where one is not known."""
        return [self.get(key) if entry is None else entry[0] for key, entry in zip(keys, map(self._young.get, keys), strict=True)]

    def put(self, key: Hashable, value: Any, cost: int) -> None:
        """Keep a value that takes about `cost` bytes, its key included; not one that takes more than half of all."""
        if (replaced := self._young.pop(key, None)) is not None:
            self._young_bytes -= replaced[1]
        half = self.max_bytes // 2
        if cost > half:
            return
        if self._young_bytes + cost > half:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[key] = (value, cost)
        self._young_bytes += cost
