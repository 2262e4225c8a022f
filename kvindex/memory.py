"""The index in this process: a dictionary from block hash to the set of its holders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

SWEEP_BLOCKS = 256  # blocks one store call sweeps: about 50 us
SHARED_SETS = 4096

# A set of holders is an int with a bit per slot, 0 where the slot's worker holds the block and 1 where it lacks it: "lacking". In
# this form the sets of a chain's blocks only ever grow in value from block to block, so that bisect can search a chain in C.
NOBODY = -1  # all bits: every worker lacks the block


class _Blocks(dict[int, int]):
    """Block hash -> lacking workers; a block that is not there is lacked by all."""

    def __missing__(self, block: int) -> int:
        return NOBODY


class MemoryIndex:
    """KVIndex in memory.

    A slot belongs to a worker's incarnation: `clear` gives the slot up, which hides all its blocks at once, and the blocks are swept
    by later `store` calls before the slot is given to another worker.

    Sweeping moves the blocks, a few at a time, from one dictionary into a new one, because a dictionary cannot be iterated
    incrementally while it changes. While that goes on, a block's holders are those of both.
    """

    def __init__(self) -> None:
        self._blocks = _Blocks()
        self._unswept = _Blocks()  # what a running sweep has not reached yet
        self._bits: dict[str, int] = {}  # worker -> its slot's bit
        self._workers: dict[int, str] = {}  # the reverse
        self._live = 0  # bits of all workers
        self._given_up = 0  # bits of cleared workers, waiting for a sweep
        self._sweeping = 0  # bits the running sweep takes out
        self._sets: dict[int, int] = {}  # equal sets share one object

    def __len__(self) -> int:
        if not self._unswept:
            return len(self._blocks)
        return len(self._blocks) + sum(1 for block in self._unswept if block not in self._blocks)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        if not hashes:
            return {}
        lacking_of = self._lacking_while_sweeping if self._unswept else self._blocks.__getitem__
        count = len(hashes)
        lacking = lacking_of(hashes[0])
        searched = self._live & ~lacking
        depths: dict[str, int] = {}
        if not searched:
            return depths
        whole = searched & ~lacking_of(hashes[count - 1])
        if whole:
            self._credit(depths, whole, count)
            searched ^= whole
        end = 1
        while searched:
            # The next block that somebody lacks who held all before it.
            end = bisect_right(hashes, lacking, end, count, key=lacking_of)
            if end == count or lacking_of(hashes[end - 1]) & searched:
                self._match_with_holes(depths, searched, hashes, lacking_of)
                break
            lacking = lacking_of(hashes[end])
            ending = searched & lacking
            self._credit(depths, ending, end)
            searched ^= ending
        return depths

    def store(self, worker: str, hashes: Iterable[int]) -> None:
        bit = self._bits.get(worker) or self._take_slot(worker)
        blocks, alone = self._blocks, self._shared(~bit)
        before = after = NOBODY  # neighbours in a chain mostly have the same holders
        for block in hashes:
            lacking = blocks.get(block)
            if lacking is None:
                blocks[block] = alone
            elif lacking is before:
                blocks[block] = after
            elif lacking & bit:
                before, after = lacking, self._shared(lacking ^ bit)
                blocks[block] = after
        if self._unswept or self._given_up:
            self._sweep()

    def remove(self, worker: str, hashes: Iterable[int]) -> None:
        bit = self._bits.get(worker)
        if bit is None:
            return
        tables = (self._blocks, self._unswept) if self._unswept else (self._blocks,)
        others = self._live ^ bit
        for block in hashes:
            for table in tables:
                lacking = table[block]
                if lacking & bit:
                    continue
                if others & ~lacking:
                    table[block] = self._shared(lacking | bit)
                else:
                    del table[block]

    def clear(self, worker: str) -> None:
        bit = self._bits.pop(worker, None)
        if bit is None:
            return
        del self._workers[bit]
        self._live ^= bit
        self._given_up |= bit

    def hashes(self) -> list[int]:
        """All blocks that have an entry, mostly in the order they were stored in; while a sweep runs, some of them twice."""
        return [*self._unswept, *self._blocks]

    def held(self, hashes: Iterable[int]) -> dict[str, list[int]]:
        """Worker -> those of the blocks that it holds; workers that hold none are left out."""
        lacking_of = self._lacking_while_sweeping if self._unswept else self._blocks.__getitem__
        groups: dict[int, list[int]] = {}
        for block in hashes:
            groups.setdefault(lacking_of(block), []).append(block)
        found: dict[str, list[int]] = {}
        for lacking, blocks in groups.items():
            holding = self._live & ~lacking
            while holding:
                bit = holding & -holding
                found.setdefault(self._workers[bit], []).extend(blocks)
                holding ^= bit
        return found

    def _match_with_holes(self, depths: dict[str, int], searched: int, hashes: Sequence[int], lacking_of: Callable[[int], int]) -> None:
        """Where somebody's blocks have holes: search in groups of workers that hold block `low` and lack block `high`."""
        groups = [(0, len(hashes) - 1, searched)]
        while groups:
            low, high, group = groups.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                holding = group & ~lacking_of(hashes[middle])
                if holding == group:
                    low = middle
                    continue
                if holding:
                    groups.append((middle, high, holding))
                    group ^= holding
                high = middle
            self._credit(depths, group, low + 1)

    def _lacking_while_sweeping(self, block: int) -> int:
        return self._blocks[block] & self._unswept[block]

    def _credit(self, depths: dict[str, int], group: int, depth: int) -> None:
        """Every worker of the group holds `depth` leading blocks."""
        while group:
            bit = group & -group
            depths[self._workers[bit]] = depth
            group ^= bit

    def _take_slot(self, worker: str) -> int:
        """The lowest free slot: low slots keep the sets small."""
        taken = self._live | self._given_up | self._sweeping
        bit = ~taken & (taken + 1)
        self._bits[worker] = bit
        self._workers[bit] = worker
        self._live |= bit
        return bit

    def _shared(self, lacking: int) -> int:
        """The one object for this set; there are few different sets, and an int of its own would cost each block 32 bytes."""
        if len(self._sets) >= SHARED_SETS:
            self._sets.clear()  # blocks keep the objects they have; only later ones get new ones
        return self._sets.setdefault(lacking, lacking)

    def _sweep(self) -> None:
        """Sweep some blocks; a slot is free once a sweep that began after it was given up has ended."""
        if not self._unswept:
            self._unswept, self._blocks = self._blocks, _Blocks()
            self._sweeping, self._given_up = self._given_up, 0
        blocks, unswept = self._blocks, self._unswept
        for _ in range(min(SWEEP_BLOCKS, len(unswept))):
            block, lacking = unswept.popitem()
            lacking = (lacking | self._sweeping) & blocks[block]
            if lacking != NOBODY:
                blocks[block] = self._shared(lacking)
        if not unswept:
            self._unswept = _Blocks()  # popitem does not shrink the table
            self._sweeping = 0
