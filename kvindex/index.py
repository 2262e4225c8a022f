"""The index's interface: which worker holds how many leading blocks of a chain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class KVIndex(Protocol):
    """Block hashes and their holders.

    A hash is an unsigned 64-bit int and cumulative: it stands for its block and for everything before it. Holders are expected to be
    nearly prefix-closed, because engines evict the end of a chain before its beginning; backends search on that assumption.
    """

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Worker -> number of leading blocks of the chain that it holds; workers without the first block are left out.

        Exact where a worker's holdings are prefix-closed. Where they have holes the number may be too high or too low, but the
        worker does hold the first block and the last one that it is credited for.
        """
        ...

    def store(self, worker: str, hashes: Iterable[int]) -> None:
        """The worker now holds these blocks; holding one already is not an error."""
        ...

    def remove(self, worker: str, hashes: Iterable[int]) -> None:
        """The worker no longer holds these blocks; not holding one is not an error."""
        ...

    def clear(self, worker: str) -> None:
        """The worker holds nothing any more (restart, cache reset); the next match no longer counts it."""
        ...

    def __len__(self) -> int:
        """Blocks the index has an entry for. Blocks only held by cleared workers may count until they are swept."""
        ...
